"""Lists of master_weights: Megatron's own, and lists that are of something else."""

import copy
import itertools

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam, release_gradients
from megaopt.float8 import Float8Weight

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def parameters(dtypes=(BF16, FP32, BF16, FP16)):
    return [torch.nn.Parameter(torch.randn(8, 16).to(dtype)) for dtype in dtypes]


def give(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def values(params):
    return [param.detach().float() for param in params]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("assigned", [False, True])
def test_megatrons_line_has_masters_of_16_bit_parameters_alone(assigned, backend):
    """`list(itertools.chain(*shard_fp32_from_float16_groups))`, where groups hold fp32 ones too."""
    params = parameters()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    groups = [[params[0].detach().float()], [p.detach().float() for p in params[2:]]]
    masters = list(itertools.chain(*groups))
    optimizer = FusedAdam(params, backend=backend, master_weights=None if assigned else masters)
    if assigned:
        optimizer.master_weights = masters
    plain = FusedAdam(others, backend=backend, dtype=FP32)
    for step in range(3):
        give(params, step)
        give(others, step)
        optimizer.step()
        plain.step()
    for param, other in zip(params, others, strict=True):
        assert_same_bits(param.detach(), other.detach())
    own = [optimizer.state[params[index]]["master_param"] for index in (0, 2, 3)]
    assert all(found is given for found, given in zip(own, masters, strict=True))
    for found, index in zip(own, (0, 2, 3), strict=True):
        assert_same_bits(found, plain.state[others[index]]["master_param"])
    assert optimizer.state[params[1]]["master_param"] is None
    assert optimizer.master_weights is masters


def test_an_fp8_weight_counts_among_those_with_masters():
    values = torch.randn(16, 16).bfloat16()
    weight = torch.nn.Parameter(Float8Weight.from_values(values, "current"))
    masters = [values.float()]
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(4)), weight], master_weights=masters)
    optimizer.initialize_states()
    assert optimizer.state[weight]["master_param"] is masters[0]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_list_of_another_length_is_refused_with_both_counts(count):
    optimizer, own = FusedAdam(parameters()), values(parameters())
    with pytest.raises(ValueError, match=rf"each of the 4 .* each of the 3 .* got {count} entries"):
        optimizer.master_weights = (own * 2)[:count]


def test_masters_of_another_model_are_refused_before_anything_changes():
    params = parameters((BF16, BF16))
    give(params, 0)
    before = [param.detach().clone() for param in params]
    for masters in (values(params)[::-1], values(parameters((BF16, BF16)))):
        optimizer = FusedAdam(params, master_weights=masters)
        kept = [master.clone() for master in masters]
        with pytest.raises(ValueError, match=r"parameter 0 .*master_weights must have the values"):
            optimizer.step()
        assert not optimizer.state
        assert optimizer.param_groups[0]["step"] == 0
        for found, expected in zip([*params, *masters], [*before, *kept], strict=True):
            assert_same_bits(found.detach(), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_that_were_rounded_in_another_way_are_taken(dtype):
    """A unit in the last place up or down, NaN, infinities, zeros of both signs; not two units."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 2.0**-14])
    weight = torch.nn.Parameter(torch.cat([special, torch.randn(120)]).to(dtype))
    bits = weight.detach().view(torch.int16)
    finite = weight.detach().isfinite() & (weight.detach() != 0)
    for units, allowed in ((0, True), (1, True), (-1, True), (2, False), (-2, False)):
        moved = torch.where(finite, bits + units, bits).view(dtype)
        optimizer = FusedAdam([weight], master_weights=[moved.float()])
        weight.grad = torch.zeros_like(weight)
        if allowed:
            optimizer.initialize_states()
        else:
            with pytest.raises(ValueError, match="master_weights must have the values"):
                optimizer.initialize_states()


def run_of_lists(change, backend, options, steps=4):
    """`change` gets the optimizer and its list before the third step."""
    params = parameters((BF16, FP32, FP16))
    masters = [params[0].detach().float(), params[2].detach().float()]
    optimizer = FusedAdam(params, lr=0.01, backend=backend, master_weights=masters, **options)
    for step in range(steps):
        if step == 2:
            change(optimizer, masters)
        give(params, step)
        optimizer.step()
    return params, optimizer, masters


def replace(_, masters):
    masters[1] = masters[1] + 1


def assign(optimizer, masters):
    optimizer.master_weights = [masters[0], masters[1] + 1]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"step_counts": "parameter"}])
def test_an_entry_that_is_replaced_counts_as_a_list_that_is_assigned(options, backend):
    torch.manual_seed(0)
    params, optimizer, masters = run_of_lists(replace, backend, options)
    torch.manual_seed(0)
    expected, others, _ = run_of_lists(assign, backend, options)
    for param, other in zip(params, expected, strict=True):
        assert_same_bits(param.detach(), other.detach())
        for name, value in others.state[other].items():
            if value is not None:
                assert_same_bits(optimizer.state[param][name], value)
    assert optimizer.state[params[0]]["master_param"] is masters[0]
    assert optimizer.state[params[2]]["master_param"] is masters[1]
    assert_same_bits(params[2].detach(), masters[1].to(FP16))


@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_go_on_from_an_entry_that_was_replaced(when):
    """Copied before the step that notices it, or after."""
    params, optimizer, masters = run_of_lists(lambda *_: None, "reference", {})
    masters[0] = masters[0] + 1
    if when == "after":
        give(params, 4)
        optimizer.step()
    copied, other = copy.deepcopy((params, optimizer))
    for step in (5, 6):
        for own, each in ((params, optimizer), (copied, other)):
            give(own, step)
            each.step()
    for param, own in zip(params, copied, strict=True):
        assert_same_bits(own.detach(), param.detach())
    assert other.state[copied[0]]["master_param"] is other.master_weights[0]


WRONG = {
    "shape": lambda masters: masters.__setitem__(0, torch.zeros(3)),
    "none": lambda masters: masters.__setitem__(0, None),
    "the other's memory": lambda masters: masters.__setitem__(0, masters[1]),
    "longer": lambda masters: masters.extend([None, None]),
    "shorter": lambda masters: masters.pop(),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_an_entry_that_does_not_fit_is_refused_at_the_step(change):
    params, optimizer, masters = run_of_lists(lambda *_: None, "reference", {})
    before = [param.detach().clone() for param in params]
    own, kept = list(masters), [master.clone() for master in masters]
    change(masters)
    give(params, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^master_weights"):
            optimizer.step()
    for found, expected in zip([*params, *own], [*before, *kept], strict=True):
        assert_same_bits(found.detach(), expected)
    assert optimizer.param_groups[0]["step"] == 4
    masters[:] = own
    optimizer.step()


def test_released_gradients_step_the_entries_of_now():
    """Also of a list without entries for fp32 weights, whose places are others."""
    torch.manual_seed(0)
    expected, _, own = run_of_lists(replace, "reference", {})
    torch.manual_seed(0)
    params = parameters((BF16, FP32, FP16))
    masters = [params[0].detach().float(), params[2].detach().float()]
    optimizer = FusedAdam(params, lr=0.01, backend="reference", master_weights=masters)
    release_gradients(params, optimizer)
    for step in range(4):
        if step == 2:
            replace(optimizer, masters)
        generator = torch.Generator().manual_seed(step)
        for param in params:
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.backward(grad)
        optimizer.step()
    for found, wanted in zip([*params, *masters], [*expected, *own], strict=True):
        assert_same_bits(found.detach(), wanted.detach())
    assert optimizer.state[params[2]]["master_param"] is masters[1]
