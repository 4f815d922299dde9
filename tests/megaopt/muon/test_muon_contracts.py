"""FusedMuon beside torch.optim.Muon, and beside the operations of Emerging-Optimizers' Muon."""

import copy
import pickle
import random

import pytest
import torch
from handling import refused
from runs import (
    BF16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)

from megaopt import FusedMuon

ON_CPU, ON_GPU = range(20), range(20, 120)
ON_EITHER = [*ON_CPU, *(pytest.param(number, marks=pytest.mark.gpu) for number in ON_GPU)]


def drawn(number):
    """Shapes, a dtype and arguments of torch.optim.Muon."""
    chosen, most = random.Random(number), 600 if number in ON_GPU else 70
    shapes = [(chosen.randint(1, most), chosen.randint(1, most)) for _ in range(3)]
    return shapes, chosen.choice((FP32, BF16)), {
        "lr": chosen.choice((1e-3, 0.02, 0.5)),
        "weight_decay": chosen.choice((0.0, 0.1, 0.3)),
        "momentum": chosen.choice((0.0, 0.9, 0.95)),
        "nesterov": chosen.random() < 0.5,
        "ns_coefficients": chosen.choice(((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5))),
        "eps": chosen.choice((1e-7, 1e-3)),
        "ns_steps": chosen.choice((1, 3, 5)),
        "adjust_lr_fn": chosen.choice((None, "original", "match_rms_adamw")),
    }  # fmt: skip


@pytest.mark.parametrize("number", ON_EITHER)
def test_contract_torch_has_torchs_bits(number):
    """Weights and momentum, and what a state dict of the one makes in the other."""
    (shapes, dtype, options), place = drawn(number), "cuda" if number in ON_GPU else "cpu"
    theirs, own = (
        [torch.nn.Parameter(each.detach().to(place)) for each in parameters(shapes, dtype)]
        for _ in range(2)
    )
    theirs = torch.optim.Muon(theirs, **options)
    contract = {"contract": "torch", "momentum_buffer_dtype": dtype}
    ours = FusedMuon(own, **options, **contract)
    assert {**ours.param_groups[0], **theirs.param_groups[0]}.keys() == ours.param_groups[0].keys()
    for step in range(4):
        for optimizer in (theirs, ours):
            train(optimizer, 1, step)
        assert_same(snapshot(ours)["weights"], snapshot(theirs)["weights"])
        for own_param, param in zip(params_of(ours), params_of(theirs), strict=True):
            found = ours.state[own_param]["momentum_buffer"]
            assert_same(found, theirs.state[param]["momentum_buffer"])
        if step == 1:
            again = FusedMuon(copy.deepcopy(params_of(ours)), **contract)
            again.load_state_dict(theirs.state_dict())
            ours = again


SCHEDULES = {
    "OneCycleLR": {"max_lr": 0.05, "total_steps": 8},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.05, "step_size_up": 3},
    "CyclicLR, without": {"base_lr": 0.01, "max_lr": 0.05, "step_size_up": 3,
                          "cycle_momentum": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_cycle_the_momentum_as_torchs(name):
    """The betas are AdamW's: an optimizer whose defaults have them gets these cycled instead."""
    kind = getattr(torch.optim.lr_scheduler, name.split(",")[0])
    theirs = torch.optim.Muon(parameters([(20, 12), (8, 8)], FP32))
    ours = FusedMuon(parameters([(20, 12), (8, 8)], FP32), contract="torch")
    both = [(each, kind(each, **SCHEDULES[name])) for each in (theirs, ours)]
    momentums = set()
    for step in range(7):
        for optimizer, schedule in both:
            train(optimizer, 1, step)
            schedule.step()
        (group,), (other,) = ours.param_groups, theirs.param_groups
        assert (group["momentum"], group["lr"]) == (other["momentum"], other["lr"])
        assert group["betas"] == (0.9, 0.95)
        momentums.add(group["momentum"])
        assert_same(snapshot(ours)["weights"], snapshot(theirs)["weights"])
    assert (len(momentums) > 2) == SCHEDULES[name].get("cycle_momentum", True)


def test_new_groups_have_the_betas_that_muon_was_made_with():
    """In copies too."""
    optimizer = FusedMuon(parameters([(4, 4)]), betas=(0.5, 0.75))
    assert "betas" not in optimizer.defaults
    for own in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own.add_param_group({"params": parameters([(3,)]), "use_muon": False})
        own.add_param_group({"params": parameters([(3,)]), "betas": (0.25, 0.5)})
        assert [group["betas"] for group in own.param_groups] == [(0.5, 0.75)] * 2 + [(0.25, 0.5)]
        group = {"params": parameters([(3,)]), "use_muon": True}
        before = dict(group)
        with pytest.raises(ValueError, match="use_muon"):
            own.add_param_group(group)
        assert group.keys() == before.keys()


def test_contract_torch_is_not_contract_ieee():
    """Else the test above could not tell."""
    found = []
    for contract in ("torch", "ieee"):
        optimizer = FusedMuon(parameters([(24, 40)], FP32), contract=contract)
        train(optimizer, 2)
        found.append(snapshot(optimizer)["weights"])
    with pytest.raises(AssertionError):
        assert_same(*found)


SETS = {
    "quintic": ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
    "cubic5": ((3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0),
               (2.5368962, -1.4312570, 0.0), (2.4418906, -1.2764040, 0.0),
               (2.2230472, -0.9630650, 0.0)),
}  # fmt: skip


def step_of_emerging_optimizers(param, buffer, lr, momentum, nesterov, coefficients):
    """OrthogonalizedOptimizer.step of 0.2.0, and of 0.5.0 with "cubic5": decay 0.25, "spectral"."""
    param.add_(param, alpha=-0.25 * lr)
    buffer.lerp_(param.grad, 1 - momentum)
    x = param.grad.lerp(buffer, momentum) if nesterov else buffer
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = torch.nn.functional.normalize(x, p=2, dim=(-2, -1), eps=1e-7).to(BF16)
    for a, b, c in SETS[coefficients]:
        gram = x @ x.mT
        if c:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = torch.addmm(x, gram, x, beta=a, alpha=b)
    x = (x.float().mT if is_tall else x.float()) * max(param.shape) ** 0.5 * 1.0
    param.add_(x, alpha=-lr)


@torch.no_grad()
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weights", [FP32, BF16])
@pytest.mark.parametrize("coefficients", SETS)
def test_contract_eo_has_the_operations_of_emerging_optimizers(coefficients, nesterov, weights):
    """Of fp32 parameters, or of fp32 masters as Megatron keeps them."""
    shapes, options = [(24, 40), (33, 7), (16, 16)], MASTER if weights == BF16 else {}
    params = parameters(shapes, weights)
    optimizer = FusedMuon(
        params, 0.02, 0.25, 0.75, nesterov, coefficients, adjust_lr_fn="spectral", contract="eo",
        **options,
    )  # fmt: skip
    masters = [param.detach().float().clone() for param in params]
    buffers = [torch.zeros(shape) for shape in shapes]
    for step in range(3):
        train(optimizer, 1, step)
        for master, buffer, param in zip(masters, buffers, params, strict=True):
            master.grad = param.grad.float()
            step_of_emerging_optimizers(master, buffer, 0.02, 0.75, nesterov, coefficients)
    kept = [own["momentum_buffer"] for own in snapshot(optimizer)["states"]]
    assert_same(kept, buffers)
    assert_same(snapshot(optimizer)["weights"], [master.to(weights) for master in masters])


@pytest.mark.parametrize("contract", ["torch", "eo"])
def test_vectors_take_adamw_beside_a_contract(contract):
    """torch's needs an NVIDIA GPU; beside Emerging-Optimizers' it is ieee's."""
    params = parameters([(4, 6), (9,)], FP32)
    if contract == "torch" and not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="contract='torch' does not work for parameter 1"):
            FusedMuon(params, contract=contract)
        return
    expected = FusedMuon([copy.deepcopy(params[1])])
    optimizer = FusedMuon(params, contract=contract)
    train(optimizer, 1)
    params_of(expected)[0].grad = params[1].grad.clone()
    expected.step()
    assert_same(params[1].detach(), params_of(expected)[0].detach())


REFUSED = {
    "momentum": (BF16, {}, "momentum_buffer_dtype must be torch.bfloat16 with contract='torch'"),
    "master": (BF16, MASTER | {"momentum_buffer_dtype": BF16},
               "momentum_buffer_dtype must be torch.float32 with contract='torch', as parameter 0"),
    "remainders": (BF16, REMAINDERS, "master_weight_dtype must be torch.float32, of whole masters"),
    "sets": (FP32, {"ns_coefficients": "quintic"}, "ns_coefficients must be the same three numbers "
             "in all steps with contract='torch', got"),
    "adjust": (FP32, {"adjust_lr_fn": "spectral"}, "adjust_lr_fn must be one of None, 'original', "
               "'match_rms_adamw' with contract='torch', got 'spectral'"),
    "split": (FP32, {"split_sizes": [3, 1]}, "split_sizes must be None with"),
    "normuon": (FP32, {"second_moment": "normuon"}, "second_moment must be None with"),
    "fp16": (FP32, {"precision": "fp16"}, "precision must be 'bf16' with"),
    "gram": (FP32, {"method": "gram", "precision": "fp16"}, "method must be 'auto' or"),
    "capturable": (FP32, {"capturable": True}, "capturable must be False with contract='torch'"),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_torch_has_not_is_refused(dtype, options, message):
    options = dict(options)
    group = {"params": parameters([(4, 6)], dtype), "split_sizes": options.pop("split_sizes", None)}
    with pytest.raises(ValueError, match=message):
        FusedMuon([group], contract="torch", **options)


def test_other_than_two_dimensions_are_refused_where_torch_refuses_them():
    with pytest.raises(ValueError, match="parameter 0 of group 0 must be of two dimensions with"):
        FusedMuon(parameters([(2, 3, 4)], FP32), contract="torch")


def test_bf16_parameters_without_masters_are_refused_by_contract_eo():
    with pytest.raises(
        ValueError, match="parameter 0 of group 0 must be fp32 or have an fp32 master"
    ):
        FusedMuon(parameters([(4, 6)], BF16), contract="eo")


def test_a_group_that_contract_torch_cannot_step_leaves_the_optimizer():
    optimizer = FusedMuon(parameters([(4, 6)], FP32), contract="torch")
    with refused(optimizer, "momentum_buffer_dtype must be torch.bfloat16"):
        optimizer.add_param_group({"params": parameters([(4, 6)], BF16)})


def test_a_clipped_and_a_skipped_step_of_contract_torch():
    """The clipped one is torch's of clipped gradients; a skipped one changes nothing."""
    ours = FusedMuon(parameters([(12, 20)], FP32), contract="torch", nonfinite="skip")
    theirs = torch.optim.Muon(parameters([(12, 20)], FP32))
    for optimizer in (ours, theirs):
        give_gradients(params_of(optimizer), 0)
    ours.step(clip_norm=1.0)
    coefficient = (1.0 / (ours.grad_norm + 1e-6)).clamp(max=1.0)
    params_of(theirs)[0].grad *= coefficient
    theirs.step()
    assert_same(snapshot(ours)["weights"], snapshot(theirs)["weights"])
    before = snapshot(ours)
    params_of(ours)[0].grad = values((12, 20), 1) * torch.inf
    ours.step()
    assert_same(snapshot(ours), before)
