"""Ctrl-C at any moment: exit status 130, one line on stderr, no process and no file left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_runs import UNFUSED, fused, tiny_run, variant

from megaopt.lab.regression.regression import is_installed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT to send")

ENDLESS = tiny_run(1_000_000) + UNFUSED
# what is resumed begins when its beginning has ended, and ranks when there is a core for each:
# these steps take them some 20 s on two cores, and the interrupts below come within 3 s
LONG = 2000
CONFIGS = {
    "plain": ENDLESS + fused(),
    "ranks": tiny_run(500) + UNFUSED + fused(ranks=2),
    "resumed": tiny_run(LONG) + UNFUSED + fused(resume_after=1),
    "megatron": tiny_run(1_000_000, megatron="ranks = 2\nmicro_batch_size = 1")
    + variant("stock", "stock", inner="unfused"),
}
PATIENCE = 300
MARK = "MEGAOPT_TEST_OF_INTERRUPTS"


class Command:
    """A command in a process group of its own, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.scratch, self.mark = folder / "scratch", str(folder)
        self.scratch.mkdir()
        environment = {**os.environ, "TMPDIR": str(self.scratch), MARK: self.mark}
        environment.pop("MEGAOPT_DEBUG", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megaopt", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, moment):
        """Until moment(self) holds."""
        last = time.monotonic() + PATIENCE
        while not moment(self):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < last, "the moment did not come"
            time.sleep(0.05)

    def interrupt(self, group: bool):
        """As a terminal does, all processes; or, as a scheduler may, the command alone."""
        send = os.killpg if group else os.kill
        send(self.process.pid, signal.SIGINT)

    def left(self):
        """The command's processes that still run, by the environment that they inherit."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append((process.pid, process.status(), process.cmdline()))
            except psutil.Error:
                continue
        return found

    def end(self):
        """Exit status and stderr; what is left is ended, and told."""
        _, err = self.process.communicate(timeout=PATIENCE)
        last = time.monotonic() + 10
        while self.left() and time.monotonic() < last:
            time.sleep(0.05)  # a process that was killed takes a moment
        left = self.left()
        for pid, _, _ in left:
            os.kill(pid, signal.SIGKILL)
        return self.process.returncode, err, left


@pytest.fixture
def start(tmp_path, hears_interrupts):
    commands = []

    def start(name, *arguments):
        path = tmp_path / f"{name}.toml"
        path.write_text(CONFIGS[name], encoding="utf-8")
        commands.append(Command(tmp_path, *(arguments or ("regress", str(path)))))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.communicate()


def assert_interrupted(command):
    status, err, left = command.end()
    assert (status, err, left) == (130, "megaopt: interrupted\n", [])
    # torch's compiler makes its cache's folder when it is imported
    kept = [path for path in command.scratch.iterdir() if "torchinductor" not in path.name]
    assert kept == []


def found(pattern):
    return lambda command: next(command.scratch.rglob(pattern), None) is not None


def imports_torch(command):
    """Whether the command's own code has begun; before, it is Python's start that is broken off."""
    try:
        maps = psutil.Process(command.process.pid).memory_maps()
    except psutil.Error:
        return False
    return any("libtorch" in each.path for each in maps)


# a file that is there once what is meant has begun
MOMENTS = {"plain": "tmp*", "ranks": "fused.meeting", "resumed": "fused-rank0.log"}
MOMENTS |= {"megatron": "stock-rank1.log"} if is_installed("megatron.core") else {}


def interrupt(command, moment, later=0.0, group=False):
    command.wait_for(moment)
    time.sleep(later)
    command.interrupt(group)
    assert_interrupted(command)


@pytest.mark.parametrize("name", ["plain", pytest.param("ranks", marks=pytest.mark.slow)])
def test_an_interrupted_run_leaves_nothing(start, name):
    """The command alone is interrupted, and ends its ranks; the other kinds of runs are below."""
    interrupt(start(name), found(MOMENTS[name]))


def test_an_interrupt_while_modules_are_imported(start):
    interrupt(start("plain"), imports_torch)


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize(("group", "later"), [(True, 0.3), (False, 3.0)])
@pytest.mark.parametrize("name", MOMENTS)
def test_every_part_of_a_run_may_be_interrupted(start, name, group, later):
    interrupt(start(name), found(MOMENTS[name]), later, group)


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize("seed", range(6))
def test_any_moment_will_do(start, seed):
    rng = random.Random(seed)
    command = start(("plain", "ranks", "resumed")[seed % 3])
    interrupt(command, imports_torch, rng.uniform(0, 8), rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize(
    ("arguments", "later"), [(("doctor",), 2.0), (("doctor", "--check"), 4.0), (("bench",), 0.0)]
)
def test_other_commands_may_be_interrupted(start, arguments, later):
    command = start("plain", *arguments)
    command.wait_for(imports_torch)
    time.sleep(later)
    if command.process.poll() is None:
        command.interrupt(group=True)
    status, err, left = command.end()
    no_gpu = "megaopt: bench cannot run here: needs a CUDA GPU"
    assert (status, err) in [(130, "megaopt: interrupted\n"), (0, "")] or no_gpu in err
    assert left == []
