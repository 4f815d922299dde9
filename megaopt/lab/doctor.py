"""`megaopt doctor`: what is installed, which backends and contracts work here, what is checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from rich.text import Text

from megaopt.kernels import native
from megaopt.kernels.backends import BACKENDS, why_not
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.host_memory import CUDA, free_bytes, held_bytes
from megaopt.kernels.products.launch import products
from megaopt.kernels.products.reference import OPERANDS, product_reference
from megaopt.lab import exits, source
from megaopt.lab.bench import equality
from megaopt.lab.bench.modes import MODES
from megaopt.lab.bench.sets import TensorSet
from megaopt.lab.bench.subjects import PEERS
from megaopt.lab.console import coloured, make_console, make_table
from megaopt.lab.golden.cases import ANY_MACHINE, NVIDIA_GPU, GoldenCase, packaged
from megaopt.lab.golden.check import outcome, why_not_compared
from megaopt.recording.environment import installed

QUICK = (
    "ieee/adamw/bf16-weight/fp32-master/fp32-fp32",
    "te/adamw/bf16-weight/fp32-master/fp32-fp32",
    "torch/adamw/fp32-weight/no-master/fp32-fp32",
    "ieee/lion/delayed-weight/fp32-master/fp32",
    "ieee/sgd_momentum/bf16-weight/remainder8-stochastic-master/stochastic",
)
"""Cases of the golden record for each time: contracts, rules, fp8, random bits."""
CHECKED = (
    *QUICK,
    "ieee/adamw/fp16-weight/fp32-master/fp32-fp32/clip/grad-scale",
    "ieee/adamw/bf16-weight/remainder/fp16-fp8/capturable",
    "ieee/adamw/delayed-weight/remainder8-stochastic-master/fp32-fp32",
    "te/adamw/bf16-weight/remainder/fp8-fp8/resume",
    "torch/adamw/bf16-weight/no-master/bf16-bf16/capturable/late",
)
"""Cases for --check: formats, clipping, scalars made on the device, fp8 weights, a resumed run."""
INTERPRETER = (
    "on Triton's interpreter, which is slow: another program must set TRITON_INTERPRET=1 before it "
    "imports megaopt"
)
WORKS: dict[bool | None, str | Text] = {
    True: coloured("green", "yes"),
    False: coloured("red", "NO"),
    None: "not here",
}

# below, at and above a program's chunk, one that is unaligned in 16 bytes, and many chunks
VECTORS = TensorSet(
    name="check", description="shapes of a check", sizes=(1, 7, 2047, 2048, 2049, 65_537)
)
MATRICES = TensorSet.of_shapes(
    "check", "shapes of a check, in fp8", [(16, 16), (96,), (128, 256), (272, 304), (640, 1024)]
)
PROBED = 128
"""Rows, columns and terms of the products that a card is asked for."""


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one backend under one contract on one device, or of a mode beside a peer."""

    of: tuple[str, ...]
    """Device, backend and contract; or mode and peer."""
    works: bool | None
    """Whether the backend works, or the mode has the peer's bits; None where it cannot be tried."""
    note: str

    def __str__(self) -> str:
        return f"{', '.join(self.of)}: {self.note}"


def main(*, check: bool = False) -> int:
    """Show what is installed, and which backends and contracts work here.

    Args:
        check: Also step more cases of the golden record, some 20 seconds on a CPU, and installed
            peers whose bits a contract promises.

    Returns:
        0 when all that is meant to work here works with the bits it promises, 1 otherwise.
    """
    console = make_console()
    findings = [finding for device in devices() for finding in examine(device, check)]
    if check:
        findings += [finding for device in devices()[1:] for finding in examine_products(device)]
    peers = examine_peers(MODES) if check else None
    verdict, healthy = judge(findings, peers)
    console.print(verdict, soft_wrap=True, highlight=False, style="green" if healthy else "red")
    here = source.describe()
    here["megatron-core"] = installed("megatron-core")
    here["extension"] = native.status()
    # the room for states in host memory (state_device="cpu"), and which cards map it
    free = free_bytes()
    amount = "not known" if free is None else f"{free / 2**30:.1f} GiB"
    here["host memory"] = f"{amount} free to be pinned; {held_bytes():,} bytes hold states here"
    cards = [device for device in devices() if CUDA.serves(device)]
    mapped = "; ".join(f"{card}: {CUDA.why_not(card) or 'mapped'}" for card in cards)
    none = "no card here: those of weights on the CPU are there anyway"
    here["states in host memory"] = mapped or none
    # none of the libraries is imported: that takes seconds, and some write to stderr of what they
    # cannot load
    libraries = []
    for peer in {peer.package: peer for peer in PEERS.values()}.values():
        version = "not known" if peer.is_installed else "not installed"
        libraries.append((peer.package, installed(peer.package) or version))
    rows = ((name, value or "none, or not known") for name, value in here.items())
    console.print(make_table("here", ("", ""), rows))
    headings = ("device", "backend", "contract", "works", "how, or why not")
    console.print(make_table("backends and contracts", headings, _rows(findings)))
    console.print(make_table("other libraries", ("library", "version"), libraries))
    if peers is not None:
        compared = ("mode", "beside", "equal", "what it promises, differs, or why not")
        console.print(make_table("modes that promise a peer's bits", compared, _rows(peers)))
    return exits.DONE if healthy else exits.DIFFERENT


def judge(
    findings: Sequence[DoctorFinding], peers: Sequence[DoctorFinding] | None
) -> tuple[str, bool]:
    """The verdict in one line, and whether nothing is wrong.

    Args:
        findings: Of all backends and contracts.
        peers: Our modes beside other libraries; None where they were not compared.
    """
    wrong = [f"NOT working: {finding}" for finding in findings if finding.works is False]
    wrong += [
        f"NOT the peer's bits: {finding}" for finding in peers or () if finding.works is False
    ]
    if wrong:
        return "; ".join(wrong), False
    backends = sorted(
        {f"{finding.of[1]} on {finding.of[0]}" for finding in findings if finding.works}
    )
    verdict = f"working, with the golden record's bits: {', '.join(backends)}"
    if peers is None:
        return f"{verdict}; --check steps more cases, and other libraries", True
    equal = sum(finding.works is True for finding in peers)
    left = len(peers) - equal
    return f"{verdict}; {equal} modes have a peer's bits, {left} could not be compared here", True


def devices() -> list[torch.device]:
    """Return the CPU and every CUDA GPU that torch sees."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in gpus)]


def examine(device: torch.device, check: bool = False) -> list[DoctorFinding]:
    """Step cases of the golden record with each backend under each contract on `device`."""
    findings = []
    for backend, contract in product(BACKENDS, CONTRACTS):
        of, reason = (str(device), backend, contract), why_not(backend, CONTRACTS[contract], device)
        interpreted = (device.type, backend) == ("cpu", "triton")
        if reason is None and interpreted and not check:
            reason = f"--check steps it, {INTERPRETER}"
        if reason is not None:
            findings.append(DoctorFinding(of, None, reason))
            continue
        names = CHECKED if check else QUICK
        cases = [GoldenCase(name) for name in names if name.startswith(f"{contract}/")]
        part = ANY_MACHINE if CONTRACTS[contract].needs_gpu is None else NVIDIA_GPU
        record = packaged()
        uncompared = why_not_compared(record, part)
        bits = f"bits not compared: {uncompared}" if uncompared else "the golden record's bits"
        note = f"cases stepped: {len(cases)}, {bits}{f'; {INTERPRETER}' if interpreted else ''}"
        finding = DoctorFinding(of, True, note)
        for case in cases:
            expected = None if uncompared else record.digests[part][case.name]
            different = outcome(case, backend, device, expected).different
            if different is not None:
                finding = DoctorFinding(of, False, f"{case.name}: {different}")
                break
        findings.append(finding)
    return findings


def examine_products(device: torch.device) -> list[DoctorFinding]:
    """Multiplies on a GPU beside the twin: numbers.md says what is promised for Hopper's cards."""
    findings, reason = [], BACKENDS["triton"].why_not(device)
    for dtype in OPERANDS:
        kind = "tf32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        of, generator = (str(device), "triton", f"products of {kind}"), torch.Generator()
        if reason is not None:
            findings.append(DoctorFinding(of, None, reason))
            continue
        generator.manual_seed(0)
        different = 0
        for binades in (0, 6, 40):
            left, right = (
                torch.ldexp(
                    torch.randn(PROBED, PROBED, generator=generator),
                    torch.randint(-binades, binades + 1, (PROBED, PROBED), generator=generator),
                ).to(dtype)
                for _ in range(2)
            )
            left[:2, 3:5] = torch.tensor([[torch.inf, -torch.inf], [torch.nan, 0.0]])
            (result,) = products([left.to(device)], [right.to(device)], out_dtype=torch.float32)
            expected = product_reference(left, right)
            different += int((result.cpu().view(torch.int32) != expected.view(torch.int32)).sum())
        works: bool | None = True
        note = "the bits of docs/numbers.md, which are the same everywhere"
        if different:
            note = (
                f"{different} of {3 * PROBED**2} numbers have other bits than docs/numbers.md says"
            )
            works = False if torch.cuda.get_device_capability(device) == (9, 0) else None
        if works is None:
            name = torch.cuda.get_device_name(device)
            note = f"{note}: the same bits are promised on {name} alone"
        findings.append(DoctorFinding(of, works, note))
    return findings


def examine_peers(names: Iterable[str]) -> list[DoctorFinding]:
    """Steps modes of contracts that another library keeps beside that library, on the GPU.

    Args:
        names: Of MODES; those that promise nobody's bits are left out.
    """
    findings = []
    for name in (name for name in names if MODES[name].twin is not None):
        mode = MODES[name]
        peer = PEERS[str(mode.twin)]
        works: bool | None = None
        note = peer.why_not() if torch.cuda.is_available() else "there is no CUDA GPU"
        if note is None:
            checked = VECTORS if mode.weight is None else MATRICES
            difference = equality.check(mode, checked, torch.device("cuda")).difference
            works, note = difference is None, difference or CONTRACTS[mode.contract].promise
        findings.append(DoctorFinding((name, peer.name), works, note))
    return findings


def _rows(findings: Sequence[DoctorFinding]) -> list[tuple[str | Text, ...]]:
    return [(*finding.of, WORKS[finding.works], finding.note) for finding in findings]
