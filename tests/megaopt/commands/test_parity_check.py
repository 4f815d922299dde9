"""doctor --check: says which peers are there, and whether a promise holds beside them."""

from dataclasses import replace

import pytest
import torch

from megaopt.commands import parity
from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.modes import MODES
from megaopt.commands.promises import table

PROMISED = [name for name, mode in MODES.items() if mode.twin is not None]


def test_every_promised_mode_is_examined():
    assert [found.mode for found in parity.examine_parity(MODES)] == PROMISED
    assert {MODES[name].contract for name in PROMISED} == {"te", "torch"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_claimed():
    found = parity.examine_parity(MODES)
    assert {(each.holds, each.note) for each in found} == {(None, "there is no CUDA GPU")}


@pytest.mark.parametrize("difference", [None, "step 1, weight[3]"])
def test_a_difference_is_told_with_its_mode(monkeypatch, difference):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: True)
    monkeypatch.setattr(parity, "check", lambda *_: Check("torch-fused-fp32", difference))
    told = "torch:fp32 beside torch-fused-fp32: step 1, weight[3]"
    assert table.parity("torch") == (told if difference else None)


def test_a_contract_of_which_nothing_was_compared_is_not_shown_to_hold(monkeypatch):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: False)
    assert table.parity("torch") == "torch:fp32 beside torch-fused-fp32: there is no CUDA GPU"


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: True)
    name = "te:bf16"
    peer = replace(parity.PEERS[MODES[name].twin], module="no_such_library.optimizers")
    monkeypatch.setitem(parity.PEERS, MODES[name].twin, peer)
    (found,) = parity.examine_parity([name])
    assert (found.holds, found.note) == (None, "no_such_library is not installed")


@pytest.mark.gpu
def test_torchs_bits_are_kept_here():
    found = {each.mode: each for each in parity.examine_parity(MODES)}
    assert found["torch:fp32"].holds is True
