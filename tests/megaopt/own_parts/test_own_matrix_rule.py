"""A rule for whole matrices from a file outside the package: Muon, in tests/support/own_muon.py."""

import dataclasses
import inspect
import math
from functools import partial

import own_muon
import pytest
import torch
from fsdp2_ranks import trained
from handling import copy_weights
from interpreted import interpreted
from own_muon import Muon
from runs import BF16, FP32, MASTER, REMAINDERS, assert_same, parameters, snapshot, through_a_file
from runs import train as train_params

from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.average import EMA
from megaopt.kernels.rules.matrix import Transform

ADAMW = RULES["adamw", "ieee"]

SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 64), (4, 2, 3)]
"""Tall, wide, uneven on two ranks and empty on the second; and two that are no matrices."""
KINDS = {
    "fp32": {"weights": FP32},
    "masters": {"weights": BF16, **MASTER},
    "remainders": {"weights": BF16, **REMAINDERS, "momentum_buffer_dtype": BF16},
    "stochastic": {
        "weights": BF16, "weight_rounding": "stochastic", "seed": 7,
        "momentum_buffer_dtype": "bfloat16_stochastic",
    },
}  # fmt: skip


def test_it_is_one_file():
    assert len(inspect.getsource(own_muon).splitlines()) <= 150


# --- ranks


LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}


RUNS = [
    pytest.param(*layout, options, id=f"{name}-{kind}")
    for name, layout in LAYOUTS.items()
    for kind, options in KINDS.items()
    if name in ("1", "2") or kind == "stochastic"
]


@pytest.mark.parametrize(("world", "replicas", "options"), RUNS)
@pytest.mark.sample(2)
def test_ranks_have_the_bits_of_one_process(on_ranks, world, replicas, options):
    """Weights, masters, moments; of a clipped step, too."""
    run, given = partial(trained, shapes=SHAPES, clip_norm=1.0), {**options, "optimizer": Muon}
    expected = run(given, 3)
    for rank, found in enumerate(on_ranks(world, run, given, 3, replicas)):
        assert_same(found, expected, f"rank {rank}")


# --- one process, beside plain torch


def oracle(weight, buffer, grad, lr, momentum, decay):
    """One step of a matrix, as the papers write it, in fp32."""
    buffer = buffer * momentum + grad * (1 - momentum)
    found = buffer * momentum + grad * (1 - momentum)
    if weight.dim() == 2:
        rows, columns = weight.shape
        found = found / (found.norm() + 1e-7)
        found = found.T.contiguous() if rows > columns else found
        for _ in range(5):
            gram = found @ found.T
            found = 3.4445 * found + (-4.775 * gram + 2.0315 * (gram @ gram)) @ found
        found = (found.T if rows > columns else found) * math.sqrt(max(1, rows / columns))
    weight = weight - weight * (lr * decay)
    return weight - found * lr, buffer


def test_its_steps_are_plain_torchs():
    """With numbers that fp32 has, so that the host rounds none."""
    lr, momentum, decay = 2.0**-5, 0.9375, 0.125
    optimizer = Muon(parameters(SHAPES, FP32), lr, momentum, decay, backend="reference")
    weights = snapshot(optimizer)["weights"]
    buffers = [torch.zeros_like(weight) for weight in weights]
    for step in range(3):
        train_params(optimizer, 1, step)
        grads = [param.grad for param in optimizer.param_groups[0]["params"]]
        for i, grad in enumerate(grads):
            weights[i], buffers[i] = oracle(weights[i], buffers[i], grad, lr, momentum, decay)
    found = snapshot(optimizer)
    assert_same(found["weights"], weights)
    assert_same([own["momentum_buffer"] for own in found["states"]], buffers)


def test_a_matrix_comes_out_about_orthogonal():
    """Its singular values, which were from 1.1 to 9, are those that Jordan's factors lead to."""
    (param,) = params = parameters([(24, 40)], FP32)
    before = param.detach().clone()
    train_params(Muon(params, 1.0, 0.5, 0.0, backend="reference"), 1)
    sizes = torch.linalg.svdvals(before - param.detach())
    assert sizes.min() > 0.5
    assert sizes.max() < 1.3


@pytest.mark.sample(2)
@interpreted
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_kernel_and_twin_take_the_same_steps(options, capturable):
    options = dict(options)
    dtype = options.pop("weights")
    pair = [
        Muon(parameters(SHAPES[:3], dtype), backend=backend, capturable=capturable, **options)
        for backend in ("triton", "reference")
    ]
    start = snapshot(pair[0])["weights"]
    for optimizer in pair:
        train_params(optimizer, 2)
    assert_same(*map(snapshot, pair))
    with pytest.raises(AssertionError):
        assert_same(snapshot(pair[0])["weights"], start)


def test_it_resumes_to_the_bit():
    straight, before, after = (Muon(parameters(SHAPES, BF16), **MASTER) for _ in range(3))
    train_params(straight, 4)
    train_params(before, 2)
    copy_weights(before, after)
    after.load_state_dict(through_a_file(before.state_dict()))
    train_params(after, 2, first=2)
    assert_same(snapshot(after), snapshot(straight))


def test_a_step_that_fails_in_a_transform_leaves_everything(monkeypatch):
    optimizer = Muon(parameters(SHAPES, FP32), backend="reference")
    train_params(optimizer, 1)
    before, product, seen = snapshot(optimizer), own_muon.product, []

    def failing(*factors):
        seen.append(factors)
        if len(seen) == 40:  # of the third matrix; two are written
            raise RuntimeError("no memory")
        return product(*factors)

    monkeypatch.setattr(own_muon, "product", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        train_params(optimizer, 1, first=1)
    monkeypatch.undo()
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"meets": "all"}, "meets of own must be 'nobody', 'rows' or 'whole', got 'all'"),
        ({"apply": ADAMW}, "apply of own must have no moments, got exp_avg, exp_avg_sq"),
        ({"inner": ADAMW.then(EMA)}, "inner of own must have moments that start as zeros"),
    ],
    ids=["meets", "apply", "inner"],
)
def test_a_matrix_rule_that_no_plan_steps_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(own_muon.MUON, name="own", **change)


@pytest.mark.parametrize("made", [torch.Tensor.bfloat16, lambda x: x.mT], ids=["bf16", "shape"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
def test_what_comes_after_is_fp32_of_the_matrix_shape(made, backend, monkeypatch):
    after = Transform(lambda matrix, work: made(own_muon.orthogonal(matrix, work)))
    own = dataclasses.replace(own_muon.MUON, after=after)
    monkeypatch.setattr(own_muon.MuonOptions, "MATRIX", own)
    param = torch.nn.Parameter(torch.ones(4, 6))
    param.grad = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"after of muon must return torch.float32 of shape"):
        Muon([param], backend=backend).step()
