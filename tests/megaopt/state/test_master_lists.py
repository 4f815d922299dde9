"""Lists of master_weights: Megatron's own, and lists that are of something else."""

import copy
import itertools

import pytest
import torch
from attacks import Before
from bits import assert_same_bits
from handling import both_backends, refused, train_all
from runs import (
    BF16,
    FP16,
    FP32,
    REMAINDERS,
    assert_same,
    assert_same_run,
    copied,
    give_gradients,
    parameters,
    train,
    values,
)

from megaopt import FusedAdam, release_gradients
from megaopt.float8 import Float8Weight


def mixed(dtypes=(BF16, FP32, BF16, FP16), seed=0):
    own = [values((8, 16), seed + place, dtype) for place, dtype in enumerate(dtypes)]
    return [torch.nn.Parameter(value) for value in own]


def fp32_of(params):
    return [param.detach().float() for param in params]


@both_backends
@pytest.mark.parametrize("assigned", [False, True])
def test_megatrons_line_has_masters_of_16_bit_parameters_alone(assigned, backend):
    """`list(itertools.chain(*shard_fp32_from_float16_groups))`, where groups hold fp32 ones too."""
    params = mixed()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    groups = [[params[0].detach().float()], [p.detach().float() for p in params[2:]]]
    masters = list(itertools.chain(*groups))
    optimizer = FusedAdam(params, backend=backend, master_weights=None if assigned else masters)
    if assigned:
        optimizer.master_weights = masters
    plain = FusedAdam(others, backend=backend, dtype=FP32)
    train_all((optimizer, plain), 3)
    assert_same_run(optimizer, plain)
    own = [optimizer.state[params[index]]["master_param"] for index in (0, 2, 3)]
    assert all(found is given for found, given in zip(own, masters, strict=True))
    assert optimizer.state[params[1]]["master_param"] is None
    assert optimizer.master_weights is masters


def test_an_fp8_weight_counts_among_those_with_masters():
    value = values((16, 16), 0, BF16)
    weight = torch.nn.Parameter(Float8Weight.from_values(value, "current"))
    masters = [value.float()]
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(4)), weight], master_weights=masters)
    optimizer.initialize_states()
    assert optimizer.state[weight]["master_param"] is masters[0]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_list_of_another_length_is_refused_with_both_counts(count):
    """On assignment and at construction, with an entry for each parameter or each 16-bit one."""
    message = rf"each of the 4 .* each of the 3 .* got {count} entries"
    params = mixed()
    optimizer, own = FusedAdam(params), (fp32_of(params) * 2)[:count]
    with refused(optimizer, message):
        optimizer.master_weights = own
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, master_weights=own)


def test_masters_of_another_model_are_refused_before_anything_changes():
    params = mixed((BF16, BF16))
    for masters in (fp32_of(params)[::-1], fp32_of(mixed((BF16, BF16), seed=9))):
        optimizer = FusedAdam(params, master_weights=masters)
        give_gradients(params, 0)
        before = Before(optimizer, masters)
        with pytest.raises(ValueError, match=r"parameter 0 .*master_weights must have the values"):
            optimizer.step()
        before.assert_same()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_that_were_rounded_in_another_way_are_taken(dtype):
    """A unit in the last place up or down, NaN, infinities, zeros of both signs; not two units."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 2.0**-14])
    weight = torch.nn.Parameter(torch.cat([special, values((120,), 0)]).to(dtype))
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
    params = mixed((BF16, FP32, FP16))
    masters = fp32_of([params[0], params[2]])
    optimizer = FusedAdam(params, lr=0.01, backend=backend, master_weights=masters, **options)
    for step in range(steps):
        if step == 2:
            change(optimizer, masters)
        train(optimizer, 1, first=step)
    return params, optimizer, masters


def replace(_, masters):
    masters[1] = masters[1] + 1


def assign(optimizer, masters):
    optimizer.master_weights = [masters[0], masters[1] + 1]


@pytest.mark.sample(2)
@both_backends
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"step_counts": "parameter"}])
def test_an_entry_that_is_replaced_counts_as_a_list_that_is_assigned(options, backend):
    params, optimizer, masters = run_of_lists(replace, backend, options)
    _, others, _ = run_of_lists(assign, backend, options)
    assert_same_run(optimizer, others)
    assert optimizer.state[params[0]]["master_param"] is masters[0]
    assert optimizer.state[params[2]]["master_param"] is masters[1]
    assert_same_bits(params[2].detach(), masters[1].to(FP16))


@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_go_on_from_an_entry_that_was_replaced(when):
    """Copied before the step that notices it, or after."""
    params, optimizer, masters = run_of_lists(lambda *_: None, "reference", {})
    masters[0] = masters[0] + 1
    if when == "after":
        train(optimizer, 1, first=4)
    copied, other = copy.deepcopy((params, optimizer))
    train_all((optimizer, other), 2, first=5)
    assert_same_run(other, optimizer)
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
    own, kept = list(masters), copied(masters)
    change(masters)
    give_gradients(params, 4)
    for _ in range(2):
        with refused(optimizer, "^master_weights"):
            optimizer.step()
    assert_same(own, kept)
    masters[:] = own
    optimizer.step()


@pytest.mark.parametrize("change", [replace, assign])
def test_released_gradients_step_the_entries_of_now(change):
    """Also of a list without entries for fp32 weights, whose places are others."""
    expected, other, _ = run_of_lists(change, "reference", {})
    params = mixed((BF16, FP32, FP16))
    masters = fp32_of([params[0], params[2]])
    optimizer = FusedAdam(params, lr=0.01, backend="reference", master_weights=masters)
    release_gradients(params, optimizer)
    for step in range(4):
        if step == 2:
            change(optimizer, masters)
        for index, param in enumerate(params):  # as give_gradients
            param.backward(values(param.shape, 1000 * (step + 1) + index, param.dtype))
        optimizer.step()
    masters = optimizer.master_weights
    assert_same([*params, *masters], [*expected, *other.master_weights])
    assert optimizer.state[params[2]]["master_param"] is masters[1]


# --- the caller's tensors, used as they are


def masters_of(params):
    return [None if p.dtype == FP32 else p.detach().float() for p in params]


def test_external_masters_hold_more_than_the_weights():
    """Megatron's masters come from before the cast: they, not the weights, are what is stepped."""
    (param,) = parameters([(5,)])
    master = values((5,), 0) + 2.0**-12
    exact = torch.nn.Parameter(master.clone())
    found, expected = FusedAdam([param], master_weights=[master]), FusedAdam([exact])
    for step in range(3):
        param.grad = values((5,), step + 1, BF16)
        exact.grad = param.grad.float()
        found.step()
        expected.step()
    assert_same_bits(master, exact.detach())
    assert_same_bits(param.detach(), exact.detach().to(BF16))


@pytest.mark.parametrize("own", [False, True], ids=["none", "the_weight_itself"])
def test_the_entry_of_an_fp32_weight(own):
    params = [parameters([(3,)], FP32)[0], parameters([(3,)])[0], parameters([(3,)], FP16)[0]]
    masters = [params[0].detach() if own else None, *masters_of(params[1:])]
    optimizer = FusedAdam(params, dtype=FP32, master_weights=masters)
    plain = FusedAdam([torch.nn.Parameter(p.detach().clone()) for p in params], dtype=FP32)
    train_all((optimizer, plain), 2)
    assert optimizer.state[params[0]]["master_param"] is None
    assert_same_run(optimizer, plain)


def test_external_remainders():
    params = [*parameters([(5,)]), *parameters([(4,)], FP32)]
    remainders = [torch.zeros(5, dtype=torch.int16), None]
    optimizer = FusedAdam(params, master_weights=remainders, store_param_remainders=True)
    plain = FusedAdam([*parameters([(5,)]), *parameters([(4,)], FP32)], **REMAINDERS)
    train_all((optimizer, plain), 3)
    assert optimizer.state[params[0]]["master_param"] is remainders[0]
    assert remainders[0].any()
    assert_same_run(optimizer, plain)


def test_masters_switched_off_and_on():
    (param,) = parameters([(5,)])
    optimizer = FusedAdam([param], master_weights=True)
    train(optimizer, 1)
    optimizer.master_weights = False
    train(optimizer, 1, first=1)
    assert optimizer.state[param]["master_param"] is None
    cast = param.detach().clone()
    optimizer.master_weights = True
    optimizer.initialize_state(param)
    assert_same_bits(optimizer.state[param]["master_param"], cast.float())


@pytest.mark.parametrize("masters", [None, False, True], ids=str)
def test_a_bool_is_transformer_engines(masters):
    bf16, fp32 = parameters([(5,)])[0], parameters([(5,)], FP32)[0]
    optimizer = FusedAdam([bf16, fp32], master_weights=masters)
    assert optimizer.master_weights is masters
    train(optimizer, 1)
    assert (optimizer.state[bf16]["master_param"] is not None) == bool(masters)
    assert optimizer.state[fp32]["master_param"] is None


def test_a_list_is_in_group_order():
    params = parameters([(3,), (4,), (5,)])
    masters = masters_of([params[2], params[0], params[1]])
    groups = [{"params": [params[2]]}, {"params": []}, {"params": params[:2]}]
    optimizer = FusedAdam(groups, master_weights=masters)
    train(optimizer, 1)
    assert [
        optimizer.state[params[i]]["master_param"] is m
        for i, m in zip((2, 0, 1), masters, strict=True)
    ] == [True] * 3


REFUSED = {
    "none": (lambda m: [m[0], None], r"{0} must be a tensor of dtype torch.float32, got None"),
    "no_tensor": (lambda m: [m[0], 1.0], r"{0} must be a tensor of dtype torch.float32, got 1\.0"),
    "dtype": (lambda m: [m[0], m[1].to(BF16)], r"{0}: dtype must be torch.float32, .*bfloat16"),
    "fp64": (lambda m: [m[0], m[1].double()], r"{0}: dtype must be torch.float32, .*float64"),
    "shape": (lambda m: [m[0], torch.zeros(6)], r"{0}: shape must be .*5.*, got .*6"),
    "rank": (lambda m: [m[0], m[1][None]], r"{0}: shape must be .*5.*, got .*1, 5"),
    "device": (lambda m: [m[0], m[1].to("meta")], r"{0}: device must be cpu, got meta"),
    "layout": (lambda m: [m[0], m[1].to_sparse()], r"{0}: layout must be .*strided, .*sparse_coo"),
    "no_list": (lambda m: {0: m[0]}, r"master_weights must be a bool, None, or a list .* dict"),
    "a_tensor": (lambda m: m[0], r"master_weights must be .* got a value of type Tensor"),
    "a_generator": (iter, r"master_weights must be .* got a value of type list_iterator"),
}  # fmt: skip
WHERE = r"master_weights\[1\] for parameter 1 of group 0"


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_list_that_does_not_fit_is_refused(change, message):
    """At construction and on assignment, where the masters in use stay in use."""
    message = message.format(WHERE)
    params = parameters([(3,), (5,)])
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, master_weights=change(masters_of(params)))
    good = masters_of(params)
    optimizer = FusedAdam(params, master_weights=good)
    train(optimizer, 1)
    with refused(optimizer, message):
        optimizer.master_weights = change(masters_of(params))
    assert optimizer.master_weights is good
    train(optimizer, 1)
    assert optimizer.state[params[0]]["master_param"] is good[0]


def test_a_master_beside_an_fp32_weight_is_refused():
    params = parameters([(3,), (5,)], FP32)
    masters = [None, params[1].detach().clone()]
    message = WHERE + " must be None, as an fp32 weight is its own master, got a torch.float32"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, dtype=FP32, master_weights=masters)


def test_masters_of_another_kind_than_the_options_are_refused():
    params = parameters([(3,), (5,)])
    message = r"_dtype must be torch.float32, .* with a list of master_weights, got torch.float16"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, master_weight_dtype=FP16, master_weights=masters_of(params))
    message = r"master_weights\[0\].*dtype must be torch.int16, got torch.float32"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, store_param_remainders=True, master_weights=masters_of(params))
    optimizer = FusedAdam(params, dtype=FP32)
    message = r"master_weights must be .* with dtype=torch.float32, .*, got False"
    with pytest.raises(ValueError, match=message):
        optimizer.master_weights = False
    remainders = FusedAdam(params, master_weights=True, store_param_remainders=True)
    with pytest.raises(ValueError, match=r"store_param_remainders=True needs masters"):
        remainders.master_weights = None
    assert remainders.master_weights is True


@pytest.mark.parametrize("how", ["swapped", "added"])
def test_a_list_that_parameters_outgrew_is_refused_at_the_step(how):
    params = parameters([(3,)])
    masters = masters_of(params)
    optimizer = FusedAdam(params, master_weights=masters)
    train(optimizer, 1)
    more = parameters([(3,), (4,)])[1:]
    if how == "added":
        optimizer.add_param_group({"params": more})
    else:
        optimizer.param_groups[0]["params"] = more
    with refused(optimizer, r"master_weights(\[0\] for .*shape|.* got 1 entries)"):
        train(optimizer, 1)
    optimizer.master_weights = masters_of(optimizer.param_groups[0]["params"]) + (
        masters_of(more) if how == "added" else []
    )
    train(optimizer, 1)
