"""A rule that an average of the weights follows: kernel and twin, where it starts, what it is."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from bits import assert_same_bits
from runs import BF16, FP32, parameters
from step_cases import (
    CURATED,
    EVERY_RULE,
    GROUP,
    assert_same_buffers,
    buffers,
    copied,
    name_of,
    reference_step,
    triton_step,
)

from megaopt.kernels.rules import EMA, RULES
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import NOT_NEGATIVE
from megaopt.options.options import Numbers, Options

OWN = {**GROUP, "ema_decay": 0.9}
MASTERS = "bfloat16-bfloat16-float32-float32-float32"
DRAWN = "bfloat16-bfloat16_stochastic-none-bfloat16_stochastic-bfloat16_stochastic"
FORMATS = {name_of(each): each for each in CURATED}
SGD = RULES["sgd_momentum", "ieee"]
AVERAGED = SGD.then(EMA)


def stepped(step, name, rule, device):
    """The buffers before and after; all moments have one format."""
    formats = FORMATS[name]
    own = {"moments": formats.moments[:1] * len(rule.moments), "moment_names": rule.moments}
    formats = dataclasses.replace(formats, **own)
    before = buffers(formats, [1, 1000], device)
    after = copied(before)
    step(after, formats, rule, OWN)
    return before, after


@pytest.mark.parametrize("name", [MASTERS, DRAWN])
@pytest.mark.parametrize("first", EVERY_RULE, ids=lambda rule: rule.name)
def test_kernel_and_twin_agree(first, name, device):
    rule = first.then(EMA)
    _, kernel = stepped(triton_step, name, rule, device)
    _, twin = stepped(reference_step, name, rule, device)
    assert_same_buffers(kernel, twin)


def test_the_average_is_of_the_new_param_and_leaves_the_rest(device):
    before, after = stepped(triton_step, MASTERS, AVERAGED, device)
    decay, rest = EMA.scalars(OWN)
    for old, new, param in zip(before["ema"], after["ema"], after["master"], strict=True):
        expected = old * decay + param * rest
        known = ~expected.isnan()  # one pattern of NaNs is stored
        assert known.any()
        assert_same_bits(new[known], expected[known], "ema")
    alone = {slot: tensors for slot, tensors in before.items() if slot != "ema"}
    formats = dataclasses.replace(
        FORMATS[MASTERS], moments=FORMATS[MASTERS].moments[:1], moment_names=SGD.moments
    )
    triton_step(alone, formats, SGD, OWN)
    assert_same_buffers(alone, {slot: after[slot] for slot in alone})


def test_only_what_can_follow_may():
    with pytest.raises(ValueError, match="other must be a rule that may follow one, like EMA, got"):
        EMA.then(SGD)


# --- in an optimizer


@dataclass(frozen=True, kw_only=True)
class AveragedOptions(Options):
    NUMBERS: ClassVar[Numbers] = Numbers(
        dict.fromkeys(("lr", "momentum", "dampening", "weight_decay", "ema_decay"), NOT_NEGATIVE)
    )
    momentum_buffer_dtype: torch.dtype | str = torch.float32
    ema_dtype: torch.dtype | str = torch.float32


class Averaged(FusedOptimizer):
    rule = AVERAGED

    def __init__(self, params, masters, **options):
        numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1}
        super().__init__(
            params, {**numbers, "ema_decay": 0.75}, AveragedOptions(**options), masters
        )


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_average_starts_as_the_weight(dtype, backend, capturable):
    params = parameters(dtype=dtype)
    start = [param.detach().clone().float() for param in params]
    masters = dtype == BF16
    optimizer = Averaged(params, masters, backend=backend, capturable=capturable)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param, first in zip(params, start, strict=True):
        state = optimizer.state[param]
        master = state["master_param"]
        new = param.detach() if master is None else master
        assert not new.numel() or (new != first).any()
        assert_same_bits(state["ema"], first * 0.75 + new * 0.25, "ema")
