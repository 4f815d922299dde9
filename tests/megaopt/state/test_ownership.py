"""Weights that somebody else writes, and their masters: one thing at every step."""

import copy
import warnings

import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, refused, train_all
from runs import (
    BF16,
    FP16,
    FP16_MASTER,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megaopt import FusedAdam, to_float8
from megaopt.kernels.float8 import RECIPES

# Writes to DTensor weights with masters, as a rank makes them.

WHOLE_WEIGHT = torch.arange(10.0).reshape(5, 2) / 8


def write_shard(param, how):
    """In place, in two ways; or another shard of other or the same values, as FSDP2 puts it."""
    with torch.no_grad():
        if how in ("dtensor", "to_local"):
            (param if how == "dtensor" else param.to_local()).fill_(0.75)
            return
        kept = param._local_tensor.clone()
        param._local_tensor = torch.full_like(kept, 0.75) if how == "shard" else kept


def written(how, on_external_write="refresh"):
    """This rank's master after a write and a refresh by the step; or the step's error."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weight = distribute_tensor(WHOLE_WEIGHT.bfloat16(), mesh, [Shard(0)])
    param = torch.nn.Parameter(weight)
    options = {"dtype": FP32, "on_external_write": on_external_write}
    optimizer = FusedAdam([param], lr=0.0, **options)
    for step in range(2):
        param.grad = distribute_tensor(torch.ones(5, 2).bfloat16(), mesh, [Shard(0)])
        if step:
            write_shard(param, how)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return optimizer.state[param]["master_param"].to_local().clone()


SHAPES = [(3, 40), (), (0,), (50,)]
KINDS = {
    "fp32": MASTER,
    "fp16": FP16_MASTER,
    "remainders": REMAINDERS,
    **{
        name: {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8", "kahan", "kahan_stochastic")
    },
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def optimizer_of(kind="fp32", dtype=BF16, **options):
    return FusedAdam(parameters(SHAPES, dtype), lr=1e-2, **KINDS[kind], **options)


def write(param, how, value):
    """Writes the first half of the rows; `p.data = new` torch does not count."""
    new = param.detach().clone()
    new[: len(new) // 2] = value
    if how == "load_state_dict":
        module = torch.nn.Module()
        module.weight = param
        module.load_state_dict({"weight": new})
        return
    if how == "data":
        param.data = new
        return
    with torch.no_grad():
        if how == "copy_":
            param.copy_(new)
        elif how == "fill_":
            param[: len(new) // 2].fill_(value)
        else:
            param.detach()[: len(new) // 2] = value


# --- the written elements, and no others


@pytest.mark.sample(2)
@both_backends
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "fill_", "detach", "data"])
def test_a_written_weight_sets_its_master_where_it_was_written(looks, backend, how):
    found, expected = (optimizer_of(backend=backend) for _ in range(2))
    train_all((found, expected), 3)
    for index in (0, 3):
        param, twin = (o.param_groups[0]["params"][index] for o in (found, expected))
        write(param, how, 0.75)
        half = len(param) // 2
        expected.state[twin]["master_param"][:half] = 0.75
    with pytest.warns(UserWarning, match=r"parameter 0 of group 0 was written outside"):
        train(found, 1, first=3)
    train(expected, 1, first=3)
    train_all((found, expected), 1, first=4)
    assert_same_run(found, expected)


@pytest.mark.sample(6)
@both_backends
@pytest.mark.parametrize("policy", ["refresh", "error", "ignore"])
@pytest.mark.parametrize("how", ["in place", "other memory"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, BF16) for kind in KINDS), *((kind, FP16) for kind in ("fp32", "fp16", "kahan"))],
)
def test_what_is_written_back_unchanged_loses_no_bit(backend, kind, dtype, how, policy):
    """Of scaled fp16 masters the weight is often no cast of what is stored."""
    found, expected = (
        optimizer_of(kind, dtype, backend=backend, on_external_write=policy) for _ in range(2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6 if backend == "reference" else 3):
            train_all((found, expected), 1, first=step)
            kept = [param.data for param in params_of(found)]  # or addresses might come back
            with torch.no_grad():
                for param in params_of(found):
                    if how == "in place":
                        param.clamp_(-6e4, 6e4)
                    else:
                        param.data = param.data.clone()
    assert_same_run(found, expected)
    assert len(kept) == 4


@both_backends
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_written_element_beside_a_scaled_master(backend, dtype):
    optimizer = optimizer_of("fp16", dtype, backend=backend)
    train(optimizer, 3)
    param = optimizer.param_groups[0]["params"][3]
    before = optimizer.get_unscaled_state(param, "master_param").clone()
    write(param, "fill_", 0.5)
    optimizer.refresh_masters([param])
    after = optimizer.get_unscaled_state(param, "master_param")
    # 0.5 is below the largest number, so that the scale, a multiple of it, stays; a code's last
    # place is at most 2**-11 of the number
    assert (after[:25] - 0.5).abs().max() <= 2.0**-12
    assert_same_bits(after[25:], before[25:])


def test_a_scaled_master_takes_a_number_beyond_its_scale():
    optimizer = optimizer_of("fp16")
    train(optimizer, 3)
    param = optimizer.param_groups[0]["params"][3]
    write(param, "fill_", 1000.0)
    optimizer.refresh_masters()
    after = optimizer.get_unscaled_state(param, "master_param")
    # the scale is amax / 32752, so that 1000 is code 32752, an fp16 number, and back: two roundings
    # to fp32, of a relative 2**-24 each
    assert (after[:25] - 1000).abs().max() <= 1000 * 2.0**-23


@pytest.mark.parametrize("pattern", [torch.inf, -torch.inf, torch.nan, 0.0, 1e-40])
def test_hard_values_are_taken_over(pattern):
    optimizer = optimizer_of()
    train(optimizer, 2)
    param = optimizer.param_groups[0]["params"][3]
    before = optimizer.state[param]["master_param"].clone()
    write(param, "fill_", pattern)
    optimizer.refresh_masters()
    master = optimizer.state[param]["master_param"]
    assert_same_bits(master[:25], param.detach()[:25].float())
    assert_same_bits(master[25:], before[25:])


@both_backends
def test_a_remainder_moves_with_its_weight(backend):
    optimizer = optimizer_of("remainders", backend=backend)
    train(optimizer, 3)
    param = optimizer.param_groups[0]["params"][0]
    rest = optimizer.state[param]["master_param"].clone()
    write(param, "fill_", 0.75)
    train(optimizer, 0)
    master = optimizer.get_unscaled_state(param, "master_param")
    assert_same_bits(optimizer.state[param]["master_param"], rest)
    # a remainder is at most half of bf16's last place, 2**-8 of 0.75's power of two
    assert (master[:1] - 0.75).abs().max() <= 0.5 * 2.0**-8


def test_external_masters_are_set_too():
    params = parameters(SHAPES)
    masters = [param.detach().float() for param in params]
    optimizer = FusedAdam(params, lr=1e-2, master_weights=masters)
    train(optimizer, 2)
    kept = masters[0].clone()
    write(params[0], "copy_", 0.75)
    optimizer.refresh_masters([params[0]])
    assert_same_bits(masters[0][:1], torch.full((1, 40), 0.75))
    assert_same_bits(masters[0][1:], kept[1:])


# --- resume


@both_backends
@each_kind
@pytest.mark.parametrize("order", ["weights_first", "optimizer_first"])
@pytest.mark.sample(2)
def test_a_resume_in_either_order_is_the_straight_run(backend, kind, order):
    straight = optimizer_of(kind, backend=backend)
    train(straight, 3)
    params = straight.param_groups[0]["params"]
    saved = [param.detach().clone() for param in params], copy.deepcopy(straight.state_dict())
    train(straight, 2, first=3)
    resumed = optimizer_of(kind, backend=backend)
    train(resumed, 1)  # there are masters already, and others
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in (
            ("weights", "optimizer") if order == "weights_first" else ("optimizer", "weights")
        ):
            if part == "optimizer":
                resumed.load_state_dict(saved[1])
                continue
            with torch.no_grad():
                for param, value in zip(resumed.param_groups[0]["params"], saved[0], strict=True):
                    param.copy_(value)
        train(resumed, 2, first=3)
    assert_same_run(resumed, straight)


def test_an_optimizer_that_was_copied_notices_writes():
    params = parameters([(4,)])
    optimizer = FusedAdam(params, lr=1e-2, **MASTER)
    train(optimizer, 2)
    copied = copy.deepcopy(optimizer)
    (param,) = copied.param_groups[0]["params"]
    write(param, "fill_", 0.75)
    give_gradients([param], 2)
    with pytest.warns(UserWarning, match="written outside"):
        copied.step()
    assert (copied.state[param]["master_param"][:2] > 0.7).all()


# --- by choice, by hand


@pytest.mark.sample(3)
@both_backends
@pytest.mark.parametrize("how", ["fill_", "data"])
def test_error_refuses_and_changes_nothing(looks, backend, how):
    found = optimizer_of(backend=backend, on_external_write="error")
    train(found, 2)
    params = found.param_groups[0]["params"]
    write(params[3], how, 0.75)
    give_gradients(params, 2)
    for _ in range(2):
        message = "parameter 3 of group 0 must not be written"
        with refused(found, message, RuntimeError):
            found.step()
    found.refresh_masters()
    found.step()
    assert found.param_groups[0]["step"] == 3


@pytest.mark.sample(5)
@both_backends
@pytest.mark.parametrize("how", ["fill_", "data"])
def test_ignore_goes_on_from_the_masters(looks, backend, how):
    found, expected = (optimizer_of(backend=backend, on_external_write="ignore") for _ in range(2))
    train_all((found, expected), 2)
    write(found.param_groups[0]["params"][0], how, 0.75)
    train_all((found, expected), 2, first=2)
    assert_same_run(found, expected)


def test_what_torch_does_not_count_is_refreshed_by_hand():
    found, unseen = optimizer_of(), optimizer_of()
    for optimizer in (found, unseen):
        train(optimizer, 2)
        optimizer.param_groups[0]["params"][3].data.fill_(0.75)
    found.refresh_masters()
    param, other = (o.param_groups[0]["params"][3] for o in (found, unseen))
    assert_same_bits(found.state[param]["master_param"], torch.full((50,), 0.75))
    train(unseen, 1, first=2)
    assert not (unseen.state[other]["master_param"] == 0.75).any()


def test_refreshing_what_has_no_master_or_no_state_does_nothing():
    plain = FusedAdam(parameters(SHAPES, FP32))
    plain.refresh_masters()
    train(plain, 1)
    kept = snapshot(plain)
    plain.refresh_masters()
    assert_same(snapshot(plain), kept)
    with pytest.raises(ValueError, match="a parameter of this optimizer"):
        plain.refresh_masters([torch.ones(1)])


def test_the_warning_comes_once():
    optimizer = optimizer_of()
    train(optimizer, 1)
    param = optimizer.param_groups[0]["params"][0]
    write(param, "fill_", 0.75)
    with pytest.warns(UserWarning, match="its master takes the written values"):
        train(optimizer, 1, first=1)
    write(param, "fill_", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, 1, first=2)


def test_a_master_that_was_set_counts_more_than_an_earlier_write():
    """As TransformerEngine's users set masters: from values that the weight does not hold."""
    optimizer = optimizer_of()
    train(optimizer, 1)
    param = optimizer.param_groups[0]["params"][0]
    write(param, "fill_", 0.75)
    exact = values((3, 40), 7)
    optimizer.set_scaled_state(param, "master_param", exact)
    expected = optimizer_of()
    train(expected, 1)
    twin = expected.param_groups[0]["params"][0]
    expected.set_scaled_state(twin, "master_param", exact)
    train_all((optimizer, expected), 1, first=1)
    assert_same_run(optimizer, expected)


# --- what the counters say to others


@both_backends
def test_a_step_counts_versions_up(looks, backend):
    """Otherwise autograd takes weights that it saved before the step for those of after it."""
    param = parameters([(4,)], FP32)[0]
    optimizer = FusedAdam([param], backend=backend)
    for _ in range(2):  # the second comes with batches that are kept
        output = (param * param).sum()
        param.grad = torch.ones_like(param)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
        param.grad = None


# --- a model that becomes fp32


@both_backends
@pytest.mark.parametrize("kind", ["fp32", "remainders", "fp16"])
def test_an_fp32_model_goes_on_from_its_masters(backend, kind):
    optimizer = optimizer_of(kind, backend=backend)
    train(optimizer, 3)
    params = optimizer.param_groups[0]["params"]
    masters = [optimizer.get_unscaled_state(param, "master_param").clone() for param in params]
    moments = copy.deepcopy(optimizer.state_dict())
    for param in params:
        param.data = param.data.float()
    with torch.no_grad():
        params[3][:5] = 0.1234567  # no 16-bit number: somebody's own
    masters[3][:5] = 0.1234567
    expected = FusedAdam([torch.nn.Parameter(m) for m in masters], lr=1e-2, backend=backend)
    for state in moments["state"].values():
        state.pop("master_param")
        state.pop("master_param_scale", None)
    expected.load_state_dict(moments)
    train_all((optimizer, expected), 2, first=3)
    for param, twin in zip(params, expected.param_groups[0]["params"], strict=True):
        assert_same_bits(param.detach(), twin.detach())
        assert optimizer.state[param]["master_param"] is None


# --- DTensors


@pytest.mark.parametrize("how", ["dtensor", "to_local", "shard"])
def test_writes_to_shards(on_ranks, how):
    """DTensors take no other data; FSDP2 puts other shards into them."""
    masters = on_ranks(2, written, how)
    assert [len(master) for master in masters] == [3, 2]
    for master in masters:
        assert_same_bits(master, torch.full_like(master, 0.75))
    for message in on_ranks(2, written, how, "error"):
        assert message.startswith("parameter 0 of group 0 must not be written between steps")
    moved = on_ranks(2, written, "moved", "error")
    assert [len(master) for master in moved] == [3, 2]


# --- fp8 weights


def float8_model(recipe):
    torch.manual_seed(3)
    model = torch.nn.Linear(64, 48, bias=False, dtype=BF16)
    return to_float8(model, recipe)


@both_backends
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_codes_that_are_written_back_lose_no_bit(backend, recipe):
    models = [float8_model(recipe) for _ in range(2)]
    found, expected = (
        FusedAdam(m.parameters(), lr=1e-2, backend=backend, **MASTER) for m in models
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6 if backend == "reference" else 3):
            train_all((found, expected), 1, first=step)
            models[0].load_state_dict(copy.deepcopy(models[0].state_dict()))
    for name in ("data8", "scale_inv"):
        assert_same_bits(getattr(models[0].weight, name), getattr(models[1].weight, name), name)
    pairs = zip((found, expected), models, strict=True)
    assert_same_bits(*(optimizer.state[m.weight]["master_param"] for optimizer, m in pairs))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_fp8_weight_that_was_written_sets_its_master(recipe):
    model = float8_model(recipe)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, **MASTER)
    train(optimizer, 2)
    new = values((48, 64), 11, BF16)
    with torch.no_grad():
        model.weight.copy_(new)
    optimizer.refresh_masters()
    master = optimizer.state[model.weight]["master_param"]
    held = model.weight.dequantize().float()
    # the others' masters gave these codes before: they are less than a code away, which is 2**-3 of
    # a normal number, and 2**-9 of the scale below
    spacing = torch.maximum(held.abs() / 8, 2.0**-9 * scales_of(model.weight))
    assert ((master - held).abs() < spacing).all()
    assert (master == held).float().mean() > 0.5
    again = master.clone()
    optimizer.refresh_masters()
    assert_same_bits(master, again)


def scales_of(weight):
    """fp32, the weight's shape: the value of code 1."""
    inverse = weight.scale_inv
    if inverse.dtype == torch.uint8:
        inverse = torch.exp2(inverse.float() - 127)
    if inverse.numel() == 1:
        return inverse.expand(weight.shape)
    rows, columns = weight.recipe.block
    whole = inverse.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: weight.shape[0], : weight.shape[1]]


# --- no masters at all


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_16_bit_weights_without_masters_warn_once(dtype):
    optimizer = FusedAdam(parameters(SHAPES, dtype))
    give_gradients(optimizer.param_groups[0]["params"], 0)
    with pytest.warns(
        UserWarning, match=r"4 parameters .* have no fp32 master.*dtype=torch.float32"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.param_groups[0]["params"][0].grad = None
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "dtype"), [(MASTER, BF16), ({"master_weights": False}, BF16), ({}, FP32)]
)
def test_who_says_what_is_wanted_is_not_warned(options, dtype):
    optimizer = FusedAdam(parameters(SHAPES, dtype), **options)
    give_gradients(optimizer.param_groups[0]["params"], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


JOINED = {
    "remainder16": {"dtype": FP32, "store_param_remainders": True},
    **{
        name: {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8", "remainder8_stochastic", "kahan", "kahan_stochastic")
    },
}


@pytest.mark.parametrize("options", JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, 1e-30], ids=str)
def test_a_weight_beside_its_master_may_be_written_to_anything(options, value):
    """0 with a negative remainder was NaN; a compensation larger than its weight stayed."""
    param = torch.nn.Parameter(torch.linspace(900, 1100, 64).to(BF16))
    optimizer = FusedAdam([param], lr=0.5, backend="reference", **options)
    param.grad = torch.linspace(-1, 1, 64).to(BF16)
    optimizer.step()
    with torch.no_grad():
        param[::2] = value
    kept = optimizer.get_unscaled_state(param, "master_param")[1::2].clone()
    optimizer.param_groups[0]["lr"] = 0.0
    param.grad = torch.zeros_like(param)
    with warnings.catch_warnings():  # not every such write can be known
        warnings.simplefilter("ignore", UserWarning)
        optimizer.step()
    found = optimizer.get_unscaled_state(param, "master_param")
    assert torch.equal(found[1::2], kept)
    if value != torch.inf:  # infinity times lr = 0 is NaN
        assert torch.equal(param[::2], torch.full((32,), value).to(BF16))
        assert bool(found.isfinite().all())
