"""Constructor calls and groups of any kind are refused by a message, or can be stepped."""

import collections
import inspect
import random
import warnings

import pytest
import torch
from attacks import Before, complaint, step_works
from junk import NUMBERS, TENSORS, junk
from runs import BF16, FP16, FP32, SHAPES, parameters, params_of

from megaopt import FusedAdam

ARGUMENTS = [name for name in inspect.signature(FusedAdam).parameters if name != "params"]
GOOD = {
    "lr": [1e-3, 0, torch.tensor(0.5), 1],
    "betas": [(0.9, 0.95), [0, 0.5]],
    "eps": [1e-8, 0.0],
    "weight_decay": [0.0, 0.1],
    "dtype": [None, FP32],
    "master_weights": [None, True, False],
    "master_weight_dtype": [FP32, FP16],
    "exp_avg_dtype": [FP32, BF16, FP16, torch.float8_e4m3fn, torch.uint8],
    "exp_avg_sq_dtype": [FP32, BF16, FP16],
    "nonfinite": ["propagate", "skip", "error"],
    "state_device": [None, "cpu", {"moments": "cpu"}],
    "step_counts": [None, "group", "parameter"],
    "makes_states": [None, "stepped", "trainable", "all"],
    "direct_cast": [None, True, False],
    "contract": ["ieee", "te", "torch"],
    "backend": ["auto", "reference"],
}


def entry(generator):
    """What may stand in a list of parameters; mostly one."""
    kind = generator.random()
    if kind < 0.7:
        return torch.nn.Parameter(torch.ones(generator.choice(SHAPES), dtype=BF16))
    bad = [junk(generator), generator.choice(TENSORS)(), ("a", junk(generator))]
    good = torch.ones(3)
    return generator.choice(
        [*bad, good, ("a", good), (good,), (), ("a", good, 1), [good], (1, good)]
    )


def a_group(generator):
    group = {"params": some_params(generator)}
    for _ in range(generator.choice([0, 0, 1, 2])):
        names = [*ARGUMENTS, "step", "maximize", "param_names", "params", "foreach", "mine", 3]
        name = generator.choice(names)
        group[name] = generator.choice([junk(generator), *GOOD.get(name, [])])
    if generator.random() < 0.05:
        del group["params"]
    return group


def some_params(generator):
    """Parameters in some container, or something else."""
    kind = generator.random()
    if kind < 0.1:
        return junk(generator)
    entries = [entry(generator) for _ in range(generator.choice([0, 1, 1, 2, 3]))]
    if kind < 0.7:
        entries = [each for each in entries if isinstance(each, torch.nn.Parameter)] or parameters()
    others = [tuple, iter, set, dict.fromkeys, lambda found: found[0], torch.nn.ParameterList]
    return generator.choice([list] * 10 + others)(entries)


def arguments(generator):
    names = generator.sample(ARGUMENTS, generator.choice([0, 1, 2, 3]))
    return {
        name: generator.choice(GOOD[name])
        if name in GOOD and generator.random() < 0.6
        else generator.choice([junk(generator), True, generator.choice(NUMBERS)])
        for name in names
    }


def construct(generator):
    """What became of a call, in a word, and what is wrong with that, if anything."""
    kinds = (ValueError, TypeError)
    try:
        groups = generator.random() < 0.4
        params = [a_group(generator) for _ in range(2)] if groups else some_params(generator)
        given = arguments(generator)
    except Exception:
        return "nothing", None, None  # no such container of such entries
    known = [each for each in params if isinstance(each, dict)] if isinstance(params, list) else []
    before = [dict(each) for each in known]
    try:
        optimizer = FusedAdam(params, **given)
    except Exception as error:
        for group, given_group in zip(known, before, strict=True):
            assert group.keys() == given_group.keys()
            assert all(group[name] is given_group[name] for name in group)
        contract = given.get("contract")
        if isinstance(contract, str) and contract in ("te", "torch"):
            kinds = (*kinds, RuntimeError)  # these need a GPU
        return "refused", complaint(error, kinds), error
    if all(param.device.type == "cpu" for param in params_of(optimizer)):
        step_works(optimizer)
    return "made", None, None


def add(generator):
    """The same for a group that is added to an optimizer."""
    options = generator.choice([{}, {"capturable": True}, {"dtype": FP32}])
    optimizer = FusedAdam(parameters([(2,)]), **options)
    step_works(optimizer)
    before = Before(optimizer)
    try:
        group = generator.choice([a_group, a_group, a_group, junk])(generator)
    except Exception:
        return "nothing", None, None
    try:
        optimizer.add_param_group(group)
    except Exception as error:
        before.assert_same()
        return "refused", complaint(error), error
    if all(param.device.type == "cpu" for param in params_of(optimizer)):
        step_works(optimizer)
    return "made", None, None


@pytest.mark.parametrize(
    ("what", "count"),
    [
        (construct, 380),
        (add, 120),
        pytest.param(construct, 9_000, marks=pytest.mark.exhaustive),
        pytest.param(add, 3_000, marks=pytest.mark.exhaustive),
    ],
)
def test_calls_of_any_kind(what, count):
    outcomes = collections.Counter()
    for seed in range(count):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*of nested tensors is in prototype", UserWarning)
            warnings.filterwarnings("ignore", ".*has a gradient: this step", UserWarning)
            outcome, wrong, error = what(random.Random(seed))
        assert wrong is None, f"try {seed}: {wrong}: {type(error).__name__}: {error}"
        outcomes[outcome] += 1
    assert outcomes["refused"] > count / 4, outcomes
    assert outcomes["made"] > count / 8, outcomes
