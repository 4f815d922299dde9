"""Damaged state dicts are refused by a message, and change nothing; what loads can be stepped."""

import collections
import copy
import random
import warnings

import pytest
import torch
from attacks import Before, complaint, step_works
from junk import damaged
from runs import BF16, FORMATS, FP32, MASTER, REMAINDERS, parameters, train, values

from megaopt import FusedAdam

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
