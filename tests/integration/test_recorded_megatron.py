"""Recordings of Megatron's optimizers have the same rows in every layout."""

import pytest
from how_to import needs
from recorded_megatron import recorded, trained
from recorded_ranks import kept, rows

from megaopt.recording.files import Recording

pytestmark = needs("megatron")

LAYOUTS = {
    "data parallel": (2, {}),
    "three ranks": (3, {}),
    "tensor parallel": (2, {"tensor_parallel": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
OF_FOUR = {
    "tensor parallel, four": (4, {"tensor_parallel": 4}),
    "tensor and data parallel": (4, {"tensor_parallel": 2}),
    "tensor parallel and pipeline": (4, {"tensor_parallel": 2, "pipeline": 2}),
}


QUICK = {
    None: ["data parallel", "tensor parallel"],
    "main_shards": ["three ranks", "pipeline"],
    "precision_aware": ["data parallel", "pipeline"],
}
"""Each layout and each way to plug in, where not all pairs are."""


def layouts_of(plug):
    """Those of one way; all are slow but the quick ones without a plug."""
    quick = {name: LAYOUTS[name] for name in QUICK[plug]}
    others = {name: LAYOUTS[name] for name in LAYOUTS if name not in quick}
    yield pytest.param(plug, quick, id=f"{plug}", marks=[pytest.mark.slow] if plug else [])
    for name, own in (("others", others), ("four", OF_FOUR)):
        yield pytest.param(plug, own, id=f"{plug}-{name}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("plug", "layouts"), [each for p in QUICK for each in layouts_of(p)])
def test_layouts(pools, tmp_path, plug, layouts):
    pools(1)(recorded, tmp_path / "one", {"plug": plug})
    expected = rows(tmp_path / "one")
    assert {each for _, each in expected[1]} >= {"grad", "master", "weight", "exp_avg"}
    assert {each for _, each in kept(tmp_path / "one", 2)} >= {"grad", "old master", "exp_avg"}
    for name, (world, settings) in layouts.items():
        pools(world)(recorded, tmp_path / name, {"plug": plug, **settings})
        assert rows(tmp_path / name) == expected, name
        assert kept(tmp_path / name, 2) == kept(tmp_path / "one", 2), name


@pytest.mark.parametrize(("world", "settings"), [(1, {}), (2, {"pipeline": 2})])
def test_losses_and_norms_of_its_models_are_heard(pools, tmp_path, world, settings):
    pools(world)(trained, tmp_path / "a", settings)
    lines = [sources[0] for sources in Recording(tmp_path / "a").scalars(2)]
    assert all(line["grad_norm"] for line in lines)
    assert [bool(line["losses"]) for line in lines] == [False, True][-world:]
