"""Bytes that Megatron's state dicts take beside the state, by the profiler's own count."""

import importlib
from multiprocessing.reduction import ForkingPickler
from unittest import mock

import torch
from fake_pinning import FakePinning
from megatron_gpt import Trainer, hash_of, megatron
from torch.profiler import ProfilerActivity, profile

from megaopt.kernels.host_memory import pinned_by
from megaopt.params import codes as pieces

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
    module = importlib.import_module("megaopt.integration.megatron.checkpoints")
    with mock.patch.object(module, "host_copy", lambda tensor: tensor[:0].clone()):
        return function()


def piece_of(numel):
    """Within it codes in blocks are decoded and encoded so many at a time."""
    return mock.patch.object(pieces, "PIECE", numel)


def bytes_of(case, folder):
    """Of the state, the largest bucket and shard in fp32; that saving, a fresh run's load take.

    in_place: whether that load reads into the state's own tensors.
    """
    with pinned_by(FakePinning()), piece_of(1024):
        return _bytes_of(case, folder)


def _bytes_of(case, folder):
    trainer = Trainer(case)
    trainer.train(1)
    (optimizer,) = trainer.optimizer.chained_optimizers
    state = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(optimizer))
    buckets = [bucket.grad_data.numel() for buf in optimizer.buffers for bucket in buf.buckets]

    saved = most_bytes(lambda: on_card(optimizer.get_parameter_state_dp_reshardable))[1]
    trainer.save(folder, KIND)
    other = Trainer(case)
    (fresh,) = other.optimizer.chained_optimizers
    with mock.patch.object(fresh, "_is_loading", True):
        first = most_bytes(lambda: on_card(fresh.get_parameter_state_dp_reshardable))[1]
    template = other.template(KIND, True)
    held = {tensor.data_ptr() for tensor in tensors_of(fresh)}
    read_into = {tensor.data_ptr() for tensor in nested_tensors(template["optimizer"])}
    read = megatron("dist_checkpointing").load(template, str(folder))
    loaded = most_bytes(lambda: other.optimizer.load_state_dict(read["optimizer"]))[1]
    return {
        "state": state,
        "bucket": 4 * max(buckets),
        "shard": 4 * max(shard.numel() for shard in optimizer.shards.values()),
        "save": saved,
        "template": first,
        "load": loaded,
        "in_place": held <= read_into,
    }


def tensors_of(optimizer):
    states = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    return [tensor for tensor in states if isinstance(tensor, torch.Tensor)]


def steps_beside_a_writer(case):
    """A step, a save by another process, which gets the tensors through a pipe, and a step."""
    with pinned_by(FakePinning()):
        trainer = Trainer(case)
        found = trainer.train(1)
        saved = nested_tensors(trainer.template(KIND, False)["optimizer"])
        values = [*map(hash_of, saved)]
        ForkingPickler.dumps(saved)  # moves them into memory that processes share
        found += trainer.train(1)
        return found, len(saved), values == [*map(hash_of, saved)]


def nested_tensors(value):
    """The tensors of a sharded state dict."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [tensor for each in value for tensor in nested_tensors(each)]
    data = getattr(value, "data", None)
    return [data] if isinstance(data, torch.Tensor) else []
