"""Torch calls that fail, one after the other, where a step takes memory."""

import sys
from collections import Counter

import torch
from runs import assert_same, copied, params_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaopt.float8 import Float8Weight

LIFTED = torch.ops.aten.lift_fresh.default
"""What torch.tensor calls, whose memory is taken out of sight."""


DEPTH = 8
"""Callers that say where in the code a call is."""


class Planted(RuntimeError):
    """As a device that has no memory left."""


class FailsAt(TorchDispatchMode):
    """Raises at the torch call of this number among those that take memory; -1: counts them.

    failed: a set of calls, each a place in the code and how often it was there before: raises
    instead at the first that is not among them, and adds it.
    """

    def __init__(self, number=-1, failed=None):
        super().__init__()
        self.number, self.failed, self.count = number, failed, 0
        self.visits = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {memory_of(each) for each in tree_leaves((args, kwargs))}
        new = {memory_of(each) for each in tree_leaves(result)} - given - {None}
        if (new or func is LIFTED) and not is_interpreted():
            self.count += 1
            if self.count - 1 == self.number or (self.failed is not None and self.is_first()):
                raise Planted("planted")
        return result

    def is_first(self):
        """Whether this call has not failed before; it counts as failed then."""
        frame, place = sys._getframe(2), 0
        for _ in range(DEPTH):
            place = hash((place, id(frame.f_code), frame.f_lineno))
            frame = frame.f_back
        call = place, self.visits[place]
        self.visits[place] += 1
        is_new = call not in self.failed
        self.failed.add(call)
        return is_new


def memory_of(value):
    value = getattr(value, "_local_tensor", value)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def is_interpreted():
    """Whether a kernel runs: what Triton's interpreter takes there no card does."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("triton."):
            return True
        frame = frame.f_back
    return False


def everything(optimizer):
    """Weights, states, counts and gradients, copied."""
    params = params_of(optimizer)
    weights = [p.tensors() if isinstance(p, Float8Weight) else p.detach() for p in params]
    states = [dict(optimizer.state[p]) if p in optimizer.state else None for p in params]
    counts = [group["step"] for group in optimizer.param_groups]
    return copied([weights, states, counts, [param.grad for param in params]])


def fail_everywhere(optimizer, step, before=None):
    """Fails at each call of a step that takes memory; how many there were.

    Each time everything is as it was, or the part of it that `before` looks at, and the last step
    goes through. Calls are known by their places: what a failed step has made, and the next one
    does not make again, moves their numbers.
    """
    look, failed = before or everything, set()
    was = look(optimizer)
    while True:
        try:
            with FailsAt(failed=failed):
                step()
        except Planted:
            assert_same(look(optimizer), was, f"failure {len(failed)}")
        else:
            return len(failed)
