"""`megaopt doctor`: what is installed, which backends and contracts work here, what is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from rich.markup import escape
from rich.table import Table

from megaopt.commands import environment, exits
from megaopt.commands.console import make_console
from megaopt.commands.golden.cases import ANY_MACHINE
from megaopt.commands.golden.check import check as check_cases
from megaopt.commands.golden.check import choose, plan
from megaopt.commands.golden.record import packaged
from megaopt.commands.parity import peers_table
from megaopt.commands.promises.trial import Place, Tensors, differ, train
from megaopt.kernels.backends import BACKENDS, why_not
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.host_memory import CUDA, free_bytes, held_bytes
from megaopt.state import native

if TYPE_CHECKING:
    from megaopt.commands.promises.table import Outcome

__all__ = ["Finding", "examine", "main"]

HOLDS = {True: "[green]yes[/green]", False: "[red]NO[/red]", None: "not here"}
INTERPRETER = (
    "; on Triton's interpreter, which is slow: another program must set TRITON_INTERPRET=1 before "
    "it imports megaopt"
)
GOLDEN = (
    "ieee/adamw/bf16-weight/fp32-master/fp32-fp32",
    "ieee/lion/delayed-weight/fp32-master/fp32",
    "ieee/sgd_momentum/bf16-weight/remainder8-stochastic-master/stochastic",
)
"""Cases of the golden record that are looked at each time: rules, fp8, random bits."""
WORKS = {True: "[green]yes[/green]", False: "[red]BROKEN[/red]", None: "not here"}


@dataclass(frozen=True)
class Finding:
    """What became of one backend under one contract on one device."""

    device: torch.device
    backend: str
    contract: str
    works: bool | None
    """Whether it works; None where it is not meant to."""
    note: str


def main(check: bool = False) -> int:
    """Print a verdict in the first line; then versions, devices, findings, other libraries.

    Args:
        check: Also check the promises of docs/numbers.md, as far as that can be done here.

    Returns:
        0 when all that is meant to work here works and every promise checked holds, 1 otherwise.
    """
    console = make_console()
    findings = [finding for device in devices() for finding in examine(device)]
    strange = other_than_recorded()
    outcomes = promises() if check else []
    verdict, healthy = judge(findings, outcomes, strange)
    console.print(verdict, soft_wrap=True, highlight=False, style="green" if healthy else "red")
    here = environment.describe()
    here["megatron-core"] = environment.installed_version("megatron-core")
    here |= {"extension": native.status(), **host_memory()}
    console.print(_environment_table(here))
    console.print(_findings_table(findings))
    console.print(peers_table())
    if check:
        console.print(_promises_table(outcomes))
    return exits.DONE if healthy else exits.DIFFERENT


def host_memory() -> dict[str, str]:
    """What there is for states in host memory (state_device="cpu"), and which cards map it."""
    free = free_bytes()
    known = "not known" if free is None else f"{free / 2**30:.1f} GiB"
    cards = [each for each in devices() if CUDA.serves(each)]
    found = {
        "host memory": f"{known} free to be pinned; {held_bytes():,} bytes hold states here",
        "states in host memory": "no card here: those of weights on the CPU are there anyway",
    }
    if cards:
        reasons = {str(card): CUDA.why_not(card) or "mapped" for card in cards}
        found["states in host memory"] = "; ".join(f"{c}: {r}" for c, r in reasons.items())
    return found


def other_than_recorded() -> dict[str, str]:
    """Step some cases of the golden record; what differs, by case and where it was stepped.

    The interpreter is left out: it takes seconds for a case.
    """
    record = packaged()
    found: dict[str, str] = {}
    for task in plan(record, choose(GOLDEN, ())):
        interpreted = (task.backend, task.device.type) == ("triton", "cpu")
        if task.part == ANY_MACHINE and task.reason is None and not interpreted:
            outcome = check_cases(task, record.digests[task.part], lambda: None)
            found |= {f"{case} ({task.where})": what for case, what in outcome.different.items()}
    return found


def judge(
    findings: Sequence[Finding],
    outcomes: Sequence[Outcome],
    strange: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, bool]:
    """The verdict in one line, and whether nothing is wrong.

    Args:
        findings: Of all backends and contracts.
        outcomes: Of all promises; none where they were not checked.
        strange: Cases that have not the golden record's bits, and what differs.
    """
    broken = [f"{f.backend} under {f.contract} on {f.device}" for f in findings if f.works is False]
    false = [f"{outcome.name!r}" for outcome in outcomes if outcome.holds is False]
    wrong = [f"NOT working: {', '.join(broken)}"] if broken else []
    wrong += [f"promises that do NOT hold: {', '.join(false)}"] if false else []
    wrong += [f"NOT the golden record's bits: {case}: {what}" for case, what in strange.items()]
    if wrong:
        return "; ".join(wrong), False
    backends = sorted({f"{f.backend} on {f.device}" for f in findings if f.works})
    verdict = f"working: {', '.join(backends)}; the golden record's bits ({len(GOLDEN)} cases)"
    if outcomes:
        held = sum(outcome.holds is True for outcome in outcomes)
        left = len(outcomes) - held
        return f"{verdict}; {held} promises hold, {left} could not be checked here", True
    return f"{verdict}; promises were not checked, --check does so", True


def promises() -> list[Outcome]:
    """Check what docs/numbers.md promises, as far as that can be done here."""
    from megaopt.commands.promises.table import examine_promises  # takes time, and is asked for

    return examine_promises()


def devices() -> list[torch.device]:
    """Return the CPU and every CUDA GPU that torch sees."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in gpus)]


def examine(device: torch.device) -> list[Finding]:
    """Take steps with each backend under each contract on `device`, and compare their bits."""
    return [
        _examine_one(device, backend, contract) for backend in BACKENDS for contract in CONTRACTS
    ]


def _examine_one(device: torch.device, backend: str, contract: str) -> Finding:
    reason = why_not(backend, CONTRACTS[contract], device)
    if reason is not None:
        return Finding(device, backend, contract, None, reason)
    try:
        found = _step(Place(backend, device), contract)
        different = _difference(found, device, contract)
    # whatever goes wrong in a step is what the user asked the doctor about
    except Exception as error:
        return Finding(device, backend, contract, False, f"{type(error).__name__}: {error}")
    if different is not None:
        return Finding(device, backend, contract, False, f"not the reference's bits: {different}")
    if "reference" not in CONTRACTS[contract].backends:
        return Finding(device, backend, contract, True, "steps (there is no reference)")
    is_reference = (device.type, backend) == ("cpu", "reference")
    note = "steps (the reference)" if is_reference else "steps, the reference's bits"
    if (device.type, backend) == ("cpu", "triton"):
        note += INTERPRETER
    return Finding(device, backend, contract, True, note)


def _difference(found: Tensors, device: torch.device, contract: str) -> str | None:
    """Where the reference has other bits; None where a contract has no reference."""
    if "reference" not in CONTRACTS[contract].backends:
        return None
    where = device if CONTRACTS[contract].needs_gpu else torch.device("cpu")
    return differ(found, _step(Place("reference", where), contract))


def _step(place: Place, contract: str) -> Tensors:
    """Every weight and state after each of three steps, bf16 weights and fp32 ones."""
    found: Tensors = {}
    options = {"contract": contract, "dtype": torch.float32, "lr": 0.1}
    for dtype in (torch.bfloat16, torch.float32):
        trained = train(place, options, dtype=dtype)
        _require_motion(trained)
        found |= {f"{dtype} {name}": tensor for name, tensor in trained.items()}
    return found


def _require_motion(trained: Tensors) -> None:
    for name, tensor in trained.items():
        before = trained.get(name.replace("after step 2", "after step 1"), tensor)
        if name.startswith("weight") and before is not tensor and torch.equal(before, tensor):
            raise RuntimeError(f"step 2 left a weight as it was: {name}")


def _table(title: str, *headings: str) -> Table:
    """A table that folds what is too long for a terminal, and cuts nothing."""
    table = Table(title=title, title_justify="left", show_header=bool(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _environment_table(described: dict[str, str | None]) -> Table:
    table = _table("here")
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in described.items():
        table.add_row(name, "none, or not known" if value is None else escape(value))
    return table


def _findings_table(findings: list[Finding]) -> Table:
    headings = ("device", "backend", "contract", "works", "how, or why not")
    table = _table("backends and contracts", *headings)
    for finding in findings:
        where = (str(finding.device), finding.backend, finding.contract)
        table.add_row(*where, WORKS[finding.works], escape(finding.note))
    return table


def _promises_table(outcomes: list[Outcome]) -> Table:
    table = _table("the promises of docs/numbers.md", "promise", "holds", "compared, or why not")
    for outcome in outcomes:
        table.add_row(outcome.name, HOLDS[outcome.holds], escape(outcome.note))
    return table
