"""External master weights: the caller's tensors, used as they are."""

import pytest
import torch
from bits import assert_same_bits
from runs import (
    BF16,
    FP16,
    FP32,
    REMAINDERS,
    assert_same,
    assert_same_run,
    parameters,
    snapshot,
    train,
    values,
)

from megaopt import FusedAdam


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
    train(optimizer, 2)
    train(plain, 2)
    assert optimizer.state[params[0]]["master_param"] is None
    assert_same_run(optimizer, plain)


def test_external_remainders():
    params = [*parameters([(5,)]), *parameters([(4,)], FP32)]
    remainders = [torch.zeros(5, dtype=torch.int16), None]
    optimizer = FusedAdam(params, master_weights=remainders, store_param_remainders=True)
    plain = FusedAdam([*parameters([(5,)]), *parameters([(4,)], FP32)], **REMAINDERS)
    train(optimizer, 3)
    train(plain, 3)
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
    "too_short": (lambda m: m[:1], r"one entry for each of the 2 parameters, .* got 1 entries"),
    "too_long": (lambda m: [*m, None], r"master_weights must have .* got 3 entries"),
    "empty": (lambda m: [], r"master_weights must have .* got 0 entries"),
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
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.master_weights = change(masters_of(params))
    assert optimizer.master_weights is good
    assert_same(snapshot(optimizer), before)
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
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"master_weights(\[0\] for .*shape|.* got 1 entries)"):
        train(optimizer, 1)
    assert_same(snapshot(optimizer), before)
    optimizer.master_weights = masters_of(optimizer.param_groups[0]["params"]) + (
        masters_of(more) if how == "added" else []
    )
    train(optimizer, 1)
