"""Bytes that Megatron's state dicts take beside the state, by the profiler's own count."""

from unittest import mock

import torch
from fake_pinning import FakePinning
from megatron_gpt import Trainer, megatron
from torch.profiler import ProfilerActivity, profile

from megaopt import pieces
from megaopt.kernels.host_memory import pinned_by

KIND = "dp_reshardable"


def most_bytes(function):
    """What it returns, and the most bytes that were allocated within it at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = function()
    events = profiled.profiler.kineto_results.events()
    found = [event for event in events if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(found, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return made, most


def on_card(function):
    """Calls it where what goes to the host takes no memory, as if that were another device's."""
    with mock.patch.object(torch.Tensor, "cpu", lambda tensor: tensor[:0].clone()):
        return function()


def piece_of(numel):
    """Within it codes in blocks are decoded and encoded so many at a time."""
    return mock.patch.object(pieces, "PIECE", numel)


def bytes_of(case, folder):
    """Of the state, the largest bucket and shard in fp32; that saving, a fresh run's load take."""
    with pinned_by(FakePinning()), piece_of(1024):
        return _bytes_of(case, folder)


def _bytes_of(case, folder):
    trainer = Trainer(case)
    trainer.train(1)
    (optimizer,) = trainer.optimizer.chained_optimizers
    states = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    state = sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))
    buckets = [bucket.grad_data.numel() for buf in optimizer.buffers for bucket in buf.buckets]

    saved = most_bytes(lambda: on_card(optimizer.get_parameter_state_dp_reshardable))[1]
    trainer.save(folder, KIND)
    other = Trainer(case)
    (fresh,) = other.optimizer.chained_optimizers
    first = most_bytes(lambda: on_card(fresh.get_parameter_state_dp_reshardable))[1]
    template = other.template(KIND, True)
    read = megatron("dist_checkpointing").load(template, str(folder))
    loaded = most_bytes(lambda: other.optimizer.load_state_dict(read["optimizer"]))[1]
    return {
        "state": state,
        "bucket": 4 * max(buckets),
        "shard": 4 * max(shard.numel() for shard in optimizer.shards.values()),
        "save": saved,
        "template": first,
        "load": loaded,
    }
