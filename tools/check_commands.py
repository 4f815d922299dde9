"""Runs the commands that README, the documentation and the examples print, as they are printed.

    python tools/check_commands.py [--list] [PATTERN]

Each in a copy of the tracked files, with this Python's folder first on PATH, as in `make shell`:
the Python of an environment that has the built wheel shows that the wheel alone does.
A command that cannot run here (a GPU, a package that is absent, a download) is named with its
reason. PATTERN chooses commands in which it occurs. Exit status 1 where one failed. Ten minutes.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/*.md", "docs/how-to/*.md", "docs/benchmarks/*.md", "examples/*.md")
PAGES += ("CONTRIBUTING.md",)
COPIED = ("configs", "docs", "examples", "tools", "Makefile", "mkdocs.yml", "README.md")
NAMES = r"(?:make|megaopt|python|torchrun|pip|git|pytest|APEX_\w+=1)"
COMMAND = re.compile(rf"^    (?:\.venv/bin/)?({NAMES} [a-z\d.-].*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:make|megaopt|python|pytest) [a-z\d.-][^`\n]*)`")
DRAWING = re.compile(r"^megaopt\.?\w* +(?:-->|what )")
"""A line of a list of folders or of a drawing."""
ELSEWHERE = {
    r"git bisect start|--golden-update": "of a repository of the reader's",
    r"\.\.\.": "not whole: other arguments go in",
    r" bench\b|test-gpu|-m gpu": "needs a GPU",
    r"--M=4096": "needs a GPU: on Triton's interpreter it takes too long",
    r"gpt_124m": "needs a GPU",
    r"_[12]b?_?2gpu|_2gpu": "needs two GPUs",
    r"git clone|apex|APEX": "needs the CUDA toolkit",
    r"pip install": "tools/check_package.py installs the wheel",
    r"^megaopt regress$": "make regress does",
    r"configs/gpt_tiny_fp8": "the same as megaopt regress gpt_tiny_fp8",
    r"runs/|megaopt record": "of a training script of the reader's",
    r"make (test|check|package|lint|types|docs)": "CI runs it",
    r"make shell": "opens a shell",
    r"--write|--record": "writes files of the repository anew",
    r"galore test$": "a name: it asks for a matrix",
    r"gpu_compiler": "a test runs it",
}
"""Patterns of commands, and why they are not run."""
DIFFERS = "--perturb"
"""In a command that is to end with 1."""
NEEDED = {"deepspeed": "deepspeed", "hugging_face": "transformers", "lightning": "lightning"}
NEEDED |= {
    "accelerate": "accelerate",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "--kernel": "triton",
}
"""Parts of commands, and the package that each needs."""


def commands() -> dict[str, str]:
    """Those of all pages, in order, each once, and the first page that has it."""
    found: dict[str, str] = {}
    for pattern in PAGES:
        for path in sorted(REPOSITORY.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            for printed in [*COMMAND.findall(text), *INLINE.findall(text)]:
                command = re.split(r"\s+#", printed)[0].strip()
                if not DRAWING.match(command):
                    found.setdefault(command, path.relative_to(REPOSITORY).as_posix())
    return found


def why_not(command: str) -> str | None:
    """Why a command is not run here; None where it is."""
    for pattern, reason in ELSEWHERE.items():
        if re.search(pattern, command):
            return reason
    for part, package in NEEDED.items():
        if part in command and importlib.util.find_spec(package) is None:
            return f"needs {package}"
    return None


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the copy."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "2"}
    if command.startswith("make "):  # with this Python, where it would set one up
        command += f" PY={sys.executable}"
    command = command.replace("torchrun ", f"{sys.executable} -m torch.distributed.run ")
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, text=True, capture_output=True
    )


def main() -> int:
    """Run them; print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = {each: page for each, page in commands().items() if options.pattern in each}
    reasons = {each: "listed" if options.list else why_not(each) for each in chosen}
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in (REPOSITORY / name for name in COPIED):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
        for command, page in chosen.items():
            if reasons[command] is None and not passes(command, page, folder):
                failed.append(command)
    for command, reason in reasons.items():
        if reason is not None:
            print(f"not run ({reason}), {chosen[command]}: {command}")
    left_out = sum(reason is not None for reason in reasons.values())
    print(f"{len(chosen) - left_out} run, {len(failed)} of them failed; {left_out} not run")
    return 1 if failed else 0


def passes(command: str, page: str, folder: Path) -> bool:
    """Run a command; print a line, and what it printed where it failed."""
    begin = time.monotonic()
    done = run(command, folder)
    took = f"{time.monotonic() - begin:.0f} s"
    good = done.returncode == (1 if DIFFERS in command else 0)
    print(f"{'ok' if good else 'FAILED'} ({took}), {page}: {command}", flush=True)
    if not good:
        print(done.stdout[-1000:], done.stderr[-1000:], sep="\n")
    return good


if __name__ == "__main__":
    sys.exit(main())
