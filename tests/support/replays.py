"""Gradients and counts of launches, for tests of steps that become one of a CUDA graph."""

import torch
from runs import values


def fill(optimizer, step, moved=False):
    """Gives each parameter its gradient, in the same memory or in another."""
    for place, param in enumerate(optimizer.param_groups[0]["params"]):
        if moved or param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(values(tuple(param.shape), 100 * step + place))


def graph_launches(run):
    """Counts the CUDA graphs that a call launches, and the kernels beside them."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    return names.count("cudaGraphLaunch"), sum(n.startswith("cuLaunchKernel") for n in names)
