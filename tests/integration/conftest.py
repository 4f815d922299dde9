"""Processes for tests of several ranks."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory):
    """Calls a function on so many ranks; what it returned on each."""
    pools = {}

    def run(world, function, *arguments):
        if world not in pools or pools[world].failed:
            pools[world] = Ranks(world, tmp_path_factory.mktemp("ranks"))
        return pools[world](function, *arguments)

    yield run
    for pool in pools.values():
        pool.close()
