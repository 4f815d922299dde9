"""The extension is built aside, once on a machine, and where it cannot be nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megaopt import FusedAdam
from megaopt.kernels import native
from megaopt.step import batch

# Compiled in a moment: what becomes of a build does not depend on what is built.
SMALL = """
#include <Python.h>
#define JOIN(a, b) a##b
#define INIT(name) JOIN(PyInit_, name)
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", 42);
  return module;
}
"""
# Says that it was called, and waits until it may go on.
COMPILER = """#!/bin/sh
case "$*" in
  *small.cpp*) echo "$*" >> {folder}/calls; while [ ! -e {folder}/go ]; do sleep 0.1; done;;
esac
exec c++ "$@"
"""
WAIT = """
import json, os, sys, pathlib
from megaopt.kernels import native
extension = native.Extension(*map(pathlib.Path, sys.argv[1:]))
module = extension.wait()
with open(f"{sys.argv[1]}.{os.getpid()}.said", "w") as file:
    json.dump([getattr(module, "answer", None), extension.reason], file)
"""


class Site:
    """A cache of its own, a small source, and a compiler that can be held up."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir()
        self.file, self.source = self.cache / "megaopt_small.so", folder / "small.cpp"
        self.source.write_text(SMALL)
        compiler = folder / "compiler"
        compiler.write_text(COMPILER.format(folder=folder))
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def extension(self):
        return native.Extension(self.file, self.source)

    def start(self):
        command = [sys.executable, "-c", WAIT, str(self.file), str(self.source)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def let_go(self):
        (self.folder / "go").touch()

    def calls(self):
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def left(self):
        return sorted(path.name for path in self.cache.iterdir())

    def answers(self):
        return [json.loads(path.read_text()) for path in self.cache.glob("*.said")]


@pytest.fixture
def site(tmp_path, monkeypatch):
    if subprocess.run(["c++", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no C++ compiler here")
    return Site(tmp_path, monkeypatch)


def until(holds, seconds=300):
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_nobody_waits_for_a_build_and_it_is_loaded_when_it_is_there(site):
    extension = site.extension()
    assert extension.get(is_worth_building=True) is None
    until(site.calls)
    assert extension.get(is_worth_building=True) is None
    assert extension.reason is None
    site.let_go()
    assert extension.wait().answer == 42
    assert extension.get(is_worth_building=False).answer == 42
    until(lambda: site.left() == ["megaopt_small.so"])  # its lock goes after the file is there


def test_it_is_not_built_where_that_is_not_worth_it_but_loaded(site):
    site.let_go()
    extension = site.extension()
    assert extension.get(is_worth_building=False) is None
    assert site.left() == []
    assert site.extension().wait().answer == 42
    assert site.extension().get(is_worth_building=False).answer == 42
    assert len(site.calls()) == 1


@pytest.mark.slow
def test_processes_that_begin_together_build_once(site):
    processes = [site.start() for _ in range(3)]
    until(site.calls)
    site.let_go()
    assert [process.communicate()[0] for process in processes] == [b""] * 3
    assert site.answers() == [[42, None]] * 3
    assert len(site.calls()) == 1
    until(lambda: [name for name in site.left() if "said" not in name] == ["megaopt_small.so"])


def test_a_build_that_fails_says_why_and_leaves_no_trace(site, capfd):
    site.source.write_text("#error no luck today")
    site.let_go()
    extension = site.extension()
    assert extension.wait() is None
    assert "no luck today" in extension.reason
    assert site.left() == []
    assert capfd.readouterr() == ("", "")


def test_without_a_compiler_there_is_a_reason(site, monkeypatch):
    monkeypatch.setenv("CXX", str(site.folder / "nothing"))
    extension = site.extension()
    assert extension.wait() is None
    assert "nothing" in extension.reason
    assert site.left() == []


def test_a_cache_that_cannot_be_written_is_a_reason(site):
    (site.cache / "file").touch()
    extension = native.Extension(site.cache / "file" / "megaopt_small.so", site.source)
    assert extension.get(is_worth_building=True) is None
    assert "NotADirectoryError" in extension.reason or "FileExistsError" in extension.reason


def test_a_file_that_is_no_extension_is_a_reason(site):
    site.file.write_text("no library")
    extension = site.extension()
    assert extension.get(is_worth_building=True) is None
    assert "ImportError" in extension.reason


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_another_process_builds_where_a_builder_was_ended(site, by):
    process = site.start()
    until(site.calls)
    builders = [line.split("(")[0] for line in _children_of(process.pid)]
    assert len(builders) == 1
    os.kill(int(builders[0]), by)
    process.communicate()
    ((answer, reason),) = site.answers()
    assert answer is None
    assert reason
    site.let_go()
    assert site.extension().wait().answer == 42


def _children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_switched_off_nothing_is_built_or_loaded(site, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(site.cache))
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.get(is_worth_building=True) is None
    assert site.left() == []
    assert native.status() == "off: MEGAOPT_NATIVE=0"


def test_a_fork_has_an_extension_of_its_own():
    own, (reading, writing) = native.extension(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"other" if native.extension() is not own else b"same!")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 5) == b"other"
    assert native.extension() is own
    os.close(reading)
    os.close(writing)


# --- in the middle of a training


def trained(monkeypatch, find):
    """Weights and masters after each step; gradients move, one weight does, one is written."""
    monkeypatch.setattr(native, "get", lambda worth: find())
    generator = torch.Generator().manual_seed(1)
    params = [
        torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16())
        for size in (3, 600, 0, 16)
    ]
    optimizer = FusedAdam(params, lr=0.1, dtype=torch.float32, on_external_write="refresh")
    found = []
    for step in range(8):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        if step % 3 == 2:
            params[1].data = params[1].data.clone()
        if step % 2 == 1:
            with torch.no_grad():
                params[3].fill_(step)
        optimizer.step()
        found += [p.detach().clone() for p in params]
        found += [optimizer.state[p]["master_param"].clone() for p in params]
        found += [torch.tensor([p._version for p in params])]
    return found


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer")
@pytest.mark.parametrize("first", [1, 2, 5, 9])
def test_steps_are_the_same_when_the_extension_arrives_in_between(monkeypatch, first):
    """Each step asks for it where it is worth building."""
    monkeypatch.setattr(batch, "is_worth_building", lambda params: True)
    module, why_not = native.build()
    if module is None:
        pytest.skip(f"the extension cannot be built here: {why_not}")
    asked = []

    def find():
        asked.append(None)
        return module if len(asked) >= first else None

    pairs = zip(trained(monkeypatch, find), trained(monkeypatch, lambda: None), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert len(asked) >= min(first, 8)
