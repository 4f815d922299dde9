"""The command line: a table of commands, whose modules are imported when they are called.

Exit status: 0 done, and nothing differs; 1 a difference, or a check that failed; 2 bad input, what
cannot be done here, or a file that cannot be written; 130 Ctrl-C. MEGAOPT_DEBUG=1 shows the
traceback of an error. This module imports little: Ctrl-C is heard from its `main` on.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Annotated, NamedTuple, get_args, get_type_hints

import megaopt
from megaopt.lab import exits

TOML_PACKAGES = () if sys.version_info >= (3, 11) else ("tomli",)
PACKAGES = ("tyro", "rich", "matplotlib", "pydantic", *TOML_PACKAGES)

DESCRIPTION = (
    "Fused optimizers with the same bits everywhere. --version shows the version; COMMAND --help "
    "what a command takes."
)


class Command(NamedTuple):
    """The place of a command's function, whose arguments and help are the command's."""

    module: str
    """Below megaopt.lab."""
    function: str
    line: str
    """The description in the list of commands."""
    interprets: bool = True
    """Whether kernels run on Triton's interpreter where there is no GPU."""


COMMANDS = {
    "regress": Command(
        "regression.command", "regress", "Compare training runs of a config in bits."
    ),
    "train": Command("regression.single", "train", "Train one variant of a config."),
    "bench": Command("bench.command", "main", "Time the optimizer step on a CUDA GPU."),
    "doctor": Command("doctor", "main", "Show what is installed, and what works here."),
    "verify": Command("golden.check", "verify", "Compare steps with the golden record.", False),
    "audit": Command("audit", "audit", "Hold a recording to the laws of its optimizers."),
    "record": Command("record", "record", "Run a command; record its optimizers' steps.", False),
    "diff": Command("compared", "diff", "Compare two recordings; say who is to blame.", False),
    "export": Command("export", "export", "Write a recording as a table.", False),
    "golden": Command("compared", "golden", "Hold recordings to a file of golden values.", False),
    "bisect": Command("bisect", "bisect", "Judge a commit for `git bisect run`.", False),
    "replay": Command("compared", "replay", "Take a step that a recording kept again."),
    "galore test": Command("galore.check", "main", "Check GaLoreAdamW's step of a matrix."),
    "galore bench": Command("galore.bench", "main", "Time GaLoreAdamW's step."),
    "muon test": Command("muon.check", "main", "Check FusedMuon's updates of matrices."),
    "muon bench": Command("muon.bench", "main", "Time FusedMuon's step, and other Muons'."),
    "ranks bench": Command("ranks.bench", "main", "Time steps over several cards, and on one."),
}


def _load(command: Command) -> Callable[..., int]:
    """A command's function. Until its module is imported Ctrl-C ends the process at once."""
    if command.interprets:
        # Triton reads the variable when it compiles a kernel's definition: it is set before
        # anything imports megaopt.kernels
        import torch

        if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
            os.environ.setdefault("TRITON_INTERPRET", "1")
    module = importlib.import_module(f"megaopt.lab.{command.module}")
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    function: Callable[..., int] = getattr(module, command.function)
    return function


def _leave(*_: object) -> None:
    """Ends the process; used while modules are imported, when there is nothing to undo."""
    # a KeyboardInterrupt would be lost in some: extensions print it, or make an ImportError of it
    os.write(2, b"megaopt: interrupted\n")
    os._exit(exits.INTERRUPTED)


MODES = {"test": "test", "benchmark": "bench"}
"""The commands of `megaopt galore`, by --mode as GaLore's pull request has it."""


def _dispatch(arguments: Sequence[str]) -> int:
    """Runs the command that arguments name; shows what there are where they name none."""
    if list(arguments) == ["--version"]:
        print(f"megaopt {megaopt.__version__}")
        return exits.DONE
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        names = ", ".join(missing)
        print(f"megaopt needs {names}: {exits.how_to_install('cli')}", file=sys.stderr)
        return exits.REFUSED
    import tyro

    from megaopt.lab.toml_tables import ConfigError, require

    argv = list(arguments)
    # `galore --mode=test ...` is `galore test ...`
    place = next((i for i, word in enumerate(argv) if word.partition("=")[0] == "--mode"), None)
    if place is not None and argv[0] == "galore":
        _, equals, mode = argv.pop(place).partition("=")
        if not equals and place < len(argv):
            mode = argv.pop(place)
        require(mode in MODES, "mode", mode, f"one of {', '.join(MODES)}")
        argv[:1] = ["galore", MODES[mode]]
    # what a command that runs another runs
    runs_another = argv[:1] in (["record"], ["bisect"]) and not {"-h", "--help"} & {*argv}
    if runs_another and "--" not in argv[:-1]:
        words = shlex.join(argv[1:]) or "nothing"
        raise ConfigError(f"command must stand behind --, as in -- python train.py, got {words}")
    count = 2 if argv[:1] in (["galore"], ["muon"], ["ranks"]) else 1
    name = " ".join(argv[:count])
    if name not in COMMANDS:
        lines: dict[str, Callable[[], int]] = {}
        for key, command in COMMANDS.items():
            lines[key] = lambda: exits.REFUSED
            lines[key].__doc__ = command.line
        # it shows the list, or says what is wrong
        return tyro.extras.subcommand_cli_from_dict(
            lines, prog="megaopt", description=DESCRIPTION, args=argv
        )
    function = _load(COMMANDS[name])
    # --help writes `--steps INT` of what may be left out, and not `--steps {None}|INT`
    for key, hint in get_type_hints(function, include_extras=True).items():
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if isinstance(hint, UnionType) and len(kinds) < len(get_args(hint)):
            metavar = "|".join(kind.__name__.upper() for kind in kinds)
            shown = tyro.conf.arg(metavar=metavar, help_behavior_hint="")
            function.__annotations__[key] = Annotated[hint, shown]
    return tyro.cli(function, prog=f"megaopt {name}", args=argv[count:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: those of the process by default, which then ends with the command: Ctrl-C is not
            heard any more afterwards.

    Returns:
        The exit status. Whatever happens is told in words on stderr, without a traceback.
    """
    owns_process, argv = arguments is None, sys.argv[1:] if arguments is None else arguments
    if owns_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        status = exits.run(lambda: _dispatch(argv))
        is_bisect = argv[:1] == ["bisect"]
        return exits.STOP if is_bisect and status == exits.REFUSED else status
    finally:
        if owns_process:
            # what Python does on leaving takes a while, and would show where it was broken off
            signal.signal(signal.SIGINT, signal.SIG_IGN)
