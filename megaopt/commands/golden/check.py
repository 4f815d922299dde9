"""Steps the cases wherever this machine can, and compares with a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from megaopt.commands import environment
from megaopt.commands.golden.case import Case
from megaopt.commands.golden.cases import ANY_MACHINE, CASES, NVIDIA_GPU
from megaopt.commands.golden.record import Digests, Record
from megaopt.commands.golden.run import run
from megaopt.kernels.backends import BACKENDS, why_not
from megaopt.kernels.contracts import CONTRACTS

DESCRIBED = ("gpu", "compute_capability", "cuda_driver", "cuda_runtime", "torch", "triton")
"""What a record says of the machine on which the part of NVIDIA GPUs was made."""

EXAMPLE = "ieee/adamw/bf16*"
"""A pattern that some cases match, for messages."""

Advance = Callable[[], None]
"""Called after each case."""


@dataclass(frozen=True)
class Task:
    """The cases of a part under one contract, with one backend on one device."""

    part: str
    contract: str
    backend: str
    device: torch.device
    cases: Sequence[Case]
    reason: str | None
    """Why they are not checked here; None where they are."""

    @property
    def where(self) -> str:
        """Backend and device, as tables and messages have them."""
        return f"{self.backend} on {self.device.type}"


@dataclass
class Outcome:
    """What became of a task."""

    task: Task
    identical: int = 0
    different: dict[str, str] = field(default_factory=dict)
    """For each case the quantities that are not those of the record, or what went wrong."""


def choose(only: Sequence[str], backends: Sequence[str]) -> dict[str, list[Case]]:
    """The cases by part.

    Args:
        only: patterns of names (fnmatch); none means all.
        backends: checked only.

    Raises:
        ValueError: a pattern is that of no case, or a backend is none.
    """
    for backend in backends:
        if backend not in BACKENDS:
            raise ValueError(f"backends must be of {', '.join(BACKENDS)}, got {backend!r}")
    names = [case.name for cases in CASES.values() for case in cases]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"only must match one of the {len(names)} names of cases, as {EXAMPLE!r} does, "
                f"got {pattern!r}"
            )
    return {
        part: [case for case in cases if matches(case.name, only)] for part, cases in CASES.items()
    }


def matches(name: str, only: Sequence[str]) -> bool:
    """Whether a case is one of those asked for."""
    return not only or any(fnmatchcase(name, pattern) for pattern in only)


def plan(
    record: Record, chosen: Mapping[str, list[Case]], backends: Sequence[str] = ()
) -> list[Task]:
    """What is to be checked, and what cannot be checked here; no backends mean all.

    A contract that none of these backends serves is among the latter.
    """
    found = []
    for part, cases in chosen.items():
        for name in dict.fromkeys(case.contract for case in cases):
            own = [case for case in cases if case.contract == name]
            if record.is_recorded(part):  # Record.strays has the others
                own = [case for case in own if case.name in record.digests[part]]
            serving = CONTRACTS[name].backends
            asked = [each for each in serving if not backends or each in backends]
            for device in _devices(name):
                for backend in asked or serving:
                    reason = _why_not(record, part, name, backend, device)
                    if not asked:
                        reason = "its backend was not asked for"
                    found.append(Task(part, name, backend, device, own, reason))
    return found


def _devices(contract: str) -> list[torch.device]:
    """The CPU and the first GPU; the GPU alone where there is one and the contract needs it."""
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        return [cpu]
    gpu = torch.device("cuda", 0)
    return [gpu] if CONTRACTS[contract].needs_gpu else [cpu, gpu]


def _why_not(
    record: Record, part: str, contract: str, backend: str, device: torch.device
) -> str | None:
    return why_not(backend, CONTRACTS[contract], device) or why_not_compared(record, part)


def why_not_compared(record: Record, part: str) -> str | None:
    """Why digests made here cannot be those of a part of the record; None where they must be."""
    if not record.is_recorded(part):
        return "not recorded yet"
    if part == ANY_MACHINE:
        return None
    here = environment.describe()["compute_capability"]
    recorded = record.made_on.get("compute_capability")
    if here != recorded:
        return f"recorded on compute capability {recorded}, the GPU here has {here}"
    return None


def check(task: Task, recorded: Digests, advance: Advance) -> Outcome:
    """Steps the cases of a task that can be checked here."""
    outcome = Outcome(task)
    for case in task.cases:
        difference = what_differs(case, task.backend, task.device, recorded[case.name])
        if difference is None:
            outcome.identical += 1
        else:
            outcome.different[case.name] = difference
        advance()
    return outcome


def what_differs(
    case: Case, backend: str, device: torch.device, expected: Mapping[str, str] | None
) -> str | None:
    """The quantities of a case that are not as expected, or the error; None asks for steps alone.

    Args:
        case: what is stepped.
        backend: "triton" or "reference".
        device: where.
        expected: digests by quantity; None where they are not known.
    """
    try:
        found = run(case, backend, device)
    # a step that fails where it did not is what this looks for
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if expected is None:
        return None
    quantities = dict.fromkeys((*expected, *found))
    return ", ".join(q for q in quantities if found.get(q) != expected.get(q)) or None


def record_anew(old: Record, advance: Advance) -> Record:
    """A record of what is here: any machine's part by the reference, a GPU's by its kernels.

    What an NVIDIA GPU alone keeps stays as it was on a machine without one.
    """
    cpu, cases = torch.device("cpu"), CASES[ANY_MACHINE]
    digests = {**old.digests, ANY_MACHINE: _recorded(cases, "reference", cpu, advance)}
    made_on = old.made_on
    if why_not_recorded() is None:
        gpu = torch.device("cuda", 0)
        digests[NVIDIA_GPU] = _recorded(CASES[NVIDIA_GPU], "triton", gpu, advance)
        made_on = {name: environment.describe()[name] for name in DESCRIBED}
    return Record(digests, made_on)


def why_not_recorded() -> str | None:
    """Why the part of NVIDIA GPUs cannot be made here; None where it can."""
    contracts = {case.contract for case in CASES[NVIDIA_GPU]}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    reasons = (why_not("triton", CONTRACTS[name], device) for name in sorted(contracts))
    return next((reason for reason in reasons if reason is not None), None)


def _recorded(
    cases: Sequence[Case], backend: str, device: torch.device, advance: Advance
) -> Digests:
    found = {}
    for case in cases:
        found[case.name] = run(case, backend, device)
        advance()
    return found
