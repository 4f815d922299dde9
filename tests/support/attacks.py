"""Attacks on the promise that an error leaves an optimizer as it was, and says what is wrong."""

import contextlib
import dis
import importlib
import re
import resource
import sys
import traceback

import torch
from runs import assert_same, copied, params_of, snapshot

import megaopt
import megaopt.integration


@contextlib.contextmanager
def full_disk(size):
    """No file of this process can be written beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


PACKAGES = (megaopt, importlib.import_module("megaopt.kernels"), megaopt.integration)
OURS = tuple(path for package in PACKAGES for path in package.__path__)


# --- nothing has changed


class Before:
    """Everything about an optimizer: the bits, and which objects hold them."""

    def __init__(self, optimizer, *others):
        self._optimizer, self._others = optimizer, others
        self._content, self._objects = self._look()

    def _look(self):
        optimizer = self._optimizer
        content = [snapshot(optimizer), copied(self._others), optimizer.master_weights is None]
        states = [optimizer.state.get(param) for param in params_of(optimizer)]
        held = [*optimizer.param_groups, *params_of(optimizer), *states, optimizer.master_weights]
        for own in (*optimizer.param_groups, *filter(None, states)):
            held += [value for value in own.values() if isinstance(value, torch.Tensor)]
        masters = optimizer.master_weights
        held += masters if isinstance(masters, list) else []
        return content, held

    def assert_same(self):
        content, objects = self._look()
        assert_same(content, self._content)
        assert len(objects) == len(self._objects)
        assert all(a is b for a, b in zip(objects, self._objects, strict=True))


# --- errors that say what is wrong


def raised_by_us(error):
    """Whether a raise statement of ours, or one of torch.optim, raised it on purpose."""
    frame = [*traceback.walk_tb(error.__traceback__)][-1][0]
    tb = error.__traceback__
    while tb.tb_next is not None:
        tb = tb.tb_next
    file, code = frame.f_code.co_filename, frame.f_code.co_code
    known = (*OURS, sys.modules["torch.optim.optimizer"].__file__)
    return file.startswith(known) and dis.opname[code[tb.tb_lasti]] == "RAISE_VARARGS"


def complaint(error, kinds=(ValueError, TypeError)):
    """What is wrong with an error that bad input ends in; None where nothing is."""
    text = str(error)
    if not isinstance(error, kinds):
        return f"a {type(error).__name__}"
    if not raised_by_us(error):
        return "raised from inside"
    if len(text) > 2000:
        return f"a message of {len(text)} characters"
    if not re.search(r"must|allowed|has no|belongs|optimize|param", text):
        return "no word of what is allowed"
    return None


def step_works(optimizer):
    """Takes a step, on whatever device; a group may be given its lr as late as this."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 if group["lr"] is None else group["lr"]
    for param in params_of(optimizer):
        param.grad = torch.full_like(param, 0.25)
    optimizer.step()
