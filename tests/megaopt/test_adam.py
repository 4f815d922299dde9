"""The request's code, word for word, and what construction promises."""

import dataclasses
import inspect
import re
from itertools import chain

import pytest
import torch
from bits import assert_same_bits
from handling import refused, train_all
from runs import (
    BF16,
    FORMATS,
    FP32,
    MASTER,
    assert_same,
    assert_same_run,
    parameters,
    train,
    values,
)

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW
from megaopt.options.options import OF_OPTIMIZERS, Options, SharedOptions, StepOptions

FACE = """def FusedAdam(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    amsgrad=False, *, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32,
    bias_correction=True, adam_w_mode=True, makes_states=None, contract="ieee", dtype=None,
    master_weights=None, master_weight_dtype=torch.float32, store_param_remainders=False,
    weight_rounding="nearest", seed=0, use_decoupled_grad=False, capturable=False,
    nonfinite="propagate", on_external_write="refresh", backend="auto", maximize=False,
    foreach=None, differentiable=False, fused=None, direct_cast=None, round_scaled_grads=False,
    write_unscaled_grads=False, state_device=None, step_counts=None): pass"""


def mixed_model():
    """A bf16 layer whose bias is fp32, as mixed models have."""
    model = torch.nn.Linear(3, 4)
    model.weight.data = model.weight.data.to(BF16)
    return model


def backward(model):
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def test_the_requests_first_example():
    model = mixed_model()
    bf16_param, fp32_param = model.weight, model.bias
    backward(model)

    optim = FusedAdam(model.parameters(), dtype=torch.float32)
    optim.step()

    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        assert optim.state[bf16_param][name].dtype == torch.float32
        assert optim.state[bf16_param][name].shape == bf16_param.shape
    assert optim.state[fp32_param]["master_param"] is None
    assert optim.state[fp32_param]["exp_avg"].dtype == torch.float32


def test_the_requests_list_of_masters_is_used_and_not_copied():
    model = mixed_model()
    masters = [model.weight.detach().float(), None]
    backward(model)

    optim = FusedAdam(model.parameters(), dtype=torch.float32, master_weights=masters)
    optim.step()

    assert optim.state[model.weight]["master_param"] is masters[0]
    assert optim.state[model.bias]["master_param"] is None
    assert_same_bits(model.weight.detach(), masters[0].to(BF16), "the cast master")


def test_the_requests_assignment_after_construction():
    params = parameters([(3,), (4,), (5,)])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    shard_fp32_groups = [[params[0].detach().float()], [p.detach().float() for p in params[1:]]]

    optimizer = FusedAdam(groups, dtype=torch.float32)
    optimizer.master_weights = list(chain(*shard_fp32_groups))
    train(optimizer, 2)

    assert optimizer.master_weights == list(chain(*shard_fp32_groups))
    for param, master in zip(params, chain(*shard_fp32_groups), strict=True):
        assert optimizer.state[param]["master_param"] is master
        assert_same_bits(param.detach(), master.to(BF16))
    plain = FusedAdam(parameters([(3,), (4,), (5,)]), dtype=torch.float32)
    train(plain, 2)
    assert_same([*params], plain.param_groups[0]["params"])


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.10's
def test_construction_allocates_no_tensor():
    params = parameters([(1000,)])
    with torch.profiler.profile(profile_memory=True) as profile:
        FusedAdam(params, dtype=torch.float32)
    assert sum(event.self_cpu_memory_usage for event in profile.events()) == 0
    with torch.profiler.profile(profile_memory=True) as profile:
        FusedAdam(params, dtype=torch.float32).initialize_state(params[0])
    assert any(event.self_cpu_memory_usage >= 4000 for event in profile.events())


def test_megatron_swaps_the_parameters_after_construction():
    model = parameters([(4, 3), (6,)])
    optimizer = FusedAdam(model, dtype=torch.float32, weight_decay=0.1)
    # the distributed optimizer's order: fp32 shards, then 16-bit ones, flat pieces of a buffer
    buffers = [param.detach().clone().view(-1) for param in model]
    shards = [torch.nn.Parameter(buffer[1:5]) for buffer in buffers]
    shard_masters = [shard.detach().float() for shard in shards]

    optimizer.param_groups[0]["params"] = shards
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.state) == 0
    optimizer.master_weights = shard_masters
    train(optimizer, 3)

    own = [
        torch.nn.Parameter(param.detach().view(-1)[1:5].clone())
        for param in parameters([(4, 3), (6,)])
    ]
    plain = FusedAdam(own, dtype=torch.float32, weight_decay=0.1)
    train(plain, 3)
    assert_same_run(optimizer, plain)
    for shard, master, buffer in zip(shards, shard_masters, buffers, strict=True):
        assert optimizer.state[shard]["master_param"] is master
        assert_same_bits(shard.detach(), buffer[1:5], "the model's buffer")
    for param, buffer, untouched in zip(model, buffers, parameters([(4, 3), (6,)]), strict=True):
        assert_same_bits(param.detach(), untouched.detach(), "a parameter that was swapped out")
        assert_same_bits(buffer[5:], untouched.detach().view(-1)[5:], "beyond the shard")


def test_megatron_replaces_param_groups_after_construction():
    optimizer = FusedAdam(parameters([(7,)]), dtype=torch.float32)
    shards = parameters([(3,), (4,)])
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [shard]} for shard in shards]
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 2)
    own = parameters([(3,), (4,)])
    plain = FusedAdam([{"params": [param]} for param in own], dtype=torch.float32)
    train(plain, 2)
    assert_same_run(optimizer, plain)


@pytest.mark.parametrize("external", [False, True], ids=["own_master", "external_master"])
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_initialize_state_is_complete_and_changes_no_number(options, external):
    if external and (options.get("dtype") is None):
        external = False  # a list is for fp32 masters and remainders
    initialized, plain = (FusedAdam(parameters(), **options) for _ in range(2))
    params = initialized.param_groups[0]["params"]
    if external:
        remainders = options.get("store_param_remainders")
        initialized.master_weights = [
            torch.zeros(p.shape, dtype=torch.int16) if remainders else p.detach().float()
            for p in params
        ]
    before = [param.detach().clone() for param in params]
    for param in params:
        initialized.initialize_state(param)
    assert_same([param.detach() for param in params], before)
    complete = {id(t) for state in initialized.state.values() for t in state.values()}
    if external:
        assert complete >= {id(master) for master in initialized.master_weights}
    train_all((initialized, plain), 2)
    assert {id(t) for state in initialized.state.values() for t in state.values()} == complete
    assert_same_run(initialized, plain)


@pytest.mark.parametrize("flag", [None, True], ids=["left_out", "own_value"])
def test_initialize_state_takes_transformer_engines_second_argument(flag):
    """Which must be the optimizer's own choice."""
    bf16, fp32 = torch.nn.Parameter(torch.ones(3, dtype=BF16)), torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([bf16, fp32], dtype=FP32, store_param_remainders=True)
    for own, wrong in ((optimizer, False), (FusedAdam([bf16], dtype=FP32), True)):
        with refused(own, f"parameter 0 of group 0, .* got {wrong}"):
            own.initialize_state(bf16, wrong)
    optimizer.initialize_state(bf16, flag)
    optimizer.initialize_state(fp32, False if flag else None)
    assert optimizer.state[bf16]["master_param"].dtype == torch.int16
    assert optimizer.state[fp32]["master_param"] is None


def test_the_constructor_has_the_face_of_the_design():
    names = {"torch": torch}
    exec(FACE, names)
    expected, found = (
        [(p.name, p.kind, p.default) for p in inspect.signature(face).parameters.values()]
        for face in (names["FusedAdam"], FusedAdam)
    )
    assert found == expected


INERT = {"foreach", "fused", "differentiable"}
"""Arguments of torch's that change nothing: they are taken, and help() does not list them."""


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion, FusedSGD, FusedMuon, GaLoreAdamW])
def test_help_and_signature_name_every_option(kind):
    """Those that all optimizers share, too, each with the default that a call without it has.

    The ten that are used most come first; the rest by theme, once each.
    """
    shown = inspect.getdoc(kind)
    own = shown[shown.index("Args:") : shown.index("Raises:")]
    found = inspect.signature(kind).parameters
    plain = kind([torch.nn.Parameter(torch.ones(2))])
    listed = re.findall(r"^    (\w+): ", own, re.MULTILINE)
    assert sorted(listed) == sorted({*found} - INERT)
    assert listed.index("dtype") < 10
    assert len(re.findall(r"^    \w+: ", own[: own.index("Args: ")], re.MULTILINE)) == 10
    for name, argument in found.items():
        given = {} if name in ("params", "betas") else {name: argument.default}
        assert kind([torch.nn.Parameter(torch.ones(2))], **given).options == plain.options, name
    assert max(map(len, shown.splitlines())) <= 100


def test_a_class_of_ones_own_has_its_own_signature():
    class Own(FusedAdam):
        def __init__(self, params, rate):
            super().__init__(params, rate)

    assert [*inspect.signature(Own).parameters] == ["params", "rate"]


@pytest.mark.parametrize("shared", [SharedOptions, StepOptions])
def test_shared_options_are_those_that_are_checked(shared):
    names = [*shared.__annotations__]
    assert {*names} <= {field.name for field in dataclasses.fields(Options)} | {*OF_OPTIMIZERS}
    docs = SharedOptions.__doc__ + shared.__doc__
    assert all(f"\n        {name}: " in docs for name in names if name not in INERT)
    assert all(name in docs for name in INERT)


def test_galores_optimizer_refuses_what_it_does_not_take():
    with pytest.raises(TypeError, match=r"argument .direct_cast. must be one of lr, .*, got True"):
        GaLoreAdamW(parameters([(3,)]), direct_cast=True)


def test_an_argument_that_groups_have_is_told_of():
    with pytest.raises(TypeError, match=r"argument .use_muon. \(groups have it\) must be one of"):
        FusedMuon(parameters([(3, 3)]), use_muon=True)


def test_positional_arguments_are_those_of_torchs_adamw():
    count = len(["params", "lr", "betas", "eps", "weight_decay", "amsgrad"])
    theirs = [*inspect.signature(torch.optim.AdamW).parameters][:count]
    assert [*inspect.signature(FusedAdam).parameters][:count] == theirs


def test_an_inert_step_leaves_every_weight():
    """Zero gradients at lr = 0: torch's and Megatron's way to make an optimizer allocate state."""
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149)])
    for adam_w_mode in (True, False):
        param = torch.nn.Parameter(special.clone())
        optimizer = FusedAdam([param], lr=0.0, weight_decay=0.0, adam_w_mode=adam_w_mode)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert_same_bits(param.detach(), special)
    finite = torch.nn.Parameter(special.to(BF16))
    before = finite.detach().clone()
    optimizer = FusedAdam([finite], lr=0.0, weight_decay=0.1, dtype=FP32)
    finite.grad = torch.zeros_like(finite)
    optimizer.step()
    assert_same_bits(finite.detach(), before)
    assert not optimizer.state[finite]["exp_avg"].any()


# --- what TransformerEngine's users and Megatron do with it


def test_the_groups_count_their_steps_from_construction():
    params = parameters([(3,), (4,)])
    optimizer = FusedAdam([{"params": params[:1]}, {"params": []}])
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    train(optimizer, 2)
    optimizer.add_param_group({"params": params[1:]})
    assert [group["step"] for group in optimizer.param_groups] == [2, 2, 0]
    train(optimizer, 1)
    steps = [group["step"] for group in optimizer.param_groups]
    assert steps == [3, 3, 1]
    assert {type(step) for step in steps} == {int}


def test_a_group_that_is_empty_on_this_rank_counts_and_its_count_is_used():
    optimizer = FusedAdam([{"params": parameters([(3,)])}, {"params": []}])
    train(optimizer, 2)
    late, alone = parameters([(3,)]), parameters([(3,)])
    optimizer.param_groups[1]["params"] = late
    expected = FusedAdam(alone)
    expected.param_groups[0]["step"] = 2
    train(optimizer, 1)
    alone[0].grad = late[0].grad
    expected.step()
    assert_same_bits(late[0].detach(), alone[0].detach())


@pytest.mark.parametrize("when", ["at_construction", "later"])
def test_decoupled_gradients_are_read_instead_of_grad(when):
    found = FusedAdam(parameters([(5,)]), use_decoupled_grad=when == "at_construction", **MASTER)
    expected = FusedAdam(parameters([(5,)]), **MASTER)
    found.use_decoupled_grad = True
    (param,), (other,) = (o.param_groups[0]["params"] for o in (found, expected))
    for step in range(2):
        param.grad = torch.full((5,), 100.0, dtype=BF16)  # not to be read
        param.decoupled_grad = values((5,), step, BF16)
        other.grad = values((5,), step, BF16)
        found.step()
        expected.step()
    assert_same_run(found, expected)


def test_without_the_option_decoupled_gradients_are_neither_read_nor_dropped():
    optimizer = FusedAdam(parameters([(5,)]))
    (param,) = optimizer.param_groups[0]["params"]
    param.decoupled_grad = torch.ones(5, dtype=BF16)
    before = param.detach().clone()
    with pytest.warns(UserWarning, match=r"there are gradients in \.decoupled_grad"):
        optimizer.step()
    optimizer.zero_grad()
    assert param.decoupled_grad is not None
    assert_same_bits(param.detach(), before)
    assert not optimizer.state[param]["exp_avg"].any()


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
def test_zero_grad_drops_or_zeroes_what_the_step_reads(decoupled):
    params = parameters([(3,), (4,)])
    optimizer = FusedAdam(params, use_decoupled_grad=decoupled)
    name = "decoupled_grad" if decoupled else "grad"

    def give():
        setattr(params[0], name, torch.ones(3, dtype=BF16))
        return getattr(params[0], name)

    kept = give()
    optimizer.zero_grad(set_to_none=False)
    assert getattr(params[0], name) is kept
    assert_same_bits(kept, torch.zeros(3, dtype=BF16))
    assert getattr(params[1], name, None) is None
    given = give()
    optimizer.zero_grad()
    assert [getattr(param, name) for param in params] == [None, None]
    assert_same_bits(given, torch.ones(3, dtype=BF16), "a gradient that was dropped")


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    (param,) = parameters([(3,)], FP32)
    optimizer, calls = FusedAdam([param]), []
    plain = FusedAdam([torch.nn.Parameter(param.detach().clone())])

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    expected = (param.detach() ** 2).sum()
    twin = plain.param_groups[0]["params"][0]
    twin.grad = 2 * twin.detach()
    loss = optimizer.step(closure)
    assert plain.step() is None
    assert_same_bits(loss.detach(), expected)
    assert calls == [True]
    assert_same_run(optimizer, plain)


def test_the_attributes_that_megatron_fsdp_writes():
    """It sets both after construction, before the first step."""
    optimizer = FusedAdam(parameters([(5,)]), master_weights=True)
    optimizer.master_weights = False
    optimizer.use_decoupled_grad = True
    (param,) = optimizer.param_groups[0]["params"]
    param.decoupled_grad = torch.ones(5)
    optimizer.step()
    assert optimizer.state[param]["master_param"] is None
    assert optimizer.param_groups[0]["step"] == 1
