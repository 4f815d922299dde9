"""Pools of processes in which Megatron-Core runs on the CPU."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def megatron_pools(tmp_path_factory):
    """For each number of ranks processes that live as long as a module's tests."""
    from megatron_cpu import prepare

    started = {}

    def start(world):
        if world not in started or started[world].failed:
            folder = tmp_path_factory.mktemp("ranks")
            started[world] = Ranks(world, folder, prepare, fresh=True, patience=300)
        return started[world]

    yield start
    for each in started.values():
        each.close()


@pytest.fixture(scope="module")
def megatron_stock(megatron_pools):
    """Runs of Megatron's own optimizer, each made once."""
    kept = {}

    def run(world, function, case, *args):
        key = (world, function, repr(case), args)
        if key not in kept:
            kept[key] = megatron_pools(world)(function, case, *args)
        return kept[key]

    return run
