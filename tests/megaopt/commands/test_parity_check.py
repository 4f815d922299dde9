"""doctor --check: says which peers are there, and whether a promise holds beside them."""

import pytest

from megaopt.commands import parity
from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.modes import MODES
from megaopt.commands.promises import table

PROMISED = [name for name, mode in MODES.items() if mode.twin is not None]


def test_every_promised_mode_is_examined():
    assert [found.mode for found in parity.examine_parity(MODES)] == PROMISED
    assert {MODES[name].contract for name in PROMISED} == {"te", "torch"}


@pytest.mark.parametrize("difference", [None, "step 1, weight[3]"])
def test_a_difference_is_told_with_its_mode(monkeypatch, difference):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: True)
    monkeypatch.setattr(parity, "check", lambda *_: Check("torch-fused-fp32", difference))
    told = "torch:fp32 beside torch-fused-fp32: step 1, weight[3]"
    assert table.parity("torch") == (told if difference else None)


def test_a_contract_of_which_nothing_was_compared_is_not_shown_to_hold(monkeypatch):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: False)
    assert table.parity("torch") == "torch:fp32 beside torch-fused-fp32: there is no CUDA GPU"
