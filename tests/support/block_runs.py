"""What optimizers with moments in blocks do; make: an optimizer of the same weights each time."""

import copy
import pickle

import torch
from bits import assert_same_bits
from runs import assert_same, assert_same_run, give_gradients, params_of, through_a_file, train


def loaded(optimizer, make, through):
    """Another one that took over the state dict."""
    params = [torch.nn.Parameter(param.detach().clone()) for param in params_of(optimizer)]
    fresh = make(params=params, lr=55.0)
    fresh.load_state_dict(through(optimizer.state_dict()))
    return fresh


WAYS = {
    "state_dict": lambda optimizer, make: loaded(optimizer, make, copy.deepcopy),
    "file": lambda optimizer, make: loaded(optimizer, make, through_a_file),
    "pickle": lambda optimizer, _: pickle.loads(pickle.dumps(optimizer)),
    "deepcopy": lambda optimizer, _: copy.deepcopy(optimizer),
}


def assert_same_steps(make, capturable, steps):
    """By kernel and twin, clipped and not."""
    kernel, twin = (make(backend=b, capturable=capturable) for b in ("triton", "reference"))
    for step in range(steps):
        for optimizer in (kernel, twin):
            give_gradients(params_of(optimizer), step)
            optimizer.step(clip_norm=1.0 if step % 2 else None)
    assert_same_run(kernel, twin)


def assert_capturable_moves_no_bit(make):
    found, expected = make(capturable=True), make()
    train(found, 3)
    train(expected, 3)
    for own, other in zip(params_of(found), params_of(expected), strict=True):
        assert_same_bits(own, other)
        assert_same(dict(found.state[own]), dict(expected.state[other]))


def assert_goes_on_elsewhere(make, way):
    optimizer = make()
    train(optimizer, 2)
    other = WAYS[way](optimizer, make)
    assert_same_run(other, optimizer)
    train(optimizer, 2, first=2)
    train(other, 2, first=2)
    assert_same_run(other, optimizer)
