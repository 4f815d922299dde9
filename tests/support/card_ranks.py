"""What ranks with a card each do: captured steps, runs that go on elsewhere, ranks that fail."""

from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_ranks import gradients, raised_by, snapshot, split_like, train
from muon_ranks import made_at
from runs import on_cpu
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from megaopt.kernels.muon import ranks

MIDDLE = {
    "direct": (ranks.MuonBucket, "direct"),
    "make": (ranks.MuonBucket, "make"),
    "finish": (ranks.MuonBucket, "finish"),
}
"""Where a rank fails while others wait for what it sends."""


def fill(model, step, shapes):
    """Gradients of a step, in memory that stays where it is, as a graph needs them."""
    params = list(model.parameters())
    for param, grad in zip(params, gradients(step, shapes, params[0].dtype), strict=True):
        part = grad.to(param.device)
        if isinstance(param, DTensor):
            part = split_like(param, part).to_local()
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        whole = param.grad.to_local() if isinstance(param, DTensor) else param.grad
        whole.copy_(part)


def captured_beside_eager(options, shapes, replays, device="cuda", **named):
    """What an optimizer has after steps that a graph repeats, and another after eager ones.

    The learning rate changes between them, and one of the steps is left out.
    """
    pair = [
        made_at({**options, "capturable": True}, shapes=shapes, device=device, **named)
        for _ in range(2)
    ]
    optimizers = [optimizer for _, optimizer in pair]
    for each in optimizers:
        each.found_inf = torch.zeros(1, device=device)

    def begin(step):
        for own, each in pair:
            fill(own, step, shapes)
            for group in each.param_groups:
                group["lr"].fill_(0.02 / (step + 1))
            each.found_inf.fill_(float(step == 5))

    for step in range(3):
        begin(step)
        for each in optimizers:
            each.step(clip_norm=1.0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizers[0].step(clip_norm=1.0)
    for step in range(3, 3 + replays):
        begin(step)
        graph.replay()
        optimizers[1].step(clip_norm=1.0)
    found = [on_cpu(snapshot(each)) for each in optimizers]
    graph.reset()  # before its ranks' group ends
    return found


def gone_on(options, folder, first, steps, shapes, number=0, device="cuda", **named):
    """What an optimizer has after steps that go on from a checkpoint, and are saved again.

    first: the steps before, of which there is a checkpoint if there are any. number: of the
    checkpoint that is loaded; the next one is saved.
    """
    model, optimizer = made_at(options, shapes=shapes, device=device, **named)
    alone = {"no_dist": not dist.is_initialized()}
    if first:
        content = content_of(model, optimizer)
        checkpoint.load(content, checkpoint_id=f"{folder}/{number}", **alone)
        set_model_state_dict(model, content["model"])
        set_optimizer_state_dict(model, optimizer, content["optimizer"])
    train(model, optimizer, steps, first=first, clip_norm=1.0)
    content = content_of(model, optimizer)
    checkpoint.save(content, checkpoint_id=f"{folder}/{number + 1}", **alone)
    return on_cpu(snapshot(optimizer))


def content_of(model, optimizer):
    weights = get_model_state_dict(model)
    return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}


def said_of(kind, options, shapes, device="cuda", **named):
    """The errors of a step in which the last rank fails, and of two more."""
    model, optimizer = made_at(options, shapes=shapes, device=device, **named)
    train(model, optimizer, 2, clip_norm=1.0)
    errors, is_last = [], dist.get_rank() == dist.get_world_size() - 1
    failing = mock.patch.object(*MIDDLE[kind], side_effect=RuntimeError("no memory"))
    for step in range(2, 5):
        fill(model, step, shapes)
        with failing if is_last and step == 2 else nullcontext():
            errors.append(raised_by(lambda: optimizer.step(clip_norm=1.0)))
    return errors
