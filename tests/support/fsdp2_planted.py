"""A rank whose torch calls fail, one after the other, while it measures its gradients."""

import torch
from fsdp2_ranks import build, give, gradients, snapshot
from runs import BF16, FP32, assert_same
from torch.overrides import TorchFunctionMode

OPTIONS = {"lr": 0.01, "weights": BF16, "dtype": FP32}
MAKERS = {"zeros", "ones", "empty", "full", "cat", "stack", "arange", "tensor", "float", "double"}
MAKERS |= {"to", "clone", "sum", "abs", "mul", "__mul__", "square", "where", "long", "view"}


class Planted(RuntimeError):
    """As a device that has no memory left."""


class FailsAt(TorchFunctionMode):
    """Raises at the call of this number among those that make tensors; -1: counts them."""

    def __init__(self, number):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in MAKERS:
            self.count += 1
            if self.count - 1 == self.number:
                raise Planted("planted")
        return func(*args, **(kwargs or {}))


class Within:
    """The mode, while the gradients of a rank are measured, and nowhere else."""

    def __init__(self, plan, mode):
        self.plan, self.mode = plan, mode

    def __enter__(self):
        kind, mode = type(self.plan), self.mode
        self.was = kind.accumulate

        def accumulate(plan, bins):
            with mode:
                return self.was(plan, bins)

        kind.accumulate = accumulate
        return mode

    def __exit__(self, *_):
        type(self.plan).accumulate = self.was


def stepped(rank, number):
    """What this rank raised; rank 0 fails at the call of this number."""
    model, optimizer = build(OPTIONS)
    grads = [gradients(step, dtype=BF16) for step in range(2)]
    give(model.parameters(), grads[0])
    optimizer.step(clip_norm=0.5)
    give(model.parameters(), grads[1])
    before = snapshot(optimizer)
    plan = plan_of(optimizer)
    raised, mode = "", FailsAt(number if rank == 0 else -1)
    try:
        with Within(plan, mode):
            optimizer.step(clip_norm=0.5)
    except (Planted, ValueError) as error:
        raised = f"{type(error).__name__}: {error}"
        assert_same(snapshot(optimizer), before)
        optimizer.step(clip_norm=0.5)
    return raised, mode.count, snapshot(optimizer)


def plan_of(optimizer):
    """Any plan of the reference backend."""
    from megaopt.kernels.step.reference import ReferencePlan

    return ReferencePlan.__new__(ReferencePlan)


def planted():
    """For each call that makes a tensor, what was raised here; and how many calls there were."""
    rank = torch.distributed.get_rank()
    _, count, expected = stepped(rank, -1)
    counts = torch.tensor([count])
    torch.distributed.broadcast(counts, 0)
    found = []
    for number in range(int(counts)):
        raised, _, after = stepped(rank, number)
        assert_same(after, expected)
        found.append(raised)
    return found
