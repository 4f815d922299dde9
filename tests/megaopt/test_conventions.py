"""What every torch.optim.Optimizer does: schedulers, hooks, groups, names, signatures."""

import copy
import inspect
import pickle

import pytest
import torch
from handling import both_backends, copy_weights, train_all
from runs import FP32, MASTER, assert_same, assert_same_run, parameters, snapshot, train
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from megaopt import FusedAdam

SHAPES = [(3, 4), (5,)]


@both_backends
@pytest.mark.parametrize(
    "lr", [0.5, torch.tensor(0.5), torch.tensor([0.5])], ids=["float", "0d", "1d"]
)
def test_a_scheduler_changes_lr_between_steps(backend, lr):
    """A float is replaced in the group, a tensor filled in place; the step sees either."""
    scheduled = FusedAdam(parameters(SHAPES), lr=copy.deepcopy(lr), backend=backend, **MASTER)
    scheduler = LambdaLR(scheduled, lambda step: 0.5**step)
    by_hand = FusedAdam(parameters(SHAPES), **MASTER)
    group = scheduled.param_groups[0]
    for step in range(3):
        by_hand.param_groups[0]["lr"] = 0.5 * 0.5**step
        train_all((scheduled, by_hand), 1, first=step)
        assert isinstance(group["lr"], type(lr))
        found, expected = snapshot(scheduled), snapshot(by_hand)
        assert_same(found["weights"], expected["weights"])
        assert_same(found["states"], expected["states"])
        scheduler.step()
    assert float(group["lr"]) == 0.0625


def test_a_schedule_resumes():
    def made():
        optimizer = FusedAdam(parameters(SHAPES), lr=0.5, **MASTER)
        return optimizer, CosineAnnealingLR(optimizer, T_max=10)

    def run(optimizer, scheduler, steps, first):
        for step in range(first, first + steps):
            train(optimizer, 1, first=step)
            scheduler.step()

    straight, before, after = made(), made(), made()
    run(*straight, 4, 0)
    run(*before, 2, 0)
    copy_weights(before[0], after[0])
    after[0].load_state_dict(before[0].state_dict())
    after[1].load_state_dict(before[1].state_dict())
    run(*after, 2, 2)
    assert_same_run(after[0], straight[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.5), ("betas", (0.5, 0.75)), ("eps", 0.01), ("weight_decay", 0.5),
        ("bias_correction", False),
    ],
)  # fmt: skip
def test_a_hyper_parameter_changed_between_steps_counts_at_the_next(name, value):
    """As in an optimizer that had it from construction and took over the state."""
    changed, given, untouched = (
        FusedAdam(parameters(SHAPES, FP32), **options) for options in ({}, {name: value}, {})
    )
    train(changed, 2)
    saved = changed.state_dict()
    for optimizer in (given, untouched):
        optimizer.load_state_dict(saved)
        copy_weights(changed, optimizer)
    given.param_groups[0][name] = given.defaults[name]
    changed.param_groups[0][name] = value
    train_all((changed, given, untouched), 1, first=2)
    assert_same_run(changed, given)
    weights = [optimizer.param_groups[0]["params"][0] for optimizer in (changed, untouched)]
    assert not torch.equal(*weights)


def test_groups_and_parameters_keep_their_order():
    params = parameters([(2,), (3,), (4,)])
    optimizer = FusedAdam([{"params": [params[2], params[0]]}, {"params": params[1]}])
    found = [param for group in optimizer.param_groups for param in group["params"]]
    assert [id(param) for param in found] == [id(params[index]) for index in (2, 0, 1)]
    assert optimizer.state_dict()["param_groups"][1]["params"] == [2]


def test_named_parameters_are_kept_and_named_in_errors():
    model = torch.nn.Linear(2, 3)
    optimizer = FusedAdam(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, 1)
    other = FusedAdam(torch.nn.Linear(2, 3).named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == ["weight", "bias"]
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ValueError, match="parameter 'bias': state 'exp_avg'"):
        optimizer.step()


def test_a_generator_of_parameters_and_a_model_of_modules():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = FusedAdam(module.weight for module in model)
    assert [p is m.weight for p, m in zip(optimizer.param_groups[0]["params"], model, strict=True)]
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])


def test_step_hooks_run_before_and_after():
    optimizer, seen = FusedAdam(parameters(SHAPES)), []

    def look(name):
        def hook(own, args, kwargs):
            seen.append((name, own is optimizer, own.param_groups[0]["step"], len(own.state)))

        return hook

    optimizer.register_step_pre_hook(look("before"))
    handle = optimizer.register_step_post_hook(look("after"))
    train(optimizer, 1)
    assert seen == [("before", True, 0, 0), ("after", True, 1, 2)]
    handle.remove()
    train(optimizer, 1)
    assert [name for name, *_ in seen] == ["before", "after", "before"]


def test_state_dict_hooks_run_and_may_add_to_it():
    optimizer, order = FusedAdam(parameters(SHAPES)), []
    train(optimizer, 1)

    def add(own, packed):
        order.append("after")
        return {**packed, "epoch": 3}

    optimizer.register_state_dict_pre_hook(lambda own: order.append("before"))
    optimizer.register_state_dict_post_hook(add)
    packed = optimizer.state_dict()
    assert order == ["before", "after"]
    assert packed["epoch"] == 3
    FusedAdam(parameters(SHAPES)).load_state_dict(packed)


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "in_place"])
def test_load_state_dict_hooks_run_and_may_change_it(returns):
    source, target = FusedAdam(parameters(SHAPES)), FusedAdam(parameters(SHAPES))
    train(source, 2)
    saved, seen = source.state_dict(), []

    def pre(own, state_dict):
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        if returns:
            return {**state_dict, "param_groups": groups}
        state_dict["param_groups"] = groups
        return None

    target.register_load_state_dict_pre_hook(pre)
    target.register_load_state_dict_post_hook(
        lambda own: seen.append((own.param_groups[0]["lr"], len(own.state)))
    )
    target.load_state_dict(saved)
    assert seen == [(0.5, 2)]
    assert saved["param_groups"][0]["lr"] == 1e-3  # the caller's dict is not written


def test_hooks_and_schedulers_do_not_stop_deepcopy_and_pickle():
    optimizer = FusedAdam(parameters(SHAPES), **MASTER)
    LambdaLR(optimizer, lambda step: 0.5)
    optimizer.register_step_post_hook(lambda *_: None)
    train(optimizer, 1)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_same_run(twin, optimizer)
        expected = copy.deepcopy(optimizer)
        train_all((twin, expected), 1, first=1)
        assert_same_run(twin, expected)


def test_repr_names_the_class_and_the_groups():
    printed = repr(FusedAdam(parameters(SHAPES), lr=0.25))
    assert printed.startswith("FusedAdam (\nParameter Group 0")
    assert "lr: 0.25" in printed
    assert "step: 0" in printed


def test_defaults_fill_groups_and_stay():
    """Groups that are added later too, whose steps are in test_random_bits.py."""
    first, second = parameters(SHAPES)
    optimizer = FusedAdam([first], lr=0.25, eps=1e-4)
    train(optimizer, 3)
    optimizer.add_param_group({"params": second, "lr": 0.5})
    group = optimizer.param_groups[1]
    assert (group["lr"], group["eps"], group["step"]) == (0.5, 1e-4, 0)
    assert (optimizer.defaults["lr"], optimizer.defaults["step"]) == (0.25, 0)


def overridden():
    """The public methods of torch.optim.Optimizer that megaopt's optimizers define anew."""
    own = FusedAdam.__mro__[: FusedAdam.__mro__.index(torch.optim.Optimizer)]
    return sorted(
        name
        for name, method in vars(torch.optim.Optimizer).items()
        if callable(method) and not name.startswith("_") and any(name in vars(cls) for cls in own)
    )


@pytest.mark.parametrize("name", overridden())
def test_signatures_are_torchs_with_optional_ones_after(name):
    ours = [*inspect.signature(getattr(FusedAdam, name)).parameters.values()]
    theirs = [*inspect.signature(getattr(torch.optim.Optimizer, name)).parameters.values()]
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    for own, their in zip(ours, theirs, strict=False):
        assert their.default is inspect.Parameter.empty or own.default == their.default
    assert all(p.default is not inspect.Parameter.empty for p in ours[len(theirs) :])


def test_it_is_a_torch_optimizer_without_gradients_of_its_own():
    (param,) = parameters([(5,)], FP32)
    optimizer = FusedAdam([param], dtype=FP32)
    assert isinstance(optimizer, torch.optim.Optimizer)
    param.grad = torch.ones(5, requires_grad=True)
    optimizer.step()
    assert param.is_leaf
    assert param.grad_fn is None
    assert not any(t.requires_grad for t in optimizer.state[param].values() if t is not None)
