"""Tiny training runs that are recorded, with a fault planted at one step."""

import random
from contextlib import nullcontext
from itertools import count

import numpy as np
import torch

from megaopt.recording.files import Recording
from megaopt.recording.recorder import Recorder

STEPS, AT = 5, 3
"""Steps of a run, and the step of the fault."""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        self.scale = 1.0
        """Of the output; and of the gradient that passes below."""
        self.backward_scale = 1.0

    def forward(self, x):
        below = x * 1.0
        if below.requires_grad:
            below.register_hook(lambda grad: grad * self.backward_scale)
        return below + self.scale * torch.tanh(self.linear(self.norm(below)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        x = self.embed(x) * (1 + random.random() / 100) * (1 + np.random.rand() / 100)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


class Faults:
    """What a run does at certain moments; a fault is a subclass with another way there."""

    seed, lr, steps = 0, 1e-2, STEPS

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)

    def batch(self, step, x, y):
        return x, y

    def calls(self, step):
        return 1

    def start(self, model):
        pass

    def before_forward(self, step, model):
        pass

    def loss(self, step, loss):
        return loss

    def before_step(self, step, model, optimizer):
        pass

    def clip(self, step):
        return 1.0

    def after_clipping(self, step, model):
        pass

    def within_step(self, step, params, state):
        """At the end of the optimizer's own step."""

    def after_step(self, step, model, optimizer):
        pass


def run(folder, faults=None, level="step", **options):
    """Trains, and returns the recording."""
    trained(faults or Faults(), lambda *both: Recorder(*both, folder, level=level, **options))
    return Recording(folder)


def trained(faults, recorder=lambda *_: nullcontext()):
    """Trains within what `recorder` makes of model and optimizer."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(faults.seed)
    model = Model()
    faults.start(model)
    optimizer = faults.optimizer(model)
    params, counts = optimizer.param_groups[0]["params"], count(1)
    # before the recorder's hook, so that to it this is the optimizer's work
    optimizer.register_step_post_hook(
        lambda *_: faults.within_step(next(counts), params, optimizer.state)
    )
    data = torch.Generator().manual_seed(1)
    with recorder(model, optimizer):
        for step in range(1, faults.steps + 1):
            train(faults, model, optimizer, step, data)


def train(faults, model, optimizer, step, data):
    optimizer.zero_grad()
    faults.before_forward(step, model)
    for _ in range(faults.calls(step)):
        x, y = torch.randn(6, 4, generator=data), torch.randn(6, 1, generator=data)
        x, y = faults.batch(step, x, y)
        loss = torch.nn.functional.mse_loss(model(x), y)
        faults.loss(step, loss).backward()
    faults.before_step(step, model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), faults.clip(step))
    faults.after_clipping(step, model)
    optimizer.step()
    faults.after_step(step, model, optimizer)
