"""What is refused of DTensors, by name, before anything has changed."""

import re
from functools import partial

import pytest
import torch
from fsdp2_ranks import build, give, gradients, mesh_of, said, snapshot, train, values
from runs import BF16, FP16, FP32, assert_same
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from megaopt import FusedAdam

# What is refused of DTensors, each as a function that a rank calls; nothing may change.

OPTIONS = {"lr": 0.01, "weights": BF16, "dtype": FP32}


def trained(options=OPTIONS):
    model, optimizer = build(options)
    train(model, optimizer, 1)
    give(model.parameters(), gradients(1, dtype=next(model.parameters()).dtype))
    return model, optimizer


def refused(action, optimizer):
    """What is said, where nothing has changed."""
    before = snapshot(optimizer)
    message = said(action)
    assert_same(snapshot(optimizer), before)
    return message


def gradient(placements, kind="grad"):
    """A gradient of other placements, at a step after one that was as it should be."""
    model, optimizer = trained()
    whole = values((5, 3), 1).bfloat16()
    made = DTensor.from_local(whole, mesh_of(), placements, run_check=False)
    optimizer.use_decoupled_grad = True
    for param in model.parameters():
        param.decoupled_grad = param.grad
    model.p0.decoupled_grad = whole if kind == "plain" else made
    return refused(optimizer.step, optimizer)


_GIVEN = ([[Partial()]], [[Replicate()]], [[Replicate()], "plain"])
partial_gradient, replicated_gradient, plain_gradient = (
    partial(gradient, *given) for given in _GIVEN
)


def gradient_of_a_subclass():
    """Its address is 0, where the kernels would read."""
    model, optimizer = trained({**OPTIONS, "backend": "triton"})
    local = model.p0.grad.to_local()
    model.p0.grad._local_tensor = TwoTensor(local, local.clone())
    return refused(optimizer.step, optimizer)


def state_of_a_subclass():
    model, optimizer = trained()
    state = optimizer.state[model.p0]
    wrapped = TwoTensor(*[state["exp_avg"].to_local()] * 2)
    state["exp_avg"] = DTensor.from_local(
        wrapped, mesh_of(), model.p0.placements, run_check=False, shape=(5, 3), stride=(3, 1)
    )
    return said(optimizer.step)


def partial_gradient_of_a_replicated_parameter():
    """Shard, shape and address are as they were: only the placements tell."""
    mesh = mesh_of()
    param = torch.nn.Parameter(distribute_tensor(values((4,), 0), mesh, [Replicate()]))
    param.grad = distribute_tensor(values((4,), 1), mesh, [Replicate()])
    optimizer = FusedAdam([param])
    optimizer.step()
    local = param.grad.to_local()
    param.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    return refused(optimizer.step, optimizer)


def dtensor_gradient_of_a_plain_parameter():
    param = torch.nn.Parameter(values((4,), 0))
    optimizer = FusedAdam([param], use_decoupled_grad=True)
    param.decoupled_grad = distribute_tensor(values((4,), 1), mesh_of(), [Replicate()])
    return refused(optimizer.step, optimizer)


def partial_parameter():
    local = values((4,), 0)
    param = torch.nn.Parameter(DTensor.from_local(local, mesh_of(), [Partial()], run_check=False))
    return said(lambda: FusedAdam([param]))


def parameter_of_a_subclass():
    local = TwoTensor(values((4,), 0), values((4,), 0))
    param = DTensor.from_local(local, mesh_of(), [Replicate()], run_check=False)
    return said(lambda: FusedAdam([param.requires_grad_()]))


def scaled(**options):
    return said(lambda: build({**OPTIONS, **options}))


scaled_exp_avg = partial(scaled, exp_avg_dtype=FP16)
scaled_exp_avg_sq = partial(scaled, exp_avg_sq_dtype=torch.float8_e4m3fn)
scaled_masters = partial(scaled, dtype=None, master_weights=True, master_weight_dtype=FP16)


def plain_masters():
    model, optimizer = trained({"lr": 0.01, "weights": BF16})
    masters = [param.to_local().float() for param in model.parameters()]
    masters[0] = torch.zeros(5, 3)
    return refused(lambda: setattr(optimizer, "master_weights", masters), optimizer)


def plain_value():
    model, optimizer = trained()
    value = torch.zeros(5, 3)
    return refused(lambda: optimizer.set_scaled_state(model.p0, "exp_avg", value), optimizer)


def value_of_another_shape():
    model, optimizer = trained()
    value = distribute_tensor(torch.zeros(3, 5), mesh_of(), model.p0.placements)
    return refused(lambda: optimizer.set_scaled_state(model.p0, "exp_avg", value), optimizer)


def plain_state():
    """A shard that was put in the place of its DTensor."""
    model, optimizer = trained()
    state = optimizer.state[model.p0]
    state["exp_avg"] = state["exp_avg"].to_local()
    return refused(optimizer.step, optimizer)


def loaded_whole():
    _, optimizer = trained()
    saved = optimizer.state_dict()
    saved["state"][0] = {n: t.full_tensor() for n, t in saved["state"][0].items()}
    return refused(lambda: optimizer.load_state_dict(saved), optimizer)


def loaded_replicated():
    _, optimizer = trained()
    saved = optimizer.state_dict()
    state = saved["state"][0]
    saved["state"][0] = {n: t.redistribute(placements=[Replicate()]) for n, t in state.items()}
    return refused(lambda: optimizer.load_state_dict(saved), optimizer)


def flat_parameters():
    """As FullyShardedDataParallel marks its own; with clip_norm, and without."""
    found = []
    for arguments in ({"clip_norm": 1.0}, {}):
        param = torch.nn.Parameter(values((6,), 0))
        param._fsdp_flattened = True
        param.grad = values((6,), 1)
        optimizer = FusedAdam([param])
        found.append(said(lambda step=optimizer.step, given=arguments: step(**given)))
    return found


REFUSED = {
    "partial_gradient": r"parameter 0 of group 0.*gradient.*Shard\(dim=0\).*Partial\(sum\)",
    "replicated_gradient": r"parameter 0 of group 0.*gradient.*Shard\(dim=0\).*Replicate\(\)",
    "plain_gradient": r"parameter 0 of group 0.*gradient.*Shard\(dim=0\).*a plain tensor",
    "gradient_of_a_subclass": r"parameter 0 of group 0: the gradient: .*must be .*got TwoTensor",
    "state_of_a_subclass": r"parameter 0 of group 0: state 'exp_avg': .*must be .*got TwoTensor",
    "partial_gradient_of_a_replicated_parameter": r"Replicate\(\).*Partial\(sum\)",
    "dtensor_gradient_of_a_plain_parameter": r"a plain tensor .*, got a DTensor.*Replicate\(\)",
    "partial_parameter": r"parameter 0 of group 0: placements must .* got \(Partial\(sum\),\)",
    "parameter_of_a_subclass": r"parameter 0 of group 0: a DTensor must be .* got one of TwoTensor",
    "scaled_exp_avg": r"exp_avg_dtype must be .*bfloat16 for a DTensor, got torch.float16",
    "scaled_exp_avg_sq": r"exp_avg_sq_dtype must be .* for a DTensor, got torch.float8_e4m3fn",
    "scaled_masters": r"master_weight_dtype must be .*float32 for a DTensor, got torch.float16",
    "plain_masters": r"master_weights\[0\].*a plain tensor of shape \(5, 3\).*distribute_tensor",
    "plain_value": r"exp_avg must .*, got a plain tensor of shape \(5, 3\).*distribute_tensor",
    "value_of_another_shape": r"exp_avg must be .*\(5, 3\), got .*\(3, 5\)",
    "plain_state": r"parameter 0 of group 0: state 'exp_avg' must .* got a plain tensor",
    "loaded_whole": r"parameter 0 of group 0: 'exp_avg' in the state dict must .* a plain tensor",
    "loaded_replicated": r"parameter 0 of group 0: 'exp_avg' in the state dict.*Replicate\(\)",
}


@pytest.mark.parametrize(("case", "message"), REFUSED.items(), ids=REFUSED)
def test_refused(on_ranks, case, message):
    for found in on_ranks(2, globals()[case]):
        assert re.search(message, found), found


def test_flat_parameters_of_fsdp1_are_refused_where_gradients_are_measured(on_ranks):
    for clipped, plain in on_ranks(2, flat_parameters):
        assert re.search(r"parameter 0 .*FSDP1.*clip_coefficient", clipped)
        assert plain == "nothing was refused"
