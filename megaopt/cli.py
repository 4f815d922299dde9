"""The command line: `megaopt regress`, `train`, `bench`, `doctor` and `verify`.

Exit status: 0 identical, or done; 1 different; 2 bad input, or the run could not be made.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

TOML_PACKAGES = () if sys.version_info >= (3, 11) else ("tomli",)
PACKAGES = ("tyro", "rich", "matplotlib", *TOML_PACKAGES)
BAD_INPUT = 2


def regress(config: Path, /, *, perturb: int | None = None, out: Path = Path("out")) -> int:
    """Train the variants that a config names on the same data; compare them bit for bit.

    Args:
        config: TOML file of the run, configs/gpt_tiny.toml for one.
        perturb: Flip the lowest bit of one master after this step, to see a difference caught.
        out: Folder for the record and the picture; the run gets a folder of its name in it.
    """
    from megaopt.regression.command import regress as run

    return run(config, out, perturb)


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
    """Train one variant of a config.

    Args:
        config: TOML file of the run.
        variant: Name of the variant; the config's first fused variant by default.
        steps: Last step, counted from the run's beginning; the config's by default.
        save: Write a checkpoint here at the end.
        resume: Continue from this checkpoint.
        result: Write the losses trained here, the final weights and the state to this file.
    """
    from megaopt.regression.single import train as run

    return run(config, variant=variant, steps=steps, save=save, resume=resume, result=result)


def bench(
    *,
    out: Path = Path("out/bench"),
    sets: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    peers: bool = True,
) -> int:
    """Time the optimizer step, and other libraries' beside it, against a copy of the same bytes.

    Args:
        out: Folder for the record and the pictures.
        sets: Names of the sets of tensors to time; all by default.
        only: Names of the optimizer forms to time, ours with their peers; all by default.
        peers: Time the other libraries' optimizers that are installed.
    """
    from megaopt.bench import main as run

    return run(out, sets, only, peers)


def doctor(*, check: bool = False) -> int:
    """Show what is installed, and which backends and contracts work here.

    Args:
        check: Also step beside the installed peers whose bits a contract promises, and compare.
    """
    from megaopt.doctor import main as run

    return run(check)


def verify(
    *, record: Path | None = None, only: tuple[str, ...] = (), backends: tuple[str, ...] = ()
) -> int:
    """Step the cases of the golden record with every backend that works here; compare their bits.

    Args:
        record: Write the record anew to this file, and compare nothing.
        only: Names of the cases to check, or patterns of them; all by default.
        backends: Names of the backends to check; all by default.
    """
    from megaopt.golden.command import verify as run

    return run(record, only, backends)


def choose_triton_mode() -> None:
    """Where there is no GPU, runs Triton's kernels on its interpreter.

    Triton reads the variable when it compiles a kernel's definition: to be called before anything
    imports megaopt.kernels.
    """
    if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _dispatch(arguments: Sequence[str] | None) -> int:
    import tyro

    commands: dict[str, Callable[..., int]] = {
        "regress": regress,
        "train": train,
        "bench": bench,
        "doctor": doctor,
        "verify": verify,
    }
    status: int = tyro.extras.subcommand_cli_from_dict(commands, prog="megaopt", args=arguments)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: those of the process by default.

    Returns:
        The exit status; bad input is told on stderr, without a traceback.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(f"megaopt needs {names}: pip install 'megaopt[cli]'", file=sys.stderr)
        return BAD_INPUT
    choose_triton_mode()
    from megaopt.checkpoint import CheckpointError
    from megaopt.config import ConfigError
    from megaopt.regression.crew import RankError
    from megaopt.regression.resume import ResumeError
    from megaopt.training.text import CorpusError

    try:
        return _dispatch(arguments)
    except SystemExit as leaving:
        # tyro's way to end: 0 after --help, 2 after an argument that it refuses
        return leaving.code if isinstance(leaving.code, int) else BAD_INPUT
    except (ConfigError, CheckpointError, CorpusError, RankError, ResumeError, OSError) as error:
        print(f"megaopt: {error}", file=sys.stderr)
        return BAD_INPUT
