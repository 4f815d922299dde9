"""What every rule and format promises alike: one test a promise, over all kinds of optimizers."""

import contextlib
import copy
import dataclasses
import io
import itertools
import pickle

import pytest
import torch
from handling import assert_same_numbers, train_all
from kinds import IN_BLOCKS, KINDS, PLAIN, made, params_for, with_weights_of
from runs import (
    MASTER,
    assert_same,
    assert_same_run,
    copied,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    values,
)
from step_cases import oracle_step

from megaopt import FusedAdam, release_gradients
from megaopt.kernels.place import Place
from megaopt.params import view_of

each_kind = pytest.mark.parametrize("kind", KINDS)
MODES = [False, True]


def some_of_each_kind(times=1, but=(), **others):
    """Of each kind so many cases, with the others' values in turn; the rest, and but, are slow."""
    values, cases = list(itertools.product(*others.values())), []
    for place, kind in enumerate(KINDS):
        # 7 and their number, a product of 2s and 5s, have no factor in common
        places = (7 * (times * place + k) for k in range(0 if kind in but else times))
        quick = {each % len(values) for each in places}
        cases += [
            pytest.param(kind, *own, marks=[] if number in quick else pytest.mark.slow)
            for number, own in enumerate(values)
        ]
    return pytest.mark.parametrize(("kind", *others), cases)


# their formats have tests of the launches alone: tests/kernels/muon/test_launch.py
@some_of_each_kind(
    but={"muon, fp16", "muon, kahan", "muon, 24 bits", "muon, blocks"}, capturable=MODES
)
@pytest.mark.thirds
@pytest.mark.sample(2)
def test_kernel_and_twin_take_the_same_steps(kind, capturable):
    """Clipped and not, with lr and step on the device and not."""
    kernel = made(kind, backend="triton", capturable=capturable)
    twin = made(kind, backend="reference")
    for step in range(2):
        for optimizer in (kernel, twin):
            give_gradients(params_of(optimizer), step)
            if step == 1:  # one that is not stepped
                params_of(optimizer)[-1].grad = None
            optimizer.step(clip_norm=1.0 if step else None)
    assert_same_numbers(kernel, twin)
    assert_same(kernel.grad_norm, twin.grad_norm)


# --- the operations


def buffers_of(optimizer, param):
    """A parameter's tensors by the names of the step's slots, copied, and their formats."""
    formats = optimizer._owned.formats(view_of(param), param.dtype)
    formats = dataclasses.replace(formats, maximize=optimizer.options.maximize)
    own = {"grad": param.grad, "weight": param.detach()}
    for name, tensor in optimizer.state[param].items():
        own[name.replace("master_param", "master")] = tensor
    return {slot: [own[slot].clone().view(-1)] for slot in formats.slots}, formats


@pytest.mark.parametrize("kind", [*PLAIN, *IN_BLOCKS])
def test_steps_are_those_of_the_written_operations(kind):
    """docs/numbers.md's lists, in numpy: an oracle that shares no code, from the first step on.

    Of gradients that have subnormals, infinities and NaN too; random bits go by the seed, the
    parameter's number, the element's place and the step.
    """
    optimizer = made(kind)
    optimizer.initialize_states()
    group, truth = optimizer.param_groups[0], {}
    for step in (1, 2, 3):
        give_gradients(params_of(optimizer), step)
        for number, param in enumerate(params_of(optimizer)):
            if step == 2 and param.dim() == 2:
                param.grad[0, :4] = torch.tensor([torch.inf, torch.nan, 1e-40, -torch.inf])
            found, formats = buffers_of(optimizer, param)
            truth[number] = {**truth.get(number, found), "grad": found["grad"]}
            numbers = {**group, "step": step}
            oracle_step(truth[number], formats, optimizer.rule, numbers, [Place(number)])
        optimizer.step()
        for number, param in enumerate(params_of(optimizer)):
            assert_same(buffers_of(optimizer, param)[0], truth[number])


# --- a run goes on


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(optimizer, kind):
    """A fresh one that takes lr and seed from the state dict, through a file."""
    more = {"seed": 1} if "seed" in KINDS[kind][1] else {}
    capturable = optimizer.options.capturable
    other = with_weights_of(optimizer, kind, lr=55.0, capturable=capturable, **more)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return other


WAYS = {
    "state dict": loaded,
    "deepcopy": lambda optimizer, _: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, _: pickle.loads(pickle.dumps(optimizer)),
    "protocol 2": lambda optimizer, _: pickle.loads(pickle.dumps(optimizer, protocol=2)),
    "torch.save": lambda optimizer, _: through_torch(optimizer),
}


@some_of_each_kind(2, way=WAYS, done=[0, 2], capturable=MODES)
@pytest.mark.thirds
@pytest.mark.sample(3)
def test_a_run_goes_on_elsewhere_as_here(kind, way, done, capturable):
    """Before the first step and after some; the two share no memory."""
    optimizer = made(kind, capturable=capturable)
    train(optimizer, done)
    before = snapshot(optimizer)
    other = WAYS[way](optimizer, kind)
    if done and optimizer.rule.moments:  # else it has no state, and an entry is as good as none
        assert_same_run(other, optimizer)
    assert way == "state dict" or other.options == optimizer.options
    train(other, 3, first=done)
    assert_same(snapshot(optimizer), before)
    train(optimizer, 3, first=done)
    assert_same_run(other, optimizer)


def moved(optimizer, kind, device):
    """A fresh one of the same weights on a device, loaded through a file."""
    params = [torch.nn.Parameter(param.detach().to(device)) for param in params_of(optimizer)]
    other = made(kind, params)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return other


@pytest.mark.gpu
@pytest.mark.sample(2)
@each_kind
def test_a_run_goes_to_a_gpu_and_back(kind):
    straight, before = made(kind), made(kind)
    train(straight, 4)
    train(before, 1)
    there = moved(before, kind, "cuda")
    train(there, 2, first=1)
    back = moved(there, kind, "cpu")
    train(back, 1, first=3)
    assert_same_run(back, straight)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "state dict"])
def test_copies_keep_external_masters_external(way):
    params = parameters()
    masters = [param.detach().float() for param in params]
    optimizer = FusedAdam(params, master_weights=masters)
    train(optimizer, 2)
    twin = WAYS[way](optimizer, None)
    for param, master in zip(params_of(twin), twin.master_weights, strict=True):
        assert twin.state[param]["master_param"] is master
    assert twin.master_weights[0] is not masters[0]
    train_all((optimizer, twin), 2, first=2)
    assert_same_run(twin, optimizer)


def test_copies_with_a_model_step_the_copied_model():
    model = torch.nn.Linear(3, 4).bfloat16()
    optimizer = FusedAdam(model.parameters(), **MASTER)
    train(optimizer, 1)
    for other, twin in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        train(twin, 2, first=1)
        assert params_of(twin)[0] is other.weight
        assert not torch.equal(other.weight, model.weight)


# --- gradients that are scaled, clipped, left out, released


@contextlib.contextmanager
def scaler(optimizer, scale, found_inf):
    """What a torch.amp.GradScaler sets for a step."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found_inf)
    yield
    del optimizer.grad_scale, optimizer.found_inf


@some_of_each_kind(capturable=MODES)
@pytest.mark.thirds
@pytest.mark.sample(2)
def test_a_power_of_two_as_loss_scale_moves_no_bit(kind, capturable):
    """The norm is that of the unscaled gradients."""
    scaled, plain = (made(kind, capturable=capturable) for _ in range(2))
    for step in range(3):
        for optimizer in (scaled, plain):
            give_gradients(params_of(optimizer), step)
        for param in params_of(scaled):
            param.grad = param.grad * 2.0**10
        with scaler(scaled, 2.0**10, 0.0):
            scaled.step(clip_norm=0.5)
        plain.step(clip_norm=0.5)
        assert float(plain.grad_norm) > 0.5
        assert_same_run(scaled, plain)


def left_out_by_the_scaler(optimizer):
    with scaler(optimizer, 1.0, 1.0):
        optimizer.step()


def left_out_for_an_infinity(optimizer):
    params_of(optimizer)[0].grad.view(-1)[1] = torch.inf
    optimizer.step(clip_norm=1.0)


@some_of_each_kind(leave_out=[left_out_by_the_scaler, left_out_for_an_infinity], capturable=MODES)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.thirds
@pytest.mark.sample(2)
def test_a_step_that_is_left_out_changes_nothing(kind, capturable, backend, leave_out):
    """Nor the random bits of the next one."""
    options = {"capturable": capturable, "backend": backend}
    found, expected = made(kind, nonfinite="skip", **options), made(kind, **options)
    for optimizer in (found, expected):
        optimizer.initialize_states()
    for step in range(3):
        before = snapshot(found)
        give_gradients(params_of(found), 7)
        leave_out(found)
        assert_same(snapshot(found), before)
        for optimizer in (found, expected):
            give_gradients(params_of(optimizer), step)
            optimizer.step()
    assert_same_run(found, expected)


@each_kind
@pytest.mark.sample(2)
def test_released_gradients_have_the_steps_bits(kind):
    found = []
    for releases in (False, True):
        optimizer = made(kind)
        params = params_of(optimizer)
        if releases:
            release_gradients(params, optimizer)
        for step in range(3):
            grads = [values(p.shape, 100 + 10 * step + i) for i, p in enumerate(params)]
            sum((p.float() * g).sum() for p, g in zip(params, grads, strict=True)).backward()
            assert all((param.grad is None) == releases for param in params)
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer)
    assert_same_run(*found)


# --- who steps beside whom, and where a value lies


@each_kind
def test_groups_and_order_move_no_bit(kind):
    """Nor does a parameter that is new, and has no gradient."""
    expected, params = made(kind), params_for(kind)
    last = len(params) - 1
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(6).bfloat16()), params[last]]},
        {"params": params[:last][::-1]},
    ]
    for group, numbers in zip(groups, ([99, last], [*range(last)][::-1]), strict=True):
        group["param_numbers"] = numbers
    found = made(kind, groups)
    for step in range(3):
        give_gradients(params_of(expected), step)
        for own, other in zip(params, params_of(expected), strict=True):
            own.grad = copied(other.grad)
        for optimizer in (expected, found):
            optimizer.step()
    alone = snapshot(made(kind, params))["weights"]
    assert_same(alone, snapshot(expected)["weights"])
    for own, other in zip(params, params_of(expected), strict=True):
        assert_same(dict(found.state[own]), dict(expected.state[other]))


@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_moments_in_blocks_that_are_read_and_set_again_stay(kind):
    """Into another optimizer too: fp32 checkpoints of the moments lose nothing."""
    optimizer = made(kind)
    train(optimizer, 3)
    other = loaded(optimizer, kind)
    for own, theirs in zip(params_of(optimizer), params_of(other), strict=True):
        for name in optimizer.rule.moments:
            value = optimizer.get_unscaled_state(own, name)
            other.set_scaled_state(theirs, name, torch.full_like(value, 2.0))
            assert bool((other.get_unscaled_state(theirs, name) > 0).all())
            other.set_scaled_state(theirs, name, value.clone())
            assert torch.equal(other.get_unscaled_state(theirs, name), value)
    train_all((optimizer, other), 2, first=3)
    for own, theirs in zip(params_of(optimizer), params_of(other), strict=True):
        assert torch.equal(theirs, own)
