"""The doctor tries what it reports, and sees a backend that is broken or differs by a bit."""

import copy
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import megaopt
from megaopt import FusedAdam
from megaopt.commands import doctor
from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.modes import MODES
from megaopt.commands.golden.cases import CASES
from megaopt.commands.golden.record import packaged
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.contracts import CONTRACTS

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_all_that_should_work_here_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the verdict."""
    assert doctor.main() == 0
    text = capsys.readouterr().out
    verdict = text.splitlines()[0]
    assert verdict.startswith("working, with the golden record's bits: reference on cpu")
    assert verdict.endswith("; --check steps more cases, and other libraries")
    for word in (megaopt.__version__, str(torch.__version__), *BACKENDS, *CONTRACTS):
        assert word in text


@pytest.mark.slow
def test_all_that_is_checked_here_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(check=True) == 0, capsys.readouterr().out


@pytest.mark.long
@pytest.mark.gpu
def test_all_that_is_checked_on_a_gpu_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(check=True) == 0, capsys.readouterr().out
    assert {each.mode for each in doctor.examine_peers(MODES) if each.works} >= {"torch:fp32"}


def test_the_cases_are_of_the_record_and_of_every_contract() -> None:
    names = {case.name for cases in CASES.values() for case in cases}
    assert names >= {*doctor.CHECKED}
    assert {name.split("/")[0] for name in doctor.EVERYWHERE} == {*CONTRACTS}


def test_other_bits_than_the_records_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, name = packaged(), doctor.QUICK[-1]
    digests = copy.deepcopy(record.digests)
    part = next(part for part, own in digests.items() if name in own)
    digests[part][name]["weights"] = "0" * 12
    monkeypatch.setattr(doctor, "packaged", lambda: replace(record, digests=digests))
    assert doctor.main() == 1
    verdict = capsys.readouterr().out.splitlines()[0]
    assert f"NOT working: reference under ieee on cpu: {name}: weights" in verdict


def test_where_the_record_is_of_another_gpu_steps_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "why_not_compared", lambda *_: "recorded elsewhere")
    monkeypatch.setattr(doctor, "packaged", lambda: None)
    found = {each.contract: each for each in doctor.examine(CPU) if each.backend == "reference"}
    assert found["ieee"].works
    assert found["ieee"].note == "cases stepped: 3, bits not compared: recorded elsewhere"


def test_backend_that_cannot_work_says_why_and_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(BACKENDS["triton"]), "why_not", lambda *_: "no [kernels] on Mars")
    assert doctor.main() == 0
    text = capsys.readouterr().out
    assert "not here" in text
    assert "[kernels]" in text


class Crooked(FusedAdam):
    """Turns over one bit of one moment where the Triton kernel stepped."""

    def __init__(self, parameters, *, backend, **options) -> None:
        super().__init__(parameters, backend=backend, **options)
        self.crooked = backend == "triton"

    def step(self, **arguments) -> None:
        super().step(**arguments)
        if self.crooked:
            parameter = self.param_groups[0]["params"][2]
            self.state[parameter]["exp_avg"].view(torch.int32)[3] ^= 1


class Broken(FusedAdam):
    def step(self, **arguments) -> None:
        raise RuntimeError("the [kernel] does not compile")


@needs_triton
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Crooked, "ieee/adamw/bf16-weight/fp32-master/fp32-fp32: exp_avg"),
        (Broken, "RuntimeError: the [kernel] does not compile"),
    ],
)
def test_broken_backend_is_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    optimizer: type[FusedAdam],
    message: str,
) -> None:
    monkeypatch.setattr(megaopt, "FusedAdam", optimizer)
    assert doctor.main() == 1
    verdict = capsys.readouterr().out.splitlines()[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"NOT working: triton under ieee on {device}" in verdict
    assert message in verdict


# --- beside the peers

PROMISED = [name for name, mode in MODES.items() if mode.twin is not None]


def test_every_promised_mode_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.examine_peers(MODES)
    assert [each.mode for each in found] == PROMISED
    assert {each.works for each in found} == {None}
    assert {MODES[name].contract for name in PROMISED} == {"te", "torch"}


@pytest.mark.parametrize("difference", [None, "step 1, weight[3]"])
def test_a_difference_is_told_with_its_mode(
    monkeypatch: pytest.MonkeyPatch, difference: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.equality, "check", lambda *_: Check("torch-fused-fp32", difference))
    found = doctor.examine_peers(["torch:fp32"])
    verdict, healthy = doctor.judge([], found)
    assert healthy == (difference is None)
    told = "NOT the peer's bits: torch:fp32 beside torch-fused-fp32: step 1, weight[3]"
    assert verdict == told or (healthy and "; 1 modes have a peer's bits, 0 could not" in verdict)
