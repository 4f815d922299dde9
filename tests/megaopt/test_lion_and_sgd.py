"""FusedLion and FusedSGD, and AMSGrad and maximize of FusedAdam, as optimizers."""

import copy

import pytest
import torch
from handling import both_backends, refused
from runs import FP32, assert_same, parameters, train

from megaopt import FusedAdam, FusedLion, FusedSGD

SGD_KINDS = {
    "sgd": {},
    "sgd_momentum": {"momentum": 0.9, "dampening": 0.25},
    "sgd_nesterov": {"momentum": 0.9, "nesterov": True},
    "sgdw": {"decoupled_weight_decay": True},
    "sgdw_momentum": {"momentum": 0.9, "decoupled_weight_decay": True},
    "sgdw_nesterov": {"momentum": 0.9, "nesterov": True, "decoupled_weight_decay": True},
}
KINDS = {
    "lion": (FusedLion, {}),
    **{name: (FusedSGD, options) for name, options in SGD_KINDS.items()},
    "adamw_amsgrad": (FusedAdam, {"amsgrad": True}),
    "adam_amsgrad": (FusedAdam, {"amsgrad": True, "adam_w_mode": False}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
HYPER = {"lr": 2.0**-4, "weight_decay": 0.25}


def made(kind, **more):
    optimizer, options = KINDS[kind]
    return optimizer(parameters(), **{**HYPER, **options, **more})


@pytest.mark.parametrize("kind", [kind for kind in SGD_KINDS if kind.startswith("sgd_")] + ["sgd"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_step_of_sgd_is_within_one_ulp_of_torchs(kind, before):
    """Also after torch's own steps, whose state dict is loaded.

    Weights are in [1, 2), where an ulp is 2**-23, and what lr multiplies is below 2. torch may
    contract each of its three multiply-adds, so that this differs by at most three of its own ulps,
    3 * 2**-23, before lr = 2**-4 multiplies it: by less than 2**-25, with the rounding of that
    product. The sums before their last rounding then differ by less than half an ulp, the weights
    by at most one.
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.rand(4000, generator=generator) * 0.25 + 1.25
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    torchs = torch.optim.SGD([theirs], **HYPER, **SGD_KINDS[kind])
    for _ in range(before):
        theirs.grad = torch.rand(4000, generator=generator) * 0.1 - 0.05
        torchs.step()
    ours.data.copy_(theirs.data)
    found = FusedSGD([ours], **HYPER, **SGD_KINDS[kind])
    found.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert found.param_groups[0]["step"] == bool(before and found.rule.moments)
    theirs.grad = torch.rand(4000, generator=generator) * 0.1 - 0.05
    ours.grad = theirs.grad.clone()
    found.step()
    torchs.step()
    assert bool((theirs.detach() >= 1).all() and (theirs.detach() < 2).all())
    apart = ours.detach().view(torch.int32) - theirs.detach().view(torch.int32)
    assert int(apart.abs().max()) <= 1
    assert not torch.equal(ours.detach(), start)


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Adam])
def test_amsgrad_goes_to_torch_and_back(theirs):
    """max_exp_avg_sq too, whose name is torch's."""
    options = {"amsgrad": True, "maximize": True, **HYPER}
    source = theirs(parameters(dtype=FP32), **options)
    train(source, 2)
    decoupled = theirs is torch.optim.AdamW
    ours = FusedAdam(parameters(dtype=FP32), adam_w_mode=decoupled, **options)
    ours.load_state_dict(copy.deepcopy(source.state_dict()))
    back = theirs(parameters(dtype=FP32), **options)
    back.load_state_dict(ours.to_torch_state_dict())
    assert_same(back.state_dict()["state"], source.state_dict()["state"])
    assert "max_exp_avg_sq" in back.state_dict()["state"][0]


REFUSED = {
    "amsgrad, te": (FusedAdam, {"amsgrad": True, "contract": "te"}, "amsgrad must be False with"),
    "maximize, te": (FusedAdam, {"maximize": True, "contract": "te"}, "maximize must be False wi"),
    "maximize": (FusedLion, {"maximize": None}, "maximize must be one of True, False, got None"),
    "betas": (FusedLion, {"betas": (0.9,)}, r"group 0: betas must be two numbers, got \(0.9,\)"),
    "beta": (FusedLion, {"betas": (0.9, 1.0)}, r"group 0: betas\[1\] must be a number >= 0 and < "),
    "eps": (FusedLion, {"eps": 1e-8}, "argument .eps. must be one of lr, betas, weight_decay"),
    "momentum": (FusedSGD, {"momentum": 1.0}, "momentum must be a number >= 0 and < 1, got 1.0"),
    "dampening": (FusedSGD, {"dampening": 2}, "dampening must be a number >= 0 and <= 1, got 2"),
    "nesterov": (FusedSGD, {"nesterov": True}, "nesterov must be False without momentum or with"),
    "nesterov, dampening": (
        FusedSGD,
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        "group 0: nesterov must be False without momentum or with dampening, got True",
    ),
    "moment": (FusedSGD, {"momentum_buffer_dtype": torch.complex64}, "momentum_buffer_dtype must"),
}


@pytest.mark.parametrize(("optimizer", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_allowed_is_refused_by_name(optimizer, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer(parameters(), **options)


@both_backends
@pytest.mark.parametrize("options", [{}, {"dampening": 0.25}], ids=str)
def test_a_buffer_rests_while_momentum_is_0(backend, options):
    """As torch.optim.SGD's; of numbers of few bits, so that neither rounds."""
    pairs = [(FusedSGD, {"backend": backend}), (torch.optim.SGD, {})]
    weights = []
    for kind, more in pairs:
        (param,) = parameters([(4,)], FP32)
        param.data.zero_()
        optimizer = kind([param], lr=0.5, momentum=0.5, **options, **more)
        for step, momentum in enumerate((0.5, 0.5, 0.0, 0.0, 0.5)):
            optimizer.param_groups[0]["momentum"] = momentum
            param.grad = torch.full((4,), 2.0**-step)
            optimizer.step()
        buffer = optimizer.state[param]["momentum_buffer"]
        weights.append((param.detach(), buffer))
    assert_same(*weights)


def test_groups_may_differ_in_momentum_but_not_have_one_without_a_buffer():
    optimizer = FusedSGD(parameters(), momentum=0.5)
    optimizer.add_param_group({"params": parameters([(3,)]), "momentum": 0.0})
    train(optimizer, 2)
    plain = FusedSGD(parameters())
    with pytest.raises(ValueError, match="group 1: momentum must be 0, as the optimizer's own is"):
        plain.add_param_group({"params": parameters([(3,)]), "momentum": 0.5})


@pytest.mark.sample(3)
@pytest.mark.parametrize("other", KINDS)
@each_kind
def test_another_optimizers_state_is_refused(kind, other):
    source, target = made(other), made(kind)
    train(source, 2)
    if source.rule.moments == target.rule.moments and kind[:4] == other[:4]:
        return  # the same state: sgd's and sgdw's kinds are told apart below
    with refused(target, r"^(group|parameter) 0"):
        target.load_state_dict(source.state_dict())


def test_other_kinds_of_sgd_are_refused():
    for name, saved, own in [
        ("nesterov", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9}),
        ("decoupled_weight_decay", {"decoupled_weight_decay": True}, {}),
    ]:
        source, target = FusedSGD(parameters(), **saved), FusedSGD(parameters(), **own)
        with pytest.raises(ValueError, match=f"the state dict was saved under {name}=True"):
            target.load_state_dict(source.state_dict())
