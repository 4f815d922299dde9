"""Damaged state dicts are refused by a message, and change nothing; what loads can be stepped."""

import collections
import copy
import random
import warnings

import pytest
import torch
from attacks import Before, complaint, step_works
from junk import junk
from runs import BF16, FORMATS, FP32, MASTER, REMAINDERS, parameters, train, values

from megaopt import FusedAdam


def changed_tensor(tensor, random):
    """A tensor that differs in one way from what it was, or in none."""
    changes = [
        lambda t: t.to(random.choice([torch.bfloat16, torch.float16, torch.float32])),
        lambda t: t.double(),
        lambda t: t.to(random.choice([torch.int16, torch.int32, torch.bool, torch.complex64])),
        lambda t: t.to(random.choice([torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])),
        lambda t: t.to("meta"),
        lambda t: t.flatten(),
        lambda t: t[None],
        lambda t: t.flatten()[:-1],
        lambda t: t.flatten()[:1].expand(t.numel()).reshape(t.shape),
        lambda t: t.t() if t.dim() == 2 else t,
        lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
        lambda t: t.clone().requires_grad_() * 1 if t.dtype == torch.float32 else t,
        lambda t: torch.full_like(t, float("nan")) if t.dtype == torch.float32 else t,
        lambda t: t.float().to_sparse(),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: t.numpy() if t.dtype == torch.float32 else t.tolist(),
        lambda t: t.tolist(),
        lambda t: float(t.float().sum()),
    ]  # fmt: skip
    try:
        return random.choice(changes)(tensor)
    except (RuntimeError, TypeError):  # a sparse tensor, say, which an earlier change has made
        return tensor


def places(value):
    """All (container, key) within nested dicts and lists, which may contain themselves."""
    found, containers, seen = [], [value], {id(value)}
    while containers:
        container = containers.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, content in items:
            found.append((container, key))
            if isinstance(content, (dict, list)) and id(content) not in seen:
                seen.add(id(content))
                containers.append(content)
    return found


def damaged(value, random):
    """A nested value after one change at one place of it; the containers are changed in place."""
    container, key = random.choice(places(value))
    content, kind = container[key], random.random()
    if kind < 0.4 and isinstance(content, torch.Tensor):
        container[key] = changed_tensor(content, random)
    elif kind < 0.65:
        container[key] = junk(random)
    elif kind < 0.75:
        del container[key]
    elif kind < 0.8:
        container[key] = random.choice([[content], (content,), {"a": content}, {0: content}])
    elif kind < 0.9:
        other, place = random.choice(places(value))
        container[key] = other[place]
    elif isinstance(container, dict):
        name = random.choice(["x", 0, 7, None, "exp_avg_scale", "step", "master_param", (1,), 1.5])
        container[name] = container.pop(key) if random.random() < 0.5 else junk(random)
    else:
        container.insert(random.randrange(len(container) + 1), junk(random))
    return value


SHAPES = [(2, 3), (4,), (1,)]


def made(options):
    """On a GPU, which they need, under the contracts of others."""
    device = "cuda" if "contract" in options else "cpu"
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(SHAPES, BF16)]
    named = [(f"layer.{index}", param) for index, param in enumerate(params)]
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.5, "betas": (0.5, 0.75)}]
    return FusedAdam(groups, **options)


def ours(options):
    def saved():
        source = made(options)
        step_works(source)
        step_works(source)
        return source.state_dict()

    return saved


def partly_made():
    """Of which one parameter has no gradient yet, and another no master."""
    source = made(MASTER)
    params = [param for group in source.param_groups for param in group["params"]]
    params[0].grad = torch.ones_like(params[0])
    source.step()
    source.set_scaled_state(params[1], "exp_avg", torch.ones(4))
    return source.state_dict()


def torchs():
    params = parameters(SHAPES, FP32)
    theirs = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=0.25)
    train(theirs, 2)
    return theirs.state_dict()


def transformer_engines(master_dtype):
    """As TransformerEngine's FusedAdam saves: fp32, but int16 remainders."""

    def saved():
        state = {
            index: {
                "exp_avg": values(shape, index),
                "exp_avg_sq": values(shape, index).square(),
                "master_param": (values(shape, index) * 100).to(master_dtype),
            }
            for index, shape in enumerate(SHAPES)
        }
        hyper = {"lr": 0.125, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-6}
        group = {**hyper, "weight_decay": 0.25, "step": 4}
        return {"state": state, "param_groups": [{**group, "params": [0, 1]},
                                                 {**group, "params": [2]}]}  # fmt: skip

    return saved


FP8 = FORMATS["fp8_moments"]
TORCH = {"contract": "torch", "adam_w_mode": False, "exp_avg_dtype": BF16}
TE = {**MASTER, "contract": "te", "capturable": True, "exp_avg_sq_dtype": torch.float16}
CASES = {
    "no_masters": ({}, ours({})),
    "fp32_masters": (MASTER, ours(MASTER)),
    "remainders": (REMAINDERS, ours(REMAINDERS)),
    "fp8_moments": (FP8, ours(FP8)),
    "fp16_masters": (FORMATS["fp16_master_bf16_fp16"], ours(FORMATS["fp16_master_bf16_fp16"])),
    "capturable": ({**MASTER, "capturable": True}, ours({**MASTER, "capturable": True})),
    "adam": ({"adam_w_mode": False}, ours({"adam_w_mode": False})),
    "partly_made": (MASTER, partly_made),
    "torchs": (MASTER, torchs),
    "torchs_into_fp8": ({**FP8, "capturable": True}, torchs),
    "transformer_engines": (MASTER, transformer_engines(FP32)),
}
GPU_CASES = {"contract_torch": (TORCH, ours(TORCH)), "contract_te": (TE, ours(TE))}
COUNTS = [46, pytest.param(2000, marks=pytest.mark.exhaustive)]
"""Of each: some 500 in all, and 22,000."""


def attack(options, saved, generator):
    """What became of a load, in a word, and what is wrong with that, if anything."""
    target = made(options)
    step_works(target)
    bad = copy.deepcopy(saved)
    for _ in range(generator.choice([1, 1, 2, 3])):
        damaged(bad, generator)
        if not bad:
            break
    before = Before(target)
    try:
        target.load_state_dict(bad)
    except Exception as error:
        before.assert_same()
        return "refused", complaint(error, (ValueError,)), error
    step_works(target)
    return "loaded", None, None


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("options", "make"), CASES.values(), ids=CASES)
def test_damaged_state_dicts(options, make, count):
    saved, outcomes = make(), collections.Counter()
    for seed in range(count):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*of nested tensors is in prototype", UserWarning)
            warnings.filterwarnings("ignore", ".*is kept, and no step reads it", UserWarning)
            # a tensor that is damaged twice
            warnings.filterwarnings("ignore", "Casting complex values to real", UserWarning)
            outcome, wrong, error = attack(options, saved, random.Random(seed))
        assert wrong is None, f"try {seed}: {wrong}: {type(error).__name__}: {error}"
        outcomes[outcome] += 1
    assert set(outcomes) == {"refused", "loaded"}, outcomes


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "make"), GPU_CASES.values(), ids=GPU_CASES)
def test_damaged_state_dicts_under_other_contracts(options, make):
    test_damaged_state_dicts(options, make, 200)
