"""What many tests do with an optimizer: have it refuse something, give it another's weights."""

import contextlib

import pytest
from kinds import on_the_host
from runs import BF16, FORMATS, assert_same, parameters, params_of, snapshot, train

from megaopt import FusedAdam

all_formats = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
HYPER = {"lr": 0.01, "weight_decay": 0.1}


def made(options, dtype=BF16, **more):
    return FusedAdam(parameters(dtype=dtype), **{**HYPER, **options, **more})


both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])
both_modes = pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])


@contextlib.contextmanager
def refused(optimizer, message, error=ValueError):
    """Fails unless what is done raises this error, and weights, states and groups stay."""
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        yield
    assert_same(snapshot(optimizer), before)


def copy_weights(source, target):
    """Unseen by torch's counters, as if both had been made of the same numbers."""
    for own, param in zip(params_of(target), params_of(source), strict=True):
        own.data.copy_(param.data)


def assert_same_numbers(found, expected):
    """Fails unless two runs are the same but for where lr, in fp32, and step counts lie."""
    assert_same(on_the_host(snapshot(found)), on_the_host(snapshot(expected)))


def train_all(optimizers, steps, first=0):
    """Each as `train` does it, one after the other."""
    for optimizer in optimizers:
        train(optimizer, steps, first)
