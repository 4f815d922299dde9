"""Bytes that Megatron's state dicts take beside the state, by the profiler's own count."""

import torch
from megatron_gpt import Trainer, megatron
from torch.profiler import ProfilerActivity, profile

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


def bytes_of(case, folder):
    """Of the state and the largest bucket in fp32; that saving, and a fresh run's load, take."""
    trainer = Trainer(case)
    trainer.train(1)
    (optimizer,) = trainer.optimizer.chained_optimizers
    states = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    state = sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))
    buckets = [bucket.grad_data.numel() for buf in optimizer.buffers for bucket in buf.buckets]

    saved = most_bytes(lambda: trainer.template(KIND, False))[1]
    trainer.save(folder, KIND)
    other = Trainer(case)
    template, first = most_bytes(lambda: other.template(KIND, True))
    read = megatron("dist_checkpointing").load(template, str(folder))
    loaded = most_bytes(lambda: other.optimizer.load_state_dict(read["optimizer"]))[1]
    return {
        "state": state,
        "bucket": 4 * max(buckets),
        "save": saved,
        "template": first,
        "load": loaded,
    }
