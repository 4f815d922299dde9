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
def test_every_bit_is_megatrons(pools, once, name, world):
    settings = {"mxfp8": True, "clip_grad": 0.2, **SETTINGS[name]}
    expected = once(world, stand_ins.train, Case(**settings))
    found = pools(world)(stand_ins.train, Case(plug="main_shards", **settings))
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == 3


@pytest.mark.parametrize("name", ["overlap, 16 bits", "late", "late, 16 bits"])
def test_bf16_weights_in_place_of_bf16_gradients_need_no_second_pass(pools, name):
    """With overlap Megatron copies before the next forward pass."""
    case = Case(plug="main_shards", mxfp8=True, **SETTINGS[name])
    for mains, copied, in_place in pools(2)(stand_ins.second_passes, case):
        assert in_place == (mains if name == "late, 16 bits" else 0)
        assert copied == ([] if name == "late, 16 bits" else [mains, mains])
        assert mains > 1


def test_precision_aware_leaves_masters_to_megatron(pools):
    own, other = (
        pools(2)(stand_ins.train, Case(plug=mode, mxfp8=True))
        for mode in ("main_shards", "precision_aware")
    )
    assert own == other
    assert own[0]["steps"] != pools(2)(train, Case(plug="main_shards"))[0]["steps"]


@pytest.mark.parametrize("name", ["overlap", "late, 16 bits"])
def test_resuming_equals_going_straight_on(pools, tmp_path, name):
    case = Case(plug="main_shards", mxfp8=True, **SETTINGS[name])
    straight = pools(2)(stand_ins.train, case, 4)
    found = pools(2)(stand_ins.save_and_load, case, tmp_path / "a")
    for (saved, back, grads), whole in zip(found, straight, strict=True):
        assert not any(grads)
        assert back["loaded"] == saved
        assert back["steps"] == whole["steps"][2:]
        assert back["states"] == whole["states"]
