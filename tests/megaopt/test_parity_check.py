"""doctor --check: says which peers are there, and whether a promise holds beside them."""

from dataclasses import replace

import pytest
import torch

from megaopt import doctor, parity
from megaopt.bench.cases import MODES
from megaopt.bench.equality import Check

PROMISED = [name for name, mode in MODES.items() if mode.twin is not None]


def test_every_promised_mode_is_examined():
    assert [found.mode for found in parity.examine_parity()] == PROMISED
    assert {MODES[name].contract for name in PROMISED} == {"te", "torch"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_claimed_and_nothing_is_broken(capsys):
    assert doctor.main(check=True) == 0
    found = parity.examine_parity()
    assert {(each.holds, each.note) for each in found} == {(None, "there is no CUDA GPU")}
    text = capsys.readouterr().out
    assert "not here" in text
    assert str(torch.__version__) in text


@pytest.mark.parametrize(("difference", "status"), [(None, 0), ("step 1, weight[3]", 1)])
def test_a_difference_is_shown_and_counts(monkeypatch, capsys, difference, status):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: True)
    monkeypatch.setattr(doctor, "devices", list)
    monkeypatch.setattr(parity, "check", lambda *_: Check("torch-fused-fp32", difference))
    monkeypatch.setattr(parity, "MODES", {"torch:fp32": MODES["torch:fp32"]})
    assert doctor.main(check=True) == status
    assert ("weight[3]" in capsys.readouterr().out) == bool(status)


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setattr(parity, "gpu_is_there", lambda: True)
    name = "te:bf16"
    peer = replace(parity.PEERS[MODES[name].twin], module="no_such_library.optimizers")
    monkeypatch.setitem(parity.PEERS, MODES[name].twin, peer)
    monkeypatch.setattr(parity, "MODES", {name: MODES[name]})
    (found,) = parity.examine_parity()
    assert (found.holds, found.note) == (None, "no_such_library is not installed")


@pytest.mark.gpu
def test_torchs_bits_are_kept_here():
    found = {each.mode: each for each in parity.examine_parity()}
    assert found["torch:fp32"].holds is True
