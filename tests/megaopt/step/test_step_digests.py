"""Digests of a step are those of the tensors that it read and left, of every kind of optimizer."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from interpreted import interpreted
from kinds import KINDS, made
from mutants import mutant
from one_rank import group_of_one
from runs import MASTER, REMAINDERS, give_gradients, parameters, params_of, train
from torch.distributed.tensor import Shard, distribute_tensor

from megaopt import FusedAdam, digest, digest_many, kernels
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.place import Place
from megaopt.kernels.step import kernel, launch
from megaopt.params import view_of
from megaopt.recording.digest import of_places

each_backend = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=interpreted)]
)
ADAM = ("grad", "weight", "master_param", "exp_avg", "exp_avg_sq")


def quantities_of(optimizer):
    moments = [moment.name for moment in optimizer.rule.moment_specs]
    scales = [f"{name}_scale" for name in ("master_param", *moments)]
    return ["grad", "weight", "master_param", *moments, *scales]


def tensor_of(optimizer, param, quantity, grads):
    if quantity == "grad":
        return grads[param]
    if quantity == "weight":
        return view_of(param).codes.detach()
    return optimizer.state[param][quantity]


def assert_digests(optimizer, grads):
    """Each is megaopt.digest of the tensor; returns how many there were."""
    count = 0
    for found in optimizer.digests:
        for param, rows in zip(found.params, found.lanes, strict=True):
            for quantity, lanes in zip(found.quantities, rows, strict=True):
                expected = digest(tensor_of(optimizer, param, quantity, grads))
                assert torch.equal(lanes, expected), quantity
                count += 1
    return count


def step_with_grads(optimizer, step, **options):
    params = params_of(optimizer)
    give_gradients(params, step)
    grads = {param: param.grad.clone() for param in params}
    optimizer.step(**options)
    return grads


@each_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_digests_are_those_of_the_tensors(kind, backend):
    optimizer = made(kind, backend=backend)
    optimizer.record_digests(quantities_of(optimizer))
    for step in range(2):
        grads = step_with_grads(optimizer, step)
        assert assert_digests(optimizer, grads) >= 2 * len(grads)


@interpreted
@pytest.mark.parametrize("kind", ["fp32_masters", "drawn", "blocks", "fp16_moments"])
def test_digests_change_no_bit(kind):
    plain, recorded = made(kind, backend="triton"), made(kind, backend="triton")
    recorded.record_digests(quantities_of(recorded))
    for optimizer in (plain, recorded):
        train(optimizer, 2)
    for one, other in zip(params_of(plain), params_of(recorded), strict=True):
        assert torch.equal(one, other)


def adam(backend="reference", shapes=((70, 40), (5,), (0,)), **options):
    options = {**MASTER, "lr": 0.1, **options}
    return FusedAdam(parameters(shapes), backend=backend, **options)


@each_backend
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_that_is_left_out_has_the_digests_of_what_stayed(backend, capturable):
    optimizer = adam(backend, nonfinite="skip", capturable=capturable)
    optimizer.record_digests(ADAM)
    step_with_grads(optimizer, 0)
    before = [param.clone() for param in params_of(optimizer)]
    params_of(optimizer)[0].grad[3, 3] = torch.inf
    optimizer.step()
    grads = {param: param.grad for param in params_of(optimizer)}
    assert all(map(torch.equal, params_of(optimizer), before))
    assert assert_digests(optimizer, grads) == 15


@each_backend
def test_the_gradient_is_the_one_that_the_step_found(backend):
    optimizer = adam(backend, write_unscaled_grads=True)
    optimizer.record_digests(["grad"])
    optimizer.grad_scale = torch.full((), 1024.0)
    grads = step_with_grads(optimizer, 0, clip_norm=1.0)
    assert not torch.equal(params_of(optimizer)[0].grad, grads[params_of(optimizer)[0]])
    assert assert_digests(optimizer, grads) == 3


@interpreted
def test_parts_have_their_places():
    (whole,) = parameters([(4096,)])
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split([1024, 1030, 2042])]
    for part, first in zip(parts, (0, 1024, 2054), strict=True):
        part.megaopt_first_element = first
        part.megaopt_whole_shape = whole.shape
    found = []
    for params in ([whole], parts):
        optimizer = FusedAdam(params, lr=0.1, backend="triton", dtype=torch.float32)
        optimizer.record_digests(ADAM)
        for param in params:
            first = getattr(param, "megaopt_first_element", 0)
            param.grad = torch.arange(first, first + len(param)).bfloat16()
        optimizer.step()
        found.append(sum(each.lanes.sum(0) for each in optimizer.digests))
    assert torch.equal(*found)


def test_digests_begin_and_end_between_steps():
    optimizer = adam()
    train(optimizer, 1)
    assert optimizer.digests == []
    optimizer.record_digests(["weight"])
    assert optimizer.digests == []
    assert assert_digests(optimizer, step_with_grads(optimizer, 1)) == 3
    optimizer.record_digests(None)
    train(optimizer, 1)
    assert optimizer.digests == []


@each_backend
def test_a_step_that_only_makes_states_has_none(backend, tmp_path):
    """As torch.distributed.checkpoint takes one to ask which states there are."""
    with group_of_one("gloo", tmp_path):
        whole = torch.ones(4, 4)
        weight = distribute_tensor(whole, dist.init_device_mesh("cpu", (1,)), [Shard(0)])
        optimizer = FusedAdam([torch.nn.Parameter(weight)], lr=0.0, backend=backend)
        optimizer.record_digests(["weight"])
        (param,) = params_of(optimizer)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.digests == []
        optimizer.step()
        (found,) = optimizer.digests
        assert torch.equal(found.lanes[0, 0], digest(whole))


def test_other_parameters_with_gradients_have_digests():
    optimizer = adam()
    optimizer.record_digests(["weight"])
    train(optimizer, 1)
    params_of(optimizer)[0].grad = None
    optimizer.step()
    (found,) = optimizer.digests
    assert [len(param) for param in found.params] == [5, 0]
    assert torch.equal(found.lanes[:, 0], digest_many([p.detach() for p in found.params]))


def test_unknown_quantities_are_refused():
    with pytest.raises(ValueError, match="quantities must be one of grad, weight, master_param"):
        adam().record_digests(["weights"])


def test_a_digest_counts_what_is_not_finite():
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 3e38])
    assert of_places([values, values.double()], [Place(0)] * 2)[:, 2].tolist() == [3, 3]


def assert_digests_of_parts(monkeypatch):
    """Several blocks and chunks, of parts that begin within a row.

    eps=0 makes NaNs where there are no elements.
    """
    monkeypatch.setattr(launch, "OWN", Geometry(512, 3))
    params = parameters([(4000,), (7,)])
    for param in params:
        param.megaopt_first_element, param.megaopt_whole_shape = 1004, (9000,)
    optimizer = FusedAdam(params, lr=0.1, eps=0.0, backend="triton", **REMAINDERS)
    optimizer.record_digests(ADAM)
    grads = step_with_grads(optimizer, 0)
    (found,) = optimizer.digests
    for param, rows in zip(params, found.lanes, strict=True):
        tensors = [tensor_of(optimizer, param, name, grads) for name in found.quantities]
        assert torch.equal(rows, digest_many(tensors, [1004] * len(tensors)))


@interpreted
def test_parts_of_several_blocks(monkeypatch):
    assert_digests_of_parts(monkeypatch)


# --- mutants of what the launch adds up

MUTANTS = {
    "columns of the chunk": ("column_factors(place + rows", "column_factors(rows"),
    "one row for all blocks": ("within + index * SPEC.block", "within"),
    "the row where the tensor begins": ("(place >> ROW_BITS)", "(place * 0)"),
    "elements that are not there": ("tl.where(mask, word, 0)", "word"),
    "one lane twice": ("wide(words, columns[1])", "wide(words, columns[0])"),
    "the remainder as the weight": ("code = weight_code if", "code = master_code if"),
    "one moment twice": ("(SLOT - MOMENT) // 2)", "0)"),
    "the first quantity alone": ("column.tensor * COUNT", "column.tensor * 2"),
}


@interpreted
@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_the_checks_notice_a_mutant(change, tmp_path, monkeypatch):
    changed = mutant(Path(kernels.__file__).parent / "digest" / "step.py", change, tmp_path)
    for name in ("marks_of", "no_sums", "read_code", "with_block", "add_sums", "add_memory"):
        monkeypatch.setattr(kernel, name, getattr(changed, name))
    with pytest.raises(AssertionError):
        assert_digests_of_parts(monkeypatch)
