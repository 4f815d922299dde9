"""The doctor tries what it reports, and sees a backend that is broken or differs by a bit."""

import copy
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import megaopt
from megaopt import FusedAdam
from megaopt.commands import doctor
from megaopt.commands.golden.record import packaged
from megaopt.commands.promises import trial
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.contracts import CONTRACTS

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_all_that_should_work_here_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the verdict."""
    assert doctor.main() == 0
    text = capsys.readouterr().out
    verdict = text.splitlines()[0]
    assert verdict.startswith("working: reference on cpu")
    assert f"the golden record's bits ({len(doctor.GOLDEN)} cases)" in verdict
    assert verdict.endswith("promises were not checked, --check does so")
    for word in (megaopt.__version__, str(torch.__version__), *BACKENDS, *CONTRACTS):
        assert word in text


def test_other_bits_than_the_records_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = packaged()
    digests = copy.deepcopy(record.digests)
    part = next(part for part, own in digests.items() if doctor.GOLDEN[1] in own)
    quantity = next(iter(digests[part][doctor.GOLDEN[1]]))
    digests[part][doctor.GOLDEN[1]][quantity] = "0" * 16
    monkeypatch.setattr(doctor, "packaged", lambda: replace(record, digests=digests))
    monkeypatch.setattr(doctor, "devices", list)
    assert doctor.main() == 1
    verdict = capsys.readouterr().out.splitlines()[0]
    case = f"{doctor.GOLDEN[1]} (reference on cpu): {quantity}"
    assert verdict == f"NOT the golden record's bits: {case}"


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
            parameter = self.param_groups[0]["params"][1]
            self.state[parameter]["exp_avg"].view(torch.int32)[0, 7] ^= 1


class Broken(FusedAdam):
    def step(self, **arguments) -> None:
        raise RuntimeError("the [kernel] does not compile")


@needs_triton
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Crooked, "bits: torch.bfloat16 exp_avg of weight 1 after step 1, element 7: 0x"),
        (Broken, "RuntimeError: the [kernel] does not compile"),
    ],
)
def test_broken_backend_is_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    optimizer: type[FusedAdam],
    message: str,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(trial, "FusedAdam", optimizer)
    findings = [f for f in doctor.examine(device) if f.backend == "triton" and f.works is not None]
    assert findings
    assert all(f.works is False and message in f.note for f in findings)
    assert doctor.main() == 1
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict.startswith(f"NOT working: triton under {findings[0].contract} on {device}")
