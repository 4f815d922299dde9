"""Runs the scripts of docs/how-to."""

import importlib.util
import os
import runpy
import socket

import pytest
import torch
from modules import loaded
from ranks import start_ranks

# Scripts of docs/how-to, within ranks that are there already.


def train(script, *arguments):
    """What the script's `train` returns."""
    return runpy.run_path(script)["train"](*arguments, torch.device("cpu"))


def trained_by(blocks):
    """The whole weights of `model` after a page's code."""
    torch.manual_seed(0)
    found = {}
    for code in blocks:
        exec(code, found)
    return [param.full_tensor().detach() for param in found["model"].parameters()]


def needs(*packages):
    """Skips a file's tests where a package is not installed; imports none for it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def script(name):
    """docs/how-to/<name>.py as a module."""
    return loaded(f"docs/how-to/{name}.py")


def everything(model, optimizer):
    """All that a run leaves behind."""
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def mean_of_two_ranks(how_to, **options):
    """A run in one process: the mean of both ranks' gradients, in the gradients' own dtype."""
    model = how_to.build_model()
    optimizer, warmup = how_to.build_optimizer(model, **options)
    for step in range(how_to.STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (how_to.loss_of(model, how_to.batch_of(step, rank)) / 2).backward()
        optimizer.step()
        warmup.step()
    return model, optimizer


def plain_loop(how_to, *given):
    """A run of whole backward passes, and steps after them."""
    model, optimizer = how_to.build(*given)
    for step in range(how_to.STEPS):
        optimizer.zero_grad()
        how_to.loss_of(model, step).backward()
        optimizer.step()
    return everything(model, optimizer)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_ranks(name, runs, world_size=2):
    """Runs a script's main as torchrun starts it; each process once for each list of options."""
    ports = [free_port() for _ in runs]
    arguments = (name, runs, ports, world_size)
    start_ranks(_run_rank, arguments, world_size)


def as_rank(rank, port, world_size):
    """The environment that torchrun gives a process."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def _run_rank(rank, name, runs, ports, world_size):
    main = script(name).main
    for options, port in zip(runs, ports, strict=True):
        as_rank(rank, port, world_size)
        main(options)
