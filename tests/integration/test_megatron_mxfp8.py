"""MXFP8 parameters, gathered as bf16 through the gradients' memory; stand-ins for them."""

import megatron_mxfp8 as stand_ins
import pytest
from how_to import needs
from megatron_gpt import HAS_KEYS, Case, train

pytestmark = [
    needs("megatron"),
    pytest.mark.skipif(not HAS_KEYS, reason="release 0.16 gathers MXFP8 in another way"),
]

SETTINGS = {
    "overlap": {},
    "overlap, 16 bits": {"fp32_grads": False},
    "late": {"gathers_late": False},
    "late, 16 bits": {"gathers_late": False, "fp32_grads": False},
}
PLACES = [(name, 2) for name in SETTINGS]
PLACES += [pytest.param(*each, marks=pytest.mark.slow) for each in (("overlap", 1), ("late", 3))]


@pytest.mark.parametrize(("name", "world"), PLACES)
def test_every_bit_is_megatrons(megatron_pools, megatron_stock, name, world):
    settings = {"mxfp8": True, "clip_grad": 0.2, **SETTINGS[name]}
    expected = megatron_stock(world, stand_ins.train, Case(**settings))
    found = megatron_pools(world)(stand_ins.train, Case(plug="main_shards", **settings))
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == 3


def test_precision_aware_leaves_masters_to_megatron(megatron_pools):
    own, other = (
        megatron_pools(2)(stand_ins.train, Case(plug=mode, mxfp8=True))
        for mode in ("main_shards", "precision_aware")
    )
    assert own == other
    assert own[0]["steps"] != megatron_pools(2)(train, Case(plug="main_shards"))[0]["steps"]


def test_resuming_equals_going_straight_on(megatron_pools, tmp_path):
    case = Case(plug="main_shards", mxfp8=True)
    straight = megatron_pools(2)(stand_ins.train, case, 4)
    found = megatron_pools(2)(stand_ins.save_and_load, case, tmp_path / "a")
    for (saved, back), whole in zip(found, straight, strict=True):
        assert back["loaded"] == saved
        assert back["steps"] == whole["steps"][2:]
        assert back["states"] == whole["states"]
