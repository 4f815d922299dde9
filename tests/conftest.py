"""Runs the kernels on Triton's interpreter where there is no GPU, before megaopt is imported."""

import gc
import os
import signal
import zlib
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from descriptor_limits import make_strict
from faster_interpreter import make_faster
from faster_products import make_products_faster
from one_rank import group_of_one
from ranks import Ranks

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    make_faster()
    make_products_faster()
    make_strict()
# torch's pool of compilers once kept pytest from ending for 5 minutes
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# two threads that share small products wait for each other: a step of GaLoreAdamW took 40 times as
# much of the processor; test_switches.py compares one with two
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
torch.set_num_threads(1)
# what a shell, a CI system or a launcher says for programs of its own
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)


MOST_CASES = 2
"""As many cases of a test are quick at most."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        # by name: whichever of its parameters alternates, both its values are among either half
        number = zlib.crc32(item.name.encode())
        sample = item.get_closest_marker("sample")
        if sample is not None and number % sample.args[0]:
            item.add_marker(pytest.mark.slow)
        if "thirds" in item.keywords and "slow" in item.keywords and number // 2 % 3:
            item.add_marker(pytest.mark.exhaustive)
    make_slow_beyond(items)
    if torch.cuda.is_available():
        items[:] = long_ones_apart(items)
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def make_slow_beyond(items):
    """Of the cases of each test MOST_CASES are not slow, which ones is up to their names."""
    quick = defaultdict(list)
    for item in items:
        if not item.keywords.keys() & {"slow", "gpu", "exhaustive"}:
            quick[item.path, getattr(item, "originalname", item.name)].append(item)
    for own in quick.values():
        for item in sorted(own, key=lambda each: zlib.crc32(each.name.encode()))[MOST_CASES:]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Has --dist loadfile run all files of Megatron's ranks, which take seconds to start, in one
    process.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "megatron" if "integration" in file and "megatron" in file else file

    return Together(config, log)


def long_ones_apart(items):
    """Long tests first, each before a short one: a process of xdist takes two tests at a time."""
    first = [item for item in items if "long" in item.keywords]
    rest = iter([item for item in items if "long" not in item.keywords])
    begin = [item for pair in zip(first, rest, strict=False) for item in pair]
    return [*begin, *first[len(begin) // 2 :], *rest]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def young_heap():
    """For modules that collect garbage: only what they have made, as all there is takes a while."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def hears_interrupts():
    """A shell's job in the background ignores SIGINT, and so does all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def device():
    """Where the kernels run here: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def gpu_mesh(tmp_path_factory):
    """Of one rank over NCCL, on the first GPU."""
    torch.cuda.set_device(0)
    with group_of_one("cpu:gloo,cuda:nccl", tmp_path_factory.mktemp("gpu")):
        yield dist.init_device_mesh("cuda", (1,))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Calls a function on so many ranks; what it returned on each.

    A module's, since gloo's threads keep a processor busy that nobody else has then.
    """
    pools = {}

    def run(world, function, *arguments, **named):
        if world not in pools or pools[world].failed:
            pools[world] = Ranks(world, tmp_path_factory.mktemp("ranks"))
        return pools[world](function, *arguments, **named)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=["python", "native"])
def looks(request, monkeypatch):
    """Tensors and their counters are looked at by the Python twin, and by the extension."""
    from megaopt.kernels import native  # after the switch above

    if request.param == "python":
        monkeypatch.setenv(native.SWITCH, "0")
    elif native.build()[0] is None:
        pytest.skip(f"the extension cannot be built here: {native.build()[1]}")
