"""State dicts: exact in every format, straight as resumed, and those of other optimizers."""

import copy

import pytest
import torch
from bits import assert_same_bits
from handling import all_formats, copy_weights, made, refused, train_all
from runs import (
    BF16,
    FORMATS,
    FP32,
    MASTER,
    REMAINDERS,
    SCALED,
    SHAPES,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    values,
)

from megaopt import FusedAdam

# --- ours


@all_formats
def test_a_load_needs_no_more_of_a_group_than_the_own_groups_have(options):
    """torchtitan and torch.distributed.checkpoint flatten a state dict and read only that back."""
    before, after = made(options), made(options)
    train(before, 2)
    copy_weights(before, after)
    saved = before.state_dict()
    pairs = zip(saved["param_groups"], after.param_groups, strict=True)
    saved["param_groups"] = [{key: group[key] for key in own} for group, own in pairs]
    after.load_state_dict(saved)
    assert_same_run(after, before)


@pytest.mark.parametrize(("first", "second"), [("triton", "reference"), ("reference", "triton")])
def test_a_run_resumes_on_another_backend(first, second):
    options = FORMATS["fp16_master_bf16_fp16"]
    straight = made(options, backend=second)
    train(straight, 3)
    before, after = made(options, backend=first), made(options, backend=second)
    train(before, 2)
    copy_weights(before, after)
    after.load_state_dict(through_a_file(before.state_dict()))
    train(after, 1, first=2)
    assert_same_run(after, straight)


def test_a_load_replaces_the_state_that_was_there_and_is_no_alias():
    source, target = made(MASTER), made(MASTER)
    train(source, 2)
    train(target, 3, first=7)
    copy_weights(source, target)
    saved = source.state_dict()
    target.load_state_dict(saved)
    assert_same_run(target, source)
    before, kept = snapshot(source), copy.deepcopy(saved)
    train(target, 1, first=2)
    assert_same(snapshot(source), before)
    assert_same(saved, kept)
    train(source, 1, first=2)
    assert_same_run(target, source)


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_a_state_dict_of_an_optimizer_that_never_stepped_starts_at_step_0(kind):
    target = made(MASTER)
    train(target, 3)
    target.load_state_dict(kind(parameters()).state_dict())
    assert len(target.state) == 0
    assert target.param_groups[0]["step"] == 0


def test_a_tensor_lr_that_was_loaded_is_no_alias():
    source, target = (made(MASTER, lr=torch.tensor(0.01)) for _ in range(2))
    target.load_state_dict(source.state_dict())
    target.param_groups[0]["lr"].fill_(0.5)
    assert source.param_groups[0]["lr"] == torch.tensor(0.01)


def test_a_state_dict_is_the_same_each_time_and_ordered_by_parameter():
    optimizer = made(FORMATS["fp16_moments"])
    params = params_of(optimizer)
    for step in range(2):
        give_gradients(params, step)
        params[step].grad = None  # so that states appear in another order than the parameters
        optimizer.step()
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert_same(first, second)
    assert {*first["state"]} == {0, 1, 2, 3}
    target = made(FORMATS["fp16_moments"])
    target.load_state_dict(first)
    assert_same(target.state_dict()["state"], first["state"])


def test_reading_the_state_of_a_parameter_without_any_does_no_harm():
    """optimizer.state is a defaultdict: state[p] makes an empty entry."""
    optimizer, target = made(MASTER), made(MASTER)
    assert optimizer.state[params_of(optimizer)[0]] == {}
    target.load_state_dict(optimizer.state_dict())
    train_all((optimizer, target), 1)
    assert_same_run(target, optimizer)


def test_external_masters_are_loaded_into():
    source, target = made(MASTER), made(MASTER)
    train(source, 2)
    copy_weights(source, target)
    masters = [torch.zeros(shape) for shape in SHAPES]
    target.master_weights = masters
    target.load_state_dict(source.state_dict())
    for param, master in zip(params_of(target), masters, strict=True):
        assert target.state[param]["master_param"] is master
    assert_same_run(target, source)
    train_all((source, target), 1)
    assert_same_run(target, source)


def test_groups_keep_what_users_put_there():
    """Megatron matches groups of a checkpoint by keys of its own."""
    (param,) = parameters([(3,)])
    optimizer = FusedAdam([{"params": [param], "wd_mult": 0.5, "is_decoupled_lr": False}])
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["wd_mult"] = 1.0
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["wd_mult"], group["is_decoupled_lr"]) == (0.5, False)
    assert group["params"][0] is param


# --- of parameters whose state is not complete


def partly_stepped(names=None):
    """Of four parameters the second never had a gradient, as if it were frozen."""
    params = parameters()
    options = {**MASTER, "makes_states": "stepped"}
    optimizer = FusedAdam(list(zip(names, params, strict=True)) if names else params, **options)
    for step in range(2):
        give_gradients(params, step)
        params[1].grad = None
        optimizer.step()
    return optimizer


def test_a_parameter_without_a_gradient_may_have_no_state():
    source, target = partly_stepped(), made(MASTER)
    copy_weights(source, target)
    saved = through_a_file(source.state_dict())
    assert saved["not_made"] == {1: ["exp_avg", "exp_avg_sq", "master_param"]}
    target.load_state_dict(saved)
    assert params_of(target)[1] not in target.state
    train(source, 2, first=2)
    for group in target.param_groups:
        group.update(lr=source.param_groups[0]["lr"], weight_decay=0.0)
    train(target, 2, first=2)
    assert_same_run(target, source)


def test_a_state_dict_from_before_not_made_loads():
    """It cannot tell a state that was lost from one that was never made."""
    source, target = partly_stepped(), partly_stepped()
    train(target, 1)
    saved = source.state_dict()
    del saved["not_made"]
    copy_weights(source, target)
    target.load_state_dict(saved)
    assert_same_run(target, source)


def test_keys_that_are_names_are_found_by_a_framework():
    """torch.distributed.checkpoint calls parameters by name; param_names may be of other ranks."""
    source, target = partly_stepped("abcd"), partly_stepped("wxyz")
    train(target, 1)
    saved = source.state_dict()
    del saved["not_made"]
    saved["state"] = {f"model.{key}": state for key, state in saved["state"].items()}
    saved["param_groups"][0]["params"] = [f"model.{key}" for key in range(4)]
    saved["param_groups"][0]["param_names"] = ["only one"]
    copy_weights(source, target)
    target.load_state_dict(saved)
    assert target.param_groups[0]["param_names"] == [*"wxyz"]
    target.param_groups[0]["param_names"] = [*"abcd"]
    assert_same_run(target, source)


@pytest.mark.parametrize("external", [False, True], ids=["own", "external"])
@pytest.mark.parametrize(
    "options", [MASTER, FORMATS["fp16_master_bf16_fp16"]], ids=["fp32", "fp16"]
)
def test_a_checkpoint_between_torchs_state_and_the_next_step(options, external):
    """Masters are made at the step: there are none to save, and none is asked for."""
    theirs = torch.optim.AdamW(parameters())
    train(theirs, 3)
    straight, middle, resumed = made(options), made(options), made(options)
    if external and options is MASTER:
        for optimizer in (straight, middle, resumed):
            optimizer.master_weights = [p.detach().float() for p in params_of(theirs)]
    for optimizer in (straight, middle, resumed):
        copy_weights(theirs, optimizer)
    straight.load_state_dict(theirs.state_dict())
    middle.load_state_dict(theirs.state_dict())
    saved = through_a_file(middle.state_dict())
    assert saved["not_made"] == {key: ["master_param"] for key in range(4)}
    resumed.load_state_dict(saved)
    again = through_a_file(resumed.state_dict())
    assert_same(again, saved)
    train_all((straight, resumed), 2)
    assert_same_run(resumed, straight)


def test_a_checkpoint_of_a_state_that_was_set_in_part():
    """As get_unscaled_state and set_scaled_state move states one by one."""
    source, target = made(FORMATS["fp8_moments"]), made(FORMATS["fp8_moments"])
    first = params_of(source)[0]
    source.set_scaled_state(first, "exp_avg", values(first.shape, 5))
    saved = through_a_file(source.state_dict())
    assert saved["not_made"][0] == ["exp_avg_sq", "master_param"]
    target.load_state_dict(saved)
    train_all((source, target), 2)
    assert_same_run(target, source)


# --- torch's

TORCH_CLASSES = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


@pytest.mark.parametrize("weight", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", TORCH_CLASSES)
@pytest.mark.parametrize(
    "options",
    [{}, MASTER, FORMATS["fp16_master_bf16_fp16"], FORMATS["fp8_moments"]],
    ids=["none", "fp32", "fp16", "fp8"],
)
def test_torchs_state_dicts_load(name, weight, options):
    theirs = TORCH_CLASSES[name](
        parameters(dtype=weight), lr=0.25, betas=(0.5, 0.75), weight_decay=0.1
    )
    train(theirs, 3)
    ours, given = (made(options, weight, adam_w_mode=name == "AdamW") for _ in range(2))
    for optimizer in (ours, given):
        copy_weights(theirs, optimizer)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    group = ours.param_groups[0]
    assert (group["step"], group["lr"], group["betas"], group["weight_decay"]) == (
        3, 0.25, (0.5, 0.75), 0.1,
    )  # fmt: skip
    given.param_groups[0].update(step=3, lr=0.25, betas=(0.5, 0.75), weight_decay=0.1)
    for own, param, other in zip(params_of(ours), params_of(theirs), params_of(given), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            value = theirs.state[param][moment].float()
            given.set_scaled_state(other, moment, value)
            if not SCALED & {*options.values()}:
                assert_same_bits(ours.get_unscaled_state(own, moment), value, moment)
    train_all((ours, given), 2)
    assert_same_run(ours, given)


def test_a_parameter_that_torch_never_stepped_starts_at_zero():
    params = parameters([(3,), (4,)], FP32)
    theirs = torch.optim.AdamW(params)
    params[0].grad = torch.ones(3)
    theirs.step()
    ours = FusedAdam(parameters([(3,), (4,)], FP32))
    ours.load_state_dict(theirs.state_dict())
    assert len(ours.state) == 1
    assert ours.param_groups[0]["step"] == 1


# --- TransformerEngine's


def te_state_dict(shapes, step=4, lr=0.125, master=None, **group):
    """What FusedAdam.state_dict() of TransformerEngine 2.x holds: fp32 but for int16 remainders."""
    state = {}
    for index, shape in enumerate(shapes):
        state[index] = {
            "exp_avg": values(shape, 10 + index),
            "exp_avg_sq": values(shape, 20 + index).square(),
        }
        if master is not None:
            state[index]["master_param"] = master(index, shape)
    base = {"lr": lr, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-6}
    packed = {**base, "weight_decay": 0.25, **group, "step": step, "params": [*range(len(shapes))]}
    return {"state": state, "param_groups": [packed]}


def fp32_master(index, shape):
    return values(shape, index, BF16).float() + 2.0**-12


def int16_master(index, shape):
    return (values(shape, 30 + index) * 1000).to(torch.int16)


@pytest.mark.parametrize(
    ("options", "master"),
    [
        pytest.param({}, None, id="no_masters"),
        pytest.param(MASTER, fp32_master, id="fp32_masters"),
        pytest.param(REMAINDERS, int16_master, id="remainders"),
        pytest.param(FORMATS["bf16_moments"], fp32_master, id="bf16_moments"),
        pytest.param(FORMATS["fp16_master_bf16_fp16"], fp32_master, id="fp16_masters"),
    ],
)
def test_transformer_engines_state_dicts_load(options, master):
    saved = te_state_dict(SHAPES, master=master)
    ours, given = made(options), made(options)
    ours.load_state_dict(through_a_file(saved))
    given.param_groups[0].update(step=4, lr=0.125, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.25)
    assert_same(
        {k: v for k, v in ours.param_groups[0].items() if k != "params"},
        {k: v for k, v in given.param_groups[0].items() if k != "params"},
    )
    for index, (own, other) in enumerate(zip(params_of(ours), params_of(given), strict=True)):
        given.initialize_state(other)
        for name, value in saved["state"][index].items():
            if value.dtype == torch.int16:
                given.state[other][name].copy_(value)
                assert_same_bits(ours.state[own][name], value)
            else:
                given.set_scaled_state(other, name, value)
    train_all((ours, given), 2)
    assert_same_run(ours, given)


@pytest.mark.parametrize(
    ("options", "stale"),
    [
        pytest.param(MASTER, fp32_master, id="fp32"),
        pytest.param(REMAINDERS, int16_master, id="int16"),
    ],
)
def test_transformer_engines_stale_masters_of_fp32_weights_are_left_out(options, stale):
    """Beside a bf16 weight, whose master counts."""
    shapes = [(3, 4), (5,)]
    ours, plain = (
        FusedAdam([parameters(shapes)[0], parameters(shapes, FP32)[1]], **options) for _ in range(2)
    )
    saved, without_stale = (te_state_dict(shapes, master=stale) for _ in range(2))
    del without_stale["state"][1]["master_param"]
    ours.load_state_dict(saved)
    plain.load_state_dict(without_stale)
    assert_same_bits(params_of(ours)[1].detach(), values((5,), 1), "the fp32 weight")
    train_all((ours, plain), 1)
    assert_same_run(ours, plain)
    assert ours.state[params_of(ours)[1]]["master_param"] is None


def test_fp32_remainder_masters_of_transformer_engine_are_refused_before_anything_is_written():
    """Where an fp32 master cannot be split without writing the weight."""
    target = made(REMAINDERS)
    with refused(target, r"'master_param' .*torch.int16, got .*torch.float32"):
        target.load_state_dict(te_state_dict(SHAPES, master=fp32_master))
