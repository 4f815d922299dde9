"""Beside galore_torch 1.0: the twin in fp64, and its checkpoints."""

import io
import itertools

import pytest
import torch
from bits import assert_same_bits
from galore_cases import GAP, GROUP, SHAPES, Twin, adamw, grad_of, needs_galore_torch, side_of
from runs import values

from megaopt import GaLoreAdamW

pytestmark = needs_galore_torch

CASES = [
    (proj_type, shape)
    for proj_type, shape in itertools.product(("std", "reverse_std", "right", "left"), SHAPES)
    if (proj_type, shape) != ("reverse_std", "wide")  # galore_torch projects back on the wrong side
]


def theirs(param, proj_type, rank, **changes):
    """galore_torch's optimizer of one matrix."""
    own = {**GROUP, **changes}
    numbers = {name: own[name] for name in ("lr", "betas", "eps", "weight_decay")}
    group = {"rank": rank, "update_proj_gap": GAP, "scale": own["scale"], "proj_type": proj_type}
    return adamw().AdamW(
        [{"params": [param], **group}],
        **numbers,
        correct_bias=own["bias_correction"],
        no_deprecation_warning=True,
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0, "bias_correction": False}], ids=str)
@pytest.mark.parametrize("rank", [1, 5, 16, 99])
@pytest.mark.parametrize(("proj_type", "shape"), CASES)
def test_the_twin_is_galore_torch_over_three_refreshes(proj_type, shape, rank, changes):
    """To 1e-12: 9 steps of sums of 21 products of numbers near 1, each off by 2**-53 of it.

    A rank above the smaller dimension is that: the full rank.
    """
    shape = SHAPES[shape]
    weight = values(shape, 0).double()
    param = torch.nn.Parameter(weight.clone())
    optimizer = theirs(param, proj_type, rank, **changes)
    twin = Twin(weight, side_of(proj_type, shape), min(rank, *shape), {**GROUP, **changes})
    for step in range(3 * GAP):
        param.grad = grad_of(shape, step)
        optimizer.step()
        twin.step(grad_of(shape, step))
    assert (twin.weight - param.detach()).abs().max() <= 1e-12
    state = optimizer.state[param]
    for own, name in zip(twin.moments, ("exp_avg", "exp_avg_sq"), strict=True):
        assert (own - state[name]).abs().max() <= 1e-12
    assert (weight - param.detach()).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("proj_type", "shape"), CASES[::3])
def test_its_checkpoints_load(proj_type, shape, dtype):
    shape = SHAPES[shape]
    param = torch.nn.Parameter(values(shape, 0, dtype))
    before = theirs(param, proj_type, 4, bias_correction=False)
    for step in range(2):
        param.grad = grad_of(shape, step, dtype)
        before.step()
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    own = torch.nn.Parameter(param.detach().clone())
    after = GaLoreAdamW([own], refresh="svd", stagger=False)
    after.load_state_dict(saved)
    group, state = after.param_groups[0], before.state[param]
    assert (group["rank"], group["proj_type"], group["step"]) == (4, proj_type, 2)
    assert group["bias_correction"] is False
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(after.state[own][name], state[name].float(), name)
    projection = state["projector"].ortho_matrix
    assert_same_bits(after.state[own]["projection"], projection.float().contiguous())
    own.grad = grad_of(shape, 2, dtype)
    after.step()  # between refreshes: by their projection
    assert_same_bits(after.state[own]["projection"], projection.float().contiguous())


@pytest.mark.parametrize("rank", [12, 99])
def test_a_checkpoint_of_a_full_rank_is_refused(rank):
    """Its moments have the matrix's shape and another basis; here they are the matrix's own."""
    shape = SHAPES["tall"]
    before = theirs(torch.nn.Parameter(values(shape, 0)), "std", rank)
    before.param_groups[0]["params"][0].grad = grad_of(shape, 0, torch.float32)
    before.step()
    after = GaLoreAdamW([torch.nn.Parameter(values(shape, 0))], rank=rank)
    with pytest.raises(ValueError, match="'projection' in the state dict; allowed where a grad"):
        after.load_state_dict(before.state_dict())
    assert not after.state


def test_a_checkpoint_of_both_sides_is_refused():
    param = torch.nn.Parameter(values((8, 8), 0))
    before = theirs(param, "full", 2)
    param.grad = grad_of((8, 8), 0, torch.float32)
    before.step()
    after = GaLoreAdamW([param], rank=2)
    with pytest.raises(ValueError, match="'projector' must be one of type std"):
        after.load_state_dict(before.state_dict())
    assert not after.state
