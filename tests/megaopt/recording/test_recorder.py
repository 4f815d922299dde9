"""A recorder learns what each step of any torch optimizer did, and changes nothing in it."""

import pytest
import torch
from recorded import LOOPS, recorded, trained

from megaopt.recording.files import Recording


@pytest.mark.parametrize("name", LOOPS)
def test_training_has_the_same_bits(name, tmp_path):
    alone, beside = trained(name), recorded(name, tmp_path / "a", level="modules")
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_run_has_the_same_rows(name, tmp_path):
    recorded(name, tmp_path / "a"), recorded(name, tmp_path / "b")
    first, second = Recording(tmp_path / "a"), Recording(tmp_path / "b")
    assert first.steps == second.steps == [1, 2, 3]
    for step in first.steps:
        assert first.digests(step) == second.digests(step)
        assert first.scalars(step) == second.scalars(step)
