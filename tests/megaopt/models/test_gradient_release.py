"""Parameters that are stepped within the backward pass, against the step behind it, bit for bit."""

import copy
import gc
import pickle
import weakref

import fsdp2_ranks
import pytest
import torch
from bits import assert_same_bits
from fsdp2_ranks import perceptron, said
from handling import refused
from runs import BF16, FP32, MASTER, assert_same, assert_same_run, values
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import megaopt
from megaopt import FusedAdam, release_gradients


def released_under_ddp():
    """The refusal's message."""
    model = torch.nn.parallel.DistributedDataParallel(perceptron())
    optimizer = FusedAdam(model.parameters(), dtype=FP32)
    return said(lambda: megaopt.release_gradients(model, optimizer))


pytestmark = pytest.mark.usefixtures("young_heap")

STOCHASTIC = {
    "master_weights": True,
    "master_weight_dtype": "remainder8_stochastic",
    "exp_avg_dtype": "bfloat16_stochastic",
    "exp_avg_sq_dtype": "bfloat16_stochastic",
    "seed": 7,
}


class Net(nn.Module):
    """A weight that is used twice, one that is not always used, and a frozen one."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        for seed, param in enumerate(self.parameters()):
            param.data = values(param.shape, seed).to(dtype)

    def forward(self, x, scaled=True):
        x = self.inner(torch.tanh(self.inner(x) * self.frozen))
        return self.outer(x * self.scale if scaled else x)


def groups_of(model):
    return [
        {"params": list(model.inner.parameters()), "lr": 0.01},
        {"params": [*model.outer.parameters(), model.scale, model.frozen], "lr": 0.02},
    ]


def pair(kind=FusedAdam, **options):
    """Two equal models, each with an optimizer; the second's gradients are released."""
    made = []
    for _ in range(2):
        model = Net()
        made.append((model, kind(groups_of(model), **options)))
    (plain, expected), (model, found) = made
    return plain, expected, model, found, release_gradients(model, found)


def backward(model, step, scaled=True):
    x = values((5, 6), 100 + step, model.scale.dtype)
    loss = model(x, scaled).float().pow(2).sum()
    loss.backward()
    return loss.detach()


def iterate(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        backward(model, step, scaled=step % 3 != 1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [MASTER, STOCHASTIC], ids=["masters", "stochastic"])
def test_the_bits_are_the_plain_steps(options):
    """Of weights that are used twice, or not always; all kinds: test_every_kind.py."""
    plain, expected, model, found, _ = pair(**options)
    for optimizer, own in ((expected, plain), (found, model)):
        iterate(own, optimizer, 5)
    assert_same_run(found, expected)
    assert [group["step"] for group in found.param_groups] == [5, 5]


def test_edited_param_numbers_are_those_of_the_next_step():
    plain, expected, model, found, _ = pair(**STOCHASTIC)
    for optimizer, own in ((expected, plain), (found, model)):
        iterate(own, optimizer, 2)
        optimizer.param_groups[0]["param_numbers"] = [10, 11]
        iterate(own, optimizer, 1, 2)
        optimizer.param_groups[0]["param_numbers"][:] = [12, 10]
        iterate(own, optimizer, 2, 3)
    assert_same_run(found, expected)
    found.param_groups[0]["param_numbers"][:] = [12, 12]
    with pytest.raises(ValueError, match="number 12, by which random bits are drawn, must be its"):
        backward(model, 5)


def test_a_gradient_is_freed_before_the_next_is_there():
    """Hooks that run before ours count the gradients that are alive, also behind other names."""

    def most(released):
        model = Net()
        optimizer = FusedAdam(groups_of(model), **MASTER)
        params, seen, alive = [p for p in model.parameters() if p.requires_grad], [], []

        def count(param):
            gc.collect()
            alive.append(weakref.ref(param.grad))
            seen.append(sum(grad() is not None for grad in alive))

        for param in params:
            param.register_post_accumulate_grad_hook(count)
        if released:
            release_gradients(model, optimizer)
        for step in range(2):
            backward(model, step)
            assert [param.grad is None for param in params] == [released] * len(params)
            optimizer.step()
            optimizer.zero_grad()
        return max(seen), len(params)

    assert most(released=False) == (5, 5)
    assert most(released=True) == (1, 5)


def test_a_scheduler_counts_and_sets_lr():
    plain, expected, model, found, _ = pair(**MASTER)
    for optimizer, own in ((expected, plain), (found, model)):
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(4):
            backward(own, step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert found.param_groups[0]["lr"] == 0.01 * 0.5**4
    assert_same_run(found, expected)


def test_a_closure_and_hooks_of_the_step():
    plain, expected, model, found, _ = pair(**MASTER)
    called = []
    found.register_step_post_hook(lambda *_: called.append("post"))
    losses = [
        optimizer.step(lambda own=own: backward(own, 0))
        for optimizer, own in ((expected, plain), (found, model))
    ]
    assert_same_bits(*losses)
    assert called == ["post"]
    assert_same_run(found, expected)


def test_parameters_that_are_not_chosen_take_the_plain_step():
    plain, expected, model, found, release = pair(**MASTER)
    release.remove()
    release_gradients(list(model.outer.parameters()), found)
    backward(plain, 0)
    expected.step()
    backward(model, 0)
    gone = {name for name, param in model.named_parameters() if param.grad is None}
    assert gone == {"frozen", "outer.weight", "outer.bias"}
    found.step()
    assert_same_run(found, expected)


def test_removed_and_taken_up_again():
    """Plain steps between released ones, in the middle of an iteration too."""
    plain, expected, model, found, release = pair(**MASTER)
    iterate(plain, expected, 6)
    iterate(model, found, 2)
    backward(model, 2)
    release.remove()
    release.remove()
    assert not release.active
    found.step()
    iterate(model, found, 1, first=3)
    assert release_gradients(model, found).active
    iterate(model, found, 2, first=4)
    assert_same_run(found, expected)


def test_saved_loaded_and_copied():
    """Between two iterations and, what a failed one is taken back by, in the middle of one."""
    plain, expected, model, found, _ = pair(**STOCHASTIC)
    iterate(plain, expected, 4)
    iterate(model, found, 2)
    saved = copy.deepcopy(found.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="none of the . parameters has a gradient"):
        pickle.loads(pickle.dumps(found)).step(clip_norm=1.0)  # it releases nothing
    backward(model, 6)
    model.load_state_dict(weights)
    found.load_state_dict(saved)
    iterate(model, found, 2, first=2)
    assert_same_run(found, expected)


@pytest.mark.parametrize("before", [False, True])
def test_a_written_weight_sets_its_master(before):
    """Also one that was written before the first released step."""
    plain, expected, model, found, release = pair(**MASTER)
    if before:
        release.remove()
    for optimizer, own in ((expected, plain), (found, model)):
        iterate(own, optimizer, 2)
        with torch.no_grad():
            own.inner.weight.clamp_(-0.1, 0.1)
            own.outer.weight.mul_(2)
    if before:
        release_gradients(model, found)
    for optimizer, own in ((expected, plain), (found, model)):
        with pytest.warns(UserWarning, match="was written outside the optimizer") as warned:
            iterate(own, optimizer, 1, first=2)
        assert len(warned) == 1
    assert_same_run(found, expected)


def test_states_that_others_put_in_place():
    plain, expected, model, found, _ = pair(**MASTER)
    for optimizer, own in ((expected, plain), (found, model)):
        iterate(own, optimizer, 2)
        for param in list(optimizer.state):
            optimizer.state[param] = {n: v.clone() for n, v in optimizer.state[param].items()}
        iterate(own, optimizer, 2, first=2)
    assert_same_run(found, expected)


def test_it_warns_once_of_missing_masters():
    model = Net()
    optimizer = FusedAdam(model.parameters())
    release_gradients(model, optimizer)
    with pytest.warns(UserWarning, match="have no fp32 master") as warned:
        backward(model, 0)
    assert len(warned) == 1


def test_a_second_backward_pass_is_refused_by_name():
    _, _, model, optimizer, _ = pair(**MASTER)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 1 must get one gradient"):
        backward(model, 1)
    model = Net()
    optimizer = FusedAdam(model.named_parameters(), **MASTER)
    release_gradients(model, optimizer)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"'outer.bias' .* got a second: .*optimizer.step\(\)"):
        backward(model, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "skip"}, r"nonfinite must be 'propagate' while .*, got 'skip': a step"),
        ({"nonfinite": "error"}, r"nonfinite must be 'propagate' while .*, got 'error'"),
        ({"capturable": True}, r"capturable must be False while .*, got True: the host counts"),
        ({"use_decoupled_grad": True}, r"use_decoupled_grad must be False while .*, got True"),
    ],
)
def test_options_that_need_all_gradients_are_refused(options, message):
    model = Net()
    optimizer = FusedAdam(model.parameters(), **MASTER, **options)
    with pytest.raises(ValueError, match=message):
        release_gradients(model, optimizer)
    backward(model, 0)
    assert model.scale.grad is not None


def test_what_a_step_asks_too_late_is_refused():
    _, _, model, optimizer, _ = pair(**MASTER)
    backward(model, 0)
    for name, value in {"clip_norm": 1.0, "clip_coefficient": torch.ones(())}.items():
        with refused(optimizer, rf"{name} must be None while gradients are released"):
            optimizer.step(**{name: value})
    optimizer.use_decoupled_grad = True
    with refused(optimizer, "use_decoupled_grad must be False"):
        optimizer.step()


def test_a_grad_scaler_is_refused():
    _, _, model, optimizer, _ = pair(**MASTER)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(values((5, 6), 0, BF16)).float().sum()).backward()
    with pytest.raises(ValueError, match=r"grad_scale must not be set .* without a GradScaler"):
        scaler.step(optimizer)


def test_what_is_no_parameter_is_refused():
    model, other = Net(), Net()
    optimizer = FusedAdam(model.parameters(), **MASTER)
    with pytest.raises(ValueError, match="param must be a parameter of this optimizer"):
        release_gradients([other.scale], optimizer)
    for chosen in (other, [model.frozen], []):
        with pytest.raises(ValueError, match="model_or_params must have parameters of the opt"):
            release_gradients(chosen, optimizer)
    for chosen in (model.scale, 3):
        with pytest.raises(ValueError, match="model_or_params must be a model or a list of"):
            release_gradients(chosen, optimizer)
    release_gradients(model, optimizer)
    with pytest.raises(ValueError, match="optimizer must keep its gradients, got one whose"):
        release_gradients(model, optimizer)


def test_parameters_that_share_memory_are_refused():
    """As the plain step refuses them, which sees all parameters together."""
    whole = torch.zeros(4)
    params = [nn.Parameter(whole[:3]), nn.Parameter(whole[1:])]
    with pytest.raises(ValueError, match="must have memory of its own"):
        release_gradients(params, FusedAdam(params))


def test_a_parameter_that_left_the_optimizer_is_refused():
    _, _, model, optimizer, _ = pair(**MASTER)
    optimizer.param_groups[1]["params"].pop(2)
    with pytest.raises(RuntimeError, match=r"shape \(6,\) must be the optimizer's while"):
        backward(model, 0)


def test_an_optimizer_that_is_gone_leaves_gradients():
    model = Net()
    release = release_gradients(model, FusedAdam(model.parameters(), **MASTER))
    gc.collect()
    backward(model, 0)
    assert model.scale.grad is not None
    release.remove()


@pytest.mark.parametrize("options", [{"dtype": FP32}, STOCHASTIC], ids=["masters", "stochastic"])
def test_shards_of_fsdp2(on_ranks, options):
    """Real fully_shard on two ranks; its own hooks call ours once a gradient is reduced."""
    plain = on_ranks(2, fsdp2_ranks.released, options, False)
    assert plain[0]["steps"] == [3]
    for found in on_ranks(2, fsdp2_ranks.released, options, True):
        assert_same(found, plain[0])


def test_a_model_of_ddp_is_refused(on_ranks):
    (message,) = on_ranks(1, released_under_ddp)
    assert "model must not be wrapped in DistributedDataParallel while" in message
