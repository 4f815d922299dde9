"""The doctor tries what it reports, and sees a backend that is broken or differs by a bit."""

import copy
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import megaopt
from megaopt import FusedAdam
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.contracts import CONTRACTS
from megaopt.lab import doctor
from megaopt.lab.bench.equality import Check
from megaopt.lab.bench.modes import MODES
from megaopt.lab.golden.cases import CASES, packaged

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
    assert {each.of[0] for each in doctor.examine_peers(MODES) if each.works} >= {"torch:fp32"}


def test_the_cases_are_of_the_record_and_of_every_contract() -> None:
    names = {case.name for cases in CASES.values() for case in cases}
    assert names >= {*doctor.CHECKED}
    assert {name.split("/")[0] for name in doctor.QUICK} == {*CONTRACTS}


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
    assert f"NOT working: cpu, reference, ieee: {name}: weights" in verdict


def test_where_the_record_is_of_another_gpu_steps_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "why_not_compared", lambda *_: "recorded elsewhere")
    monkeypatch.setattr(doctor, "packaged", lambda: None)
    found = {each.of: each for each in doctor.examine(CPU)}
    stepped = found["cpu", "reference", "ieee"]
    assert stepped.works
    assert stepped.note == "cases stepped: 3, bits not compared: recorded elsewhere"


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
    """On a CPU, where Triton's interpreter is stepped by --check alone."""
    monkeypatch.setattr(megaopt, "FusedAdam", optimizer)
    monkeypatch.setattr(doctor, "CHECKED", doctor.QUICK[:1])
    assert doctor.main(check=True) == 1
    verdict = capsys.readouterr().out.splitlines()[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert re.search(rf"NOT working: {device}(:0)?, triton, ieee: ", verdict)
    assert message in verdict


# --- beside the peers

PROMISED = [name for name, mode in MODES.items() if mode.twin is not None]


def test_every_promised_mode_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.examine_peers(MODES)
    assert [each.of[0] for each in found] == PROMISED
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
    told = "NOT the peer's bits: torch:fp32, torch-fused-fp32: step 1, weight[3]"
    assert verdict == told or (healthy and "; 1 modes have a peer's bits, 0 could not" in verdict)


@pytest.mark.gpu
def test_products_of_a_card_are_the_twins() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the bits are those of Hopper")
    found = doctor.examine_products(torch.device("cuda", 0))
    assert [each.works for each in found] == [True, True, True], found


@pytest.mark.parametrize(
    ("capability", "works", "words"),
    [((9, 0), False, "1 of"), ((8, 0), None, "on A card alone")],
    ids=str,
)
def test_a_card_that_multiplies_otherwise_is_told(
    capability: tuple[int, int], works: bool | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of a product of TF32 is another one."""
    own, count = doctor.products, iter(range(9))

    def changed(left: Any, right: Any, **options: Any) -> Any:
        found = own(left, right, **options)
        if next(count) == 6:
            found[0][5, 5] += 1
        return found

    monkeypatch.setattr(doctor, "products", changed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A card")
    bf16, fp16, tf32 = doctor.examine_products(torch.device("cpu"))
    assert (bf16.works, fp16.works, tf32.works) == (True, True, works)
    assert words in tf32.note
