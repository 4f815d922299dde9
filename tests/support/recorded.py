"""Small training loops that recorders look at."""

import random

import numpy
import torch

from megaopt import Recorder
from megaopt.recording.files import Recording

# What ranks record in the tests of layouts: fixed gradients, the same whatever the layout.


def rows(out):
    """A recording's digests of all steps, by step; what no rank has is 0, replicas agree."""
    recording = Recording(out)
    found = {step: recording.digests(step) for step in recording.steps}
    for step in found.values():
        for key, summed in step.items():
            assert summed.missing == 0, key
            assert summed.replicas == (), key
    return {step: {k: s.digest for k, s in rows.items()} for step, rows in found.items()}


def kept(out, step):
    """The bits of all tensors of a step that ranks kept, whole."""
    recording = Recording(out)
    named = [*recording.values, *((n, f"old {q}") for n, q in recording.values if q != "grad")]
    found = {key: recording.kept(step, key) for key in named if not key[1].startswith("old old")}
    assert all(held.all() for _, held in filter(None, found.values()))
    return {key: each[0].tolist() for key, each in found.items() if each is not None}


LOOPS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adamw for-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params),
    "adafactor": lambda params: torch.optim.Adafactor(params),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, max_iter=3),
}
"""Optimizers by name."""


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))


def steps(model, optimizer, count=3):
    """Trains on batches drawn beforehand; with a closure where the optimizer wants one."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        batch = torch.randn(5, 8, generator=generator)

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def state_of(model, optimizer):
    """What training leaves: weights, states and random states."""
    found = [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state.values():
        found += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return [*found, torch.get_rng_state()]


def trained(name):
    model = network()
    optimizer = LOOPS[name](model.parameters())
    steps(model, optimizer)
    return state_of(model, optimizer)


def recorded(name, out, count=3, level="step", **options):
    """What `trained` gives, beside a recorder."""
    random.seed(0)  # of which files have the states
    numpy.random.seed(0)
    model = network()
    optimizer = LOOPS[name](model.parameters())
    with Recorder(model, optimizer, out, level=level, **options):
        steps(model, optimizer, count)
    return state_of(model, optimizer)


def places(pieces):
    """The whole's index of each element of a rank's tensor."""
    found = {}
    for begin, numel, (_, first, run, stride) in pieces:
        for i in range(numel):
            where = first + i // run * stride + i % run if stride else first + i
            found[begin + i] = where
    return [found[i] for i in range(len(found))]
