"""DTensor parameters: sharded steps are whole steps, whatever the ranks, and saved at N load at M."""

import fsdp2_ranks
import pytest
from fsdp2_ranks import build, snapshot, train, trained
from ranks import Ranks
from runs import BF16, FP32, MASTER, REMAINDERS, assert_same

HYPER = {"lr": 0.01, "weight_decay": 0.1}
KINDS = {
    "fp32": {},
    "adam_l2": {"adam_w_mode": False},
    "bf16": {"weights": BF16},
    "masters": {"weights": BF16, **MASTER},
    "external": {"external": True},
    "remainders": {"weights": BF16, **REMAINDERS},
    "bf16_moments": {"weights": BF16, **MASTER, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "capturable": {"capturable": True},
}
KINDS = {name: {**HYPER, **options} for name, options in KINDS.items()}
# ranks and, of these, rows with copies of one another's shards
LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}

all_kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
all_layouts = pytest.mark.parametrize(("world", "replicas"), LAYOUTS.values(), ids=LAYOUTS)


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


def assert_same_on_all(found, expected):
    for rank, own in enumerate(found):
        assert_same(own, expected, f"rank {rank}")


@all_layouts
@all_kinds
def test_sharded_steps_are_whole_steps(on_ranks, options, world, replicas):
    found = on_ranks(world, trained, options, 3, replicas)
    assert_same_on_all(found, trained(options, 3))
