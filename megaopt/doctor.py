"""`megaopt doctor`: what is installed, and which backends and contracts work here, tried out."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter

from megaopt import FusedAdam, environment
from megaopt.kernels.backends import BACKENDS, why_not
from megaopt.kernels.contracts import CONTRACTS
from megaopt.parity import examine_parity, parity_table, peers_table

__all__ = ["Finding", "examine", "main"]

# below, at and above the whole chunks of a kernel, and a scalar
SHAPES = ((), (1,), (1000,), (64, 128), (10_001,))


@dataclass(frozen=True)
class Finding:
    """What became of one backend under one contract on one device."""

    device: torch.device
    backend: str
    contract: str
    works: bool | None
    """None where it is not meant to work."""
    note: str


def main(check: bool = False) -> int:
    """Print versions, devices, other libraries and findings.

    Args:
        check: Also step beside the installed peers whose bits a contract promises, and compare.

    Returns:
        0 when all that is meant to work here works and every promise checked holds, 1 otherwise.
    """
    console = Console()
    console.print(_environment_table(environment.describe()))
    findings = [finding for device in devices() for finding in examine(device)]
    console.print(_findings_table(findings))
    console.print(peers_table())
    parities = examine_parity() if check else []
    if check:
        console.print(parity_table(parities))
    broken = any(finding.works is False for finding in findings)
    return 1 if broken or any(parity.holds is False for parity in parities) else 0


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
        found = _bits_of_steps(device, backend, contract)
        expected = _expected_bits(device, contract, found)
    # whatever goes wrong in a step is what the user asked the doctor about
    except Exception as error:
        return Finding(device, backend, contract, False, f"{type(error).__name__}: {error}")
    names = dict.fromkeys((*expected, *found))
    if different := [name for name in names if found.get(name) != expected.get(name)]:
        note = f"not the reference's bits: {different[0]}, {len(different)} differences in all"
        return Finding(device, backend, contract, False, note)
    if "reference" not in CONTRACTS[contract].backends:
        return Finding(device, backend, contract, True, "steps (there is no reference)")
    is_reference = (device.type, backend) == ("cpu", "reference")
    note = "steps (the reference)" if is_reference else "steps, the reference's bits"
    return Finding(device, backend, contract, True, note)


def _expected_bits(device: torch.device, contract: str, found: dict[str, str]) -> dict[str, str]:
    """Return the reference's bits, or those found where a contract has no reference."""
    if "reference" not in CONTRACTS[contract].backends:
        return found
    where = device if CONTRACTS[contract].needs_gpu else torch.device("cpu")
    return _bits_of_steps(where, "reference", contract)


def _bits_of_steps(device: torch.device, backend: str, contract: str) -> dict[str, str]:
    """Return a digest of every weight and state after each of three steps, by name."""
    # drawn on the CPU: a GPU's generator gives other numbers for the same seed
    generator = torch.Generator().manual_seed(0)
    parameters = [
        Parameter(torch.randn(shape, generator=generator).to(dtype).to(device))
        for dtype in (torch.bfloat16, torch.float32)
        for shape in SHAPES
    ]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "dtype": torch.float32}
    optimizer = FusedAdam(parameters, contract=contract, backend=backend, **options)
    digests: dict[str, str] = {}
    for step in range(1, 4):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad.to(parameter.dtype).to(device)
        optimizer.step()
        if any(torch.equal(old, new) for old, new in zip(before, parameters, strict=True)):
            raise RuntimeError(f"step {step} left a weight as it was")
        for index, parameter in enumerate(parameters):
            tensors = {"weight": parameter.detach(), **optimizer.state[parameter]}
            where = f"of parameter {index} after step {step}"
            digests |= {f"{n} {where}": _digest(t) for n, t in tensors.items() if t is not None}
    return digests


def _digest(tensor: Tensor) -> str:
    content = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(str(tensor.dtype).encode() + content).hexdigest()


def _environment_table(described: dict[str, str | None]) -> Table:
    table = Table(title="here", title_justify="left", show_header=False)
    for name, value in described.items():
        table.add_row(name, "none, or not known" if value is None else value)
    return table


def _findings_table(findings: list[Finding]) -> Table:
    table = Table(title="backends and contracts", title_justify="left")
    for heading in ("device", "backend", "contract", "works", "how, or why not"):
        table.add_column(heading)
    words = {True: "[green]yes[/green]", False: "[red]BROKEN[/red]", None: "not here"}
    for finding in findings:
        where = (str(finding.device), finding.backend, finding.contract)
        table.add_row(*where, words[finding.works], finding.note.replace("[", r"\["))
    return table
