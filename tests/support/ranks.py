"""Pools of processes that meet over gloo, one for each number of ranks, as long as tests run."""

import contextlib
import io
import multiprocessing
import os
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import psutil
import torch
import torch.distributed as dist
from descriptor_limits import make_strict
from faster_interpreter import make_faster
from faster_products import make_products_faster
from torch.distributed import distributed_c10d

PATIENCE = 120
"""Seconds that a rank waits for the others, and the test for all of them."""
PRELOADED = [
    "pytest",
    "megaopt.recording.recorder",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor",
    "triton.language",
]

if "tests" not in sys.modules:
    # a process that tests start finds their functions by pytest's names of test modules, such as
    # "tests.integration.test_agreement", without the repository's root on its path
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [str(Path(__file__).parents[1])]


class RankError(AssertionError):
    """What a rank raised."""


class _OnOneDevice(dist.ProcessGroupGloo):
    """A group of one thread that shares its process's device with the others.

    Each device of gloo has a thread that wakes a hundred times a second: Megatron's groups alone
    had 390 in each process, which took a third of a core while nobody used them. With two threads
    a group, as torch has it, Megatron's own virtual pipeline broke the heap in two of some 1,600
    runs (stock alone too, torch 2.13); with one in none of 2,764.
    """

    device = None

    def __init__(self, store, rank, size, timeout, **_):  # torch 2.15's enable_reconfigure
        if _OnOneDevice.device is None:
            _OnOneDevice.device = dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_OnOneDevice.device], timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def _packed(value):
    # plain bytes: tensors through a pipe would share memory with a process that has ended
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _serve(rank, world, meeting, parent, prepare, patience, backend):
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    make_faster()
    make_products_faster()
    make_strict()
    prepare()
    waits = timedelta(seconds=patience)
    distributed_c10d.ProcessGroupGloo = _OnOneDevice
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{meeting}", waits, world_size=world, rank=rank)
    with contextlib.suppress(EOFError):  # the tests were broken off
        while (task := parent.recv()) is not None:
            function, arguments, named = task
            try:
                torch.manual_seed(0)
                reply = True, _packed(function(*arguments, **named))
            except Exception:
                reply = False, traceback.format_exc()
            parent.send(reply)
    dist.destroy_process_group()


def _end_with_parent():
    """Not to stay in a collective when the tests were killed."""
    wait([multiprocessing.parent_process().sentinel])
    end_at_once()


def end_at_once():
    """As a process that is killed, but for its children: one of Megatron's saves would stay."""
    _kill_children(os.getpid())
    os._exit(1)


def _kill_children(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            child.kill()


def _nothing():
    pass


def forking():
    """Starts processes in milliseconds: forked from one that has torch and no threads yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_ranks(function, arguments, world):
    """Calls it with the rank and the arguments in so many processes, and waits for their ends."""
    forking()
    torch.multiprocessing.start_processes(
        _call, (function, *arguments), world, start_method="forkserver"
    )


def _call(rank, function, *arguments):
    make_products_faster()  # as in the process that compares
    function(rank, *arguments)  # this module comes first: only then others can be imported


class Ranks:
    """`world` processes that call functions of modules which they can import.

    prepare: what each calls before they meet.
    fresh: they are not forked, and may have processes of their own.
    backend: over which they meet; with "nccl" each has a card of its own.
    """

    def __init__(
        self, world, folder, prepare=_nothing, fresh=False, patience=PATIENCE, backend="gloo"
    ):
        context = multiprocessing.get_context("spawn") if fresh else forking()
        self._patience = patience
        self._processes, self._connections = [], []
        for rank in range(world):
            own, theirs = context.Pipe()
            arguments = (rank, world, str(folder / "meeting"), theirs, prepare, patience, backend)
            process = context.Process(target=_serve, args=arguments, daemon=not fresh)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(own)

    @property
    def failed(self):
        return not self._processes

    def __call__(self, function, *arguments, **named):
        """What the function returns on each rank; RankError for the first that raises."""
        for connection in self._connections:
            connection.send((function, arguments, named))
        found = {}
        while len(found) < len(self._connections):
            missing = {c: r for r, c in enumerate(self._connections) if r not in found}
            ready = wait(list(missing), self._patience)
            for connection in ready:
                found[missing[connection]] = self._received(connection)
            if not ready:
                self.close(kill=True)
                raise RankError(f"ranks {sorted(missing.values())} do not answer")
        return [found[rank] for rank in sorted(found)]

    def _received(self, connection):
        try:
            succeeded, content = connection.recv()
        except EOFError:
            succeeded, content = False, "its process ended"
        if not succeeded:
            self.close(kill=True)  # the others may wait for this one
            raise RankError(content)
        return torch.load(io.BytesIO(content), weights_only=False)

    def close(self, kill=False):
        for process, connection in zip(self._processes, self._connections, strict=True):
            if kill:
                _kill_children(process.pid)
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    connection.send(None)
            process.join()
            connection.close()
        self._processes, self._connections = [], []
