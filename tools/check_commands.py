"""Runs the commands that README, the guides and the examples print, as they are printed.

    python tools/check_commands.py [--list] [PATTERN]

Each in a copy of the tracked files, with this Python's folder first on PATH, as in `make shell`.
A command that cannot run here (a GPU, a package that is absent, a download) is named with its
reason. PATTERN chooses commands in which it occurs. Exit status 1 where one failed. Some minutes.
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
PAGES = ("README.md", "docs/faq.md", "docs/how-to/*.md", "examples/README.md")
NAMES = r"(?:make|megaopt|python|torchrun|pip|git|APEX_\w+=1)"
COMMAND = re.compile(rf"^    ({NAMES} .+)$", re.MULTILINE)
INLINE = re.compile(r"`(megaopt (?:doctor|verify|regress|train|bench|galore)\b[^`\n]*)`")
ELSEWHERE = {
    "bench": "needs a GPU",
    "--M=4096": "needs a GPU: on Triton's interpreter it takes too long",
    "git clone": "needs the CUDA toolkit",
    "gpt_124m": "needs a GPU",
    "_2gpu": "needs GPUs",
    "apex": "needs the CUDA toolkit",
    "APEX": "needs the CUDA toolkit",
    "pip install": "tools/check_package.py installs the wheel",
    "make test": "CI runs it",
    "CONFIG": "a stand-in for a file's name",
    "NAME": "a stand-in for a file's name",
}
"""Parts of commands, and why they are not run."""
DIFFERS = "--perturb"
"""In a command that is to end with 1."""
NEEDED = {"deepspeed": "deepspeed", "hugging_face": "transformers", "lightning": "lightning"}
NEEDED |= {"torchtitan": "torchtitan", "megatron": "megatron", "--kernel": "triton"}
"""Parts of commands, and the package that each needs."""


def commands() -> list[str]:
    """Those of all pages, in order, each once."""
    found: dict[str, None] = {}
    for pattern in PAGES:
        for path in sorted(REPOSITORY.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            for command in [*COMMAND.findall(text), *INLINE.findall(text)]:
                found[re.split(r"\s+#", command)[0].strip()] = None
    return list(found)


def why_not(command: str) -> str | None:
    """Why a command is not run here; None where it is."""
    for part, reason in ELSEWHERE.items():
        if part in command:
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
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = ("configs", "docs", "examples", "Makefile", "mkdocs.yml", "README.md")
        for path in (REPOSITORY / name for name in names):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
        for command in (each for each in commands() if options.pattern in each):
            reason = "listed" if options.list else why_not(command)
            if reason is not None:
                print(f"not run ({reason}): {command}", flush=True)
                continue
            begin = time.monotonic()
            done = run(command, folder)
            took = f"{time.monotonic() - begin:.0f} s"
            good = done.returncode == (1 if DIFFERS in command else 0)
            print(f"{'ok' if good else 'FAILED'} ({took}): {command}", flush=True)
            if not good:
                failed.append(command)
                print(done.stdout[-1000:], done.stderr[-1000:], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
