"""doctor --check: every row of the guarantee table, checked here or with the reason why not."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaopt import FusedAdam
from megaopt.commands import doctor, parity
from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.modes import MODES
from megaopt.commands.promises import checks, table, trial
from megaopt.commands.promises.table import NEEDS, PROMISES, Promise, why_not
from megaopt.commands.regression import fake_quantize
from megaopt.kernels.formats import FLOAT8_E4M3, WEIGHTS

NUMBERS = Path(__file__).parents[3] / "docs" / "numbers.md"
# once, where several promises have one check
CHECKED = list(
    {promise.check: promise for promise in PROMISES if why_not(promise) is None}.values()
)


def rows_of_the_guarantee_table():
    text = NUMBERS.read_text(encoding="utf-8")
    section = text.partition("## What is guaranteed")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    assert rows[0] == "operation"
    return rows[1:]


def test_the_promises_are_the_rows_of_the_guarantee_table():
    assert [promise.name for promise in PROMISES] == rows_of_the_guarantee_table()


def test_what_is_not_checked_says_what_checks_it():
    for promise in PROMISES:
        assert (promise.check is None) == (promise.left_to is not None), promise.name
        place = "not checked here; covered by `(make test|megaopt regress)"
        assert promise.check is not None or re.search(place, promise.left_to)


@pytest.mark.halved
@pytest.mark.parametrize("promise", CHECKED, ids=lambda promise: promise.name)
def test_every_promise_that_can_be_checked_here_holds(promise):
    assert promise.check() is None


@pytest.mark.long
@pytest.mark.gpu
def test_all_promises_hold_on_a_gpu(capsys):
    assert doctor.main(check=True) == 0, capsys.readouterr().out
    names = {promise.name for promise in PROMISES if why_not(promise) is None}
    assert {"contract torch", "a CUDA graph's replays are eager steps, contract ieee"} <= names


# --- a check notices what is wrong


def one_bit(tensor, index=0):
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().reshape(-1)  # contiguous in these tests, so a view
    tensor.detach().view(-1).view(size)[index] ^= 1


def crooked(when):
    """FusedAdam that turns over one bit of a moment after each step that `when` is true of."""

    class Crooked(FusedAdam):
        def __init__(self, parameters, **options):
            super().__init__(parameters, **options)
            self.turned = when(self, options)

        def step(self, **arguments):
            super().step(**arguments)
            if self.turned:
                parameter = self.param_groups[0]["params"][-1]
                one_bit(self.state[parameter]["exp_avg"])

    return Crooked


def in_pieces(optimizer, options):
    return len(optimizer.param_groups[0]["params"]) == 2 * len(trial.SHAPES)


OPTIMIZERS = {
    "update": (checks.update, lambda optimizer, options: not options["adam_w_mode"]),
    "pieces": (checks.step, in_pieces),
    "scaled": (checks.scaled_step, lambda _, options: options["backend"] != "reference"),
    "clipped pieces": (checks.clipping, in_pieces),
    "capturable": (checks.capturable, lambda _, options: "capturable" in options),
    "fp8 weights": (checks.float8_step, lambda _, options: options["backend"] != "reference"),
}
needs_kernels = pytest.mark.skipif(NEEDS["kernels"]() is not None, reason="Triton is not here")


@needs_kernels
@pytest.mark.parametrize(("check", "when"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_bit_of_a_moment_is_noticed(monkeypatch, check, when):
    monkeypatch.setattr(trial, "FusedAdam", crooked(when))
    assert re.search(r"exp_avg of weight \d+ after step 1, element \d+: 0x\w+, and not", check())


def test_another_norm_is_noticed(monkeypatch):
    class Short(FusedAdam):
        @property
        def grad_norm(self):
            many = len(self.param_groups[0]["params"]) > len(trial.SHAPES)
            return super().grad_norm * (1 + many * 2.0**-23)

    monkeypatch.setattr(trial, "FusedAdam", Short)
    assert re.search("reference on cpu, cut: norm at step 1, element 0", checks.norm())


def truncated(value, *_):
    return (value.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def towards_zero(value, *_):
    return torch.where(value.abs() > 448, value.sign() * 448, value * 0.999).to(torch.float8_e4m3fn)


def test_another_rounding_is_noticed(monkeypatch):
    bf16 = WEIGHTS[torch.bfloat16]
    monkeypatch.setitem(WEIGHTS, bf16.name, replace(bf16, encode_reference=truncated))
    assert checks.encoding().startswith("torch.bfloat16, element ")
    monkeypatch.setattr(checks, "FLOAT8_E4M3", replace(FLOAT8_E4M3, encode_reference=towards_zero))
    assert checks.float8_encoding().startswith("codes, element ")


@pytest.mark.parametrize("name", ["codes", "scale_inv"])
def test_other_fp8_weights_are_noticed(monkeypatch, name):
    monkeypatch.setattr(fake_quantize, "CODE_MAX", 240.0)
    assert checks.float8_weights((name,)).startswith(f"delayed: {name}, element ")
    assert re.match("delayed: (output|input grad), element ", checks.float8_linear())


# --- what is told


def only(monkeypatch, *promises):
    monkeypatch.setattr(table, "PROMISES", promises)


def held():
    """Two ways that agree."""
    return


def test_the_command_says_what_holds_and_why_others_could_not_be_checked(monkeypatch, capsys):
    monkeypatch.setitem(NEEDS, "Mars", lambda: "this is not [Mars]")
    only(
        monkeypatch,
        Promise("first", held),
        Promise("second", held, ("kernels", "Mars")),
        Promise("third", None, left_to="takes years: `make test` has it"),
    )
    monkeypatch.setitem(NEEDS, "kernels", lambda: None)
    assert doctor.main(check=True) == 0
    whole = capsys.readouterr().out
    *_, text = whole.partition("the promises of docs/numbers.md")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["first", "yes", "Two ways that agree."],
        ["second", "not here", "this is not [Mars]"],
        ["third", "not here", "takes years: `make test` has it"],
    ]
    assert whole.splitlines()[0].endswith("1 promises hold, 2 could not be checked here")


def test_a_promise_that_does_not_hold_is_status_1(monkeypatch, capsys):
    only(monkeypatch, Promise("first", held), Promise("second", lambda: "weight, element 3"))
    assert doctor.main(check=True) == 1
    text = capsys.readouterr().out
    assert "weight, element 3" in text
    assert text.splitlines()[0] == "promises that do NOT hold: 'second'"


# --- beside the peers

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
