"""The command line: one function for each command.

Exit status: 0 done, and nothing differs; 1 a difference, or a check that failed; 2 bad input, what
cannot be done here, or a file that cannot be written; 130 Ctrl-C. MEGAOPT_DEBUG=1 shows the
traceback of an error. This module imports little: Ctrl-C is heard from its `main` on.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import megaopt
from megaopt.commands import exits
from megaopt.commands.configs import DEFAULT, find_config

TOML_PACKAGES = () if sys.version_info >= (3, 11) else ("tomli",)
PACKAGES = ("tyro", "rich", "matplotlib", "pydantic", *TOML_PACKAGES)

DESCRIPTION = (
    "Fused optimizers with the same bits everywhere. --version shows the version; COMMAND --help "
    "what a command takes."
)


def regress(
    config: Path = DEFAULT, /, *, perturb: int | None = None, out: Path = Path("out")
) -> int:
    """Train the variants that a config names on the same data; compare them bit for bit.

    Args:
        config: TOML file of the run, or the name of one that comes with megaopt, as gpt_tiny_fp8.
        perturb: Flip the lowest bit of one master after this step, to see a difference caught.
        out: Folder for the record and the picture; the run gets a folder of its name in it.
    """
    return _load("megaopt.commands.regression.command", "regress")(
        find_config(config), out, perturb
    )


def train(
    config: Path,
    /,
    *,
    variant: str | None = None,
    steps: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    result: Path | None = None,
) -> int:
    """Train one variant of a config; regress alone takes those of Megatron (megatron_...).

    Args:
        config: TOML file of the run, or the name of one that comes with megaopt.
        variant: Name of the variant; the config's first fused variant by default.
        steps: Last step, counted from the run's beginning; the config's by default.
        save: Write a checkpoint to this file at the end.
        resume: Continue from this checkpoint of the same variant.
        result: Record the steps trained here in this folder, which must not be there yet: losses as
            float.hex writes them, and the digest of every weight, master and moment after each step
            (docs/recording.md).
    """
    return _load("megaopt.commands.regression.single", "train")(
        find_config(config), variant=variant, steps=steps, save=save, resume=resume, result=result
    )


def bench(
    *,
    out: Path = Path("out/bench"),
    sets: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    peers: bool = True,
) -> int:
    """Time the optimizer step, and other libraries', beside a copy of its bytes, on a CUDA GPU.

    Args:
        out: Folder for the record and the pictures.
        sets: Sets of tensors to time: A, B, C, llama70b-64, moe64, gpt2, host; all by default.
        only: Forms to time, as bf16 or blocks, with their peers; all by default. Any other word
            shows the list of names.
        peers: Time the other libraries' optimizers that are installed.
    """
    return _load("megaopt.commands.bench.command", "main")(out, sets, only, peers)


def doctor(*, check: bool = False) -> int:
    """Show what is installed, and which backends and contracts work here.

    Args:
        check: Also step more cases of the golden record, some 20 seconds on a CPU, and installed
            peers whose bits a contract promises.
    """
    return _load("megaopt.commands.doctor", "main")(check)


def verify(
    *, record: Path | None = None, only: tuple[str, ...] = (), backends: tuple[str, ...] = ()
) -> int:
    """Step the cases of the golden record with every backend that works here; compare their bits.

    Args:
        record: Write the record anew to this file, and compare nothing.
        only: Names of the cases to check, or patterns of them ('ieee/adamw/bf16*'); all by default.
        backends: Names of the backends to check; all by default.
    """
    from megaopt.commands.golden.check import verify as run

    return run(record, only, backends)


def record(
    command: tuple[str, ...],
    /,
    *,
    out: Path = Path("out/recording"),
    level: Literal["loss", "step", "blocks", "modules"] = "step",
    every: int = 1,
    samples: int = 10,
    keep: str = "",
    map: Path | None = None,
    vocabulary: int | None = None,
    audit: bool = False,
) -> int:
    """Run a command, as `megaopt record -- torchrun train.py`, and record its optimizers' steps.

    The exit status is the command's.

    Args:
        command: Behind --: the command and its arguments.
        out: Folder for the recording; each rank writes to one of its own there.
        level: loss: losses, options, random states, batches; step: also digests and samples of
            gradients, weights, masters, moments; blocks: also outputs of blocks and their
            gradients; modules: of all modules.
        every: Record each step that this divides, and the first.
        samples: From step 101 on, sample elements at steps that this divides.
        keep: Steps of which whole tensors are written, as 100,200-210.
        map: JSON file of canonical names by the names that parameters have.
        vocabulary: Rows of Megatron's embedding that are not padding.
        audit: Hold the recording to the optimizers' laws afterwards; then the status is audit's.
    """
    from megaopt.commands.record import record as run

    return run(
        command,
        out,
        keep,
        map,
        audit,
        level=level,
        every=every,
        samples=samples,
        vocabulary=vocabulary,
    )


def audit(folder: Path, /, *, json: Path | None = None) -> int:
    """Hold each step of a recording to the law of its optimizer, without a reference run.

    Exit status: 0 every step obeys, 1 some do not, 2 nothing could be checked.

    Args:
        folder: What megaopt record or megaopt.Recorder wrote.
        json: Write the whole report to this file.
    """
    return _load("megaopt.commands.audit", "audit")(folder, json)


def diff(
    a: Path,
    b: Path,
    /,
    *,
    map: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
    github: bool = False,
    noise: tuple[Path, ...] = (),
    tolerance: float | None = None,
) -> int:
    """Compare two recorded runs: what differs first, and who is to blame. 0 same, 1 differ.

    Args:
        a: Folder of the recording that counts as right.
        b: Folder of the other.
        map: JSON file of names of tensors in B and what they are called in A; a "*" is any text.
        json: Write the comparison to this file.
        html: Write a page with pictures to this file.
        github: Print an annotation for GitHub's pull requests too.
        noise: Folders of repeats of A: how far a run lies from itself.
        tolerance: How far numbers may lie apart and pass, of their norm, as 1e-5; it excuses no
            other data, weights at the start or writes from outside.
    """
    main = _import("megaopt.commands.compared", "diff")
    return main(a, b, map, json, html, github, noise, tolerance)


def export(run: Path, to: Path, /) -> int:
    """Write a recording as a table: step, rank, optimizer, name, quantity, value, digest.

    Args:
        run: Folder of the recording.
        to: File to write, named .csv or .jsonl (an object a line).
    """
    return _import("megaopt.commands.export", "export")(run, to)


def golden(
    action: Literal["make", "check", "update"],
    file: Path,
    run: Path,
    /,
    *,
    because: str = "",
    megatron: bool = False,
    github: bool = False,
) -> int:
    """Keep what a recorded run gave in a small file, and hold other runs to it.

    Args:
        action: make the file, check a run against it, or update the entry of this environment.
        file: JSON file of golden values.
        run: Folder of the recording.
        because: Why the values may change; update asks for it.
        megatron: The file is one of Megatron-LM's functional tests.
        github: Print an annotation for GitHub's pull requests too.
    """
    main = _import("megaopt.commands.compared", "golden")
    return main(action, file, run, because, megatron, github)


def bisect(good: Path, bad: Path, command: tuple[str, ...], /) -> int:
    """Tell `git bisect run` if a command trains as it did: 0 good, 1 bad, 125 skip, 128 stop.

    What cannot be done here ends the whole bisect, by 128: git takes 2 for a bad commit.

    Args:
        good: Folder of a recording of the good commit.
        bad: Folder of a recording of the bad one.
        command: What trains, after "--"; it is recorded, and ended where the two recordings part.
    """
    return _import("megaopt.commands.bisect", "bisect")(good, bad, command)


def replay(
    run: Path, /, *, step: int, rank: int = 0, backend: Literal["triton", "cpu", "torch"] = "torch"
) -> int:
    """Take a step that a recording kept again, here, and compare the bits.

    Args:
        run: Folder of the recording.
        step: Which step; --keep of `megaopt record` chose those that are kept.
        rank: Whose tensors.
        backend: torch: the recorded optimizer, on the CPU; cpu, triton: megaopt's own, by that
            backend.
    """
    return _load("megaopt.commands.compared", "replay")(run, step, rank, backend)


def galore_test(
    *,
    kernel: str = "hybrid",
    M: int = 4096,
    N: int = 4096,
    rank: int = 128,
    weights: str = "float32",
    precision: str = "ieee",
    proj_type: str = "std",
    seed: int = 0,
    tf32: bool = False,
    allow_tf32: bool = False,
    verbose: bool = False,
) -> int:
    """Step a random matrix with GaLoreAdamW; compare its errors against fp64 with torch's own.

    Args:
        kernel: torch, compiled, hybrid or grouped; the last two run slowly without a GPU.
        M: Rows.
        N: Columns.
        rank: Of the projection; with rank * (M + N) < M * N.
        weights: float32, or bfloat16 with fp32 masters and bf16 gradients.
        precision: Of the two products: ieee, tf32 or bf16.
        proj_type: Side of the projection: std, reverse_std, right, left or auto.
        seed: Of weight, gradients and first projection.
        tf32: As precision tf32, and refused beside another but ieee, the default.
        allow_tf32: The same.
        verbose: Also print the largest errors, and where they are.
    """
    main = _load("megaopt.commands.galore.check", "main")
    from megaopt.commands.galore.errors import Setup
    from megaopt.commands.toml_tables import require

    if tf32 or allow_tf32:
        name = "--tf32" if tf32 else "--allow_tf32"
        require(precision in ("ieee", "tf32"), "precision", precision, f"'tf32' beside {name}")
        precision = "tf32"
    setup = Setup(
        kernel=kernel, rows=M, columns=N, rank=rank, weights=weights, precision=precision,
        proj_type=proj_type, seed=seed,
    )  # fmt: skip
    return main(setup, verbose)


def galore_bench(
    *,
    M: int = 4096,
    N: tuple[int, ...] = (4096, 11008),
    ranks: tuple[int, ...] = (32, 64, 128, 256, 512),
    kernels: tuple[str, ...] = ("torch", "compiled", "hybrid", "grouped"),
    weights: tuple[str, ...] = ("float32", "bfloat16"),
    precisions: tuple[str, ...] = ("ieee", "tf32", "bf16"),
    matrices: tuple[int, ...] = (1,),
    allow_tf32: bool = False,
    out: Path = Path("out/galore"),
) -> int:
    """Time GaLoreAdamW's step without a refresh, against a copy of the bytes that it must move.

    Args:
        M: Rows.
        N: Columns, of one shape each.
        ranks: Of the projections.
        kernels: torch, compiled, hybrid, grouped.
        weights: float32, bfloat16 (with fp32 masters and bf16 gradients).
        precisions: Of the two products: ieee, tf32, bf16.
        matrices: How many of a shape are stepped together.
        allow_tf32: As precisions tf32 alone.
        out: Folder for the record and the picture.
    """
    if allow_tf32:
        precisions = ("tf32",)
    main = _load("megaopt.commands.galore.bench", "main")
    shapes = [(M, columns) for columns in N]
    return main(out, shapes, ranks, kernels, weights, precisions, matrices)


def choose_triton_mode() -> None:
    """Where there is no GPU, runs Triton's kernels on its interpreter.

    Triton reads the variable when it compiles a kernel's definition: to be called before anything
    imports megaopt.kernels.
    """
    import torch

    if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _load(module: str, name: str) -> Callable[..., int]:
    """A command, from its module. Until it is imported Ctrl-C ends the process at once."""
    choose_triton_mode()
    return _import(module, name)


def _import(module: str, name: str) -> Callable[..., int]:
    """A command that needs no kernels."""
    loaded: Callable[..., int] = getattr(importlib.import_module(module), name)
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return loaded


def _leave(*_: object) -> None:
    """Ends the process: for while modules are imported, when there is nothing to undo."""
    # a KeyboardInterrupt would be lost in some: extensions print it, or make an ImportError of it
    os.write(2, b"megaopt: interrupted\n")
    os._exit(exits.INTERRUPTED)


def _galore() -> Callable[..., int]:
    """A command of two commands."""
    from tyro import conf

    test = conf.subcommand("test", constructor=galore_test)
    bench = conf.subcommand("bench", constructor=galore_bench)
    # to mypy they are types, which cannot be applied to what is made at run time
    whole: Any = conf.OmitArgPrefixes
    short: Any = conf.OmitSubcommandPrefixes

    def galore(command: Any) -> int:
        """Check GaLoreAdamW's step of a matrix (test, --mode=test), or time it (bench)."""
        status: int = command
        return status

    either: Any = Union[Annotated[Any, test], Annotated[Any, bench]]  # noqa: UP007 made at run time
    galore.__annotations__["command"] = whole[short[either]]
    return galore


MODES = {"test": "test", "benchmark": "bench"}
"""The commands of `megaopt galore`, by --mode as GaLore's pull request has it."""


def _by_mode(arguments: Sequence[str]) -> list[str]:
    """`galore --mode=test ...` as `galore test ...`; other arguments as they are."""
    found = list(arguments)
    place = next((i for i, each in enumerate(found) if each.partition("=")[0] == "--mode"), None)
    if place is None:
        return found
    from megaopt.commands.toml_tables import ConfigError, require

    if found[0] != "galore":
        raise ConfigError("--mode is of `megaopt galore` alone, as `megaopt galore --mode=test`")
    _, equals, mode = found.pop(place).partition("=")
    if not equals and place < len(found):
        mode = found.pop(place)
    require(mode in MODES, "mode", mode, f"one of {', '.join(MODES)}")
    return ["galore", MODES[mode], *found[1:]]


def _dispatch(arguments: Sequence[str] | None) -> int:
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"megaopt {megaopt.__version__}")
        return exits.DONE
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(f"megaopt needs {names}: pip install 'megaopt[cli]'", file=sys.stderr)
        return exits.REFUSED
    import tyro

    commands: dict[str, Callable[..., int]] = {
        "regress": regress,
        "train": train,
        "bench": bench,
        "doctor": doctor,
        "verify": verify,
        "audit": audit,
        "record": record,
        "diff": diff,
        "export": export,
        "golden": golden,
        "bisect": bisect,
        "replay": replay,
        "galore": _galore(),
    }
    given = _by_mode(sys.argv[1:] if arguments is None else arguments)
    status: int = tyro.extras.subcommand_cli_from_dict(
        commands, prog="megaopt", description=DESCRIPTION, args=given
    )
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: those of the process by default, which then ends with the command: Ctrl-C is not
            heard any more afterwards.

    Returns:
        The exit status. Whatever happens is told in words on stderr, without a traceback.
    """
    owns_process = arguments is None
    if owns_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        return exits.run(lambda: _dispatch(arguments))
    finally:
        if owns_process:
            # what Python does on leaving takes a while, and would show where it was broken off
            signal.signal(signal.SIGINT, signal.SIG_IGN)
