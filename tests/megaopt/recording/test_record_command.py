"""`megaopt record` records scripts that know nothing of it, and ends as they end."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from megaopt.lab import cli
from megaopt.recording.files import Recording

SCRIPT = """
import os, sys, time
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, batch=None):
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch


def main():
    torch.manual_seed(0)
    model = Network()
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
    data = torch.arange(96.0).view(12, 8)
    for batch in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(batch=batch).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    print([float(p.sum()).hex() for p in model.parameters()], flush=True)
    while sys.argv[2] == "wait":
        time.sleep(0.1)
    sys.exit(int(sys.argv[2]))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has the script, and one that imports megaopt first; starts of Python are most of the time."""
    found = tmp_path_factory.mktemp("scripts")
    (found / "train.py").write_text(SCRIPT)
    (found / "ours.py").write_text(f"from megaopt import FusedAdam\n{SCRIPT}")
    return found


def command(*arguments):
    return [sys.executable, "-m", "megaopt", "record", *arguments]


def run(folder, *arguments, **more):
    done = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=120, **more
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def recorded(folder):
    """Runs a script alone, and recorded into "a" and, started in another way, "b"."""
    script = [sys.executable, "train.py", "0.01", "0"]
    level = ["--level", "blocks"]
    both = [script, command("--out", "a", *level, "--", *script)]
    (folder / "sitecustomize.py").write_text("print('the one that was there')")
    other = [sys.executable, "-m", "ours", "0.01", "7"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = [run(folder, *each) for each in both]
    done.append(run(folder, *command("--out", "b", *level, "--", *other), env=environment))
    return done, {name: Recording(folder / name) for name in "ab"}


def test_a_script_is_recorded_and_prints_what_it_did(recorded):
    (alone, beside, *_), found = recorded
    assert beside == alone
    found = found["a"]
    assert found.steps == [1, 2, 3]
    (optimizer,) = found.ranks[0].optimizers
    names = [f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    assert optimizer["groups"] == [names]
    assert optimizer["order"] == names
    assert optimizer["class"] == "torch.optim.adamw.AdamW"
    scalars = found.scalars(1)[0][0]
    assert len(scalars["batch"]) == len(scalars["losses"]) == 1
    assert scalars["grad_norm"] is not None
    assert {key[1:] for key in found.own(2)} == {
        (f"layers.{i}", way) for i in (0, 1) for way in ("forward", "backward")
    }


def test_python_m_of_a_script_that_imports_megaopt_first(recorded):
    (*_, (status, out, error)), found = recorded
    assert status == 7, error
    assert out.count("the one that was there") >= 1
    a, b = found.values()
    assert b.steps == [1, 2, 3]
    assert [a.digests(step) for step in a.steps] == [b.digests(step) for step in b.steps]


@pytest.mark.slow
def test_torchrun_records_each_rank(folder):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = [*launch, "--master-port", "29531", "train.py", "0.01", "0"]
    status, _, error = run(
        folder, *command("--out", "torchrun", "--level", "blocks", "--", *script)
    )
    assert status == 0, error
    found = Recording(folder / "torchrun")
    assert [rank.number for rank in found.ranks] == [0, 1]
    assert found.ranks[1].run["world"] == 2
    assert all(summed.replicas == () for summed in found.digests(3).values())
    assert (1, "layers.0.weight", "local grad") in found.own(1)


SWEEP = """
import torch, train


def main(number):
    train.main()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
"""


@pytest.mark.slow
def test_processes_that_are_no_ranks_are_told_what_to_do(folder):
    (folder / "sweep.py").write_text(SWEEP)
    script = [sys.executable, "sweep.py", "0.01", "0"]
    status, _, error = run(folder, *command("--out", "sweep", "--", *script))
    assert status == 1
    words = "where several such processes train, start each by a `megaopt record` of its own"
    assert words in error


def test_ctrl_c_reaches_the_script(folder, hears_interrupts):
    script = [sys.executable, "train.py", "0.01", "wait"]
    process = subprocess.Popen(
        command("--out", "interrupted", "--", *script),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 130, error
    assert "KeyboardInterrupt" in error
    assert error.splitlines()[-1] == "megaopt: interrupted; interrupted has the steps before"
    assert Recording(folder / "interrupted").steps == [1, 2, 3]


def test_what_cannot_be_recorded_is_refused(folder, recorded, capsys, monkeypatch):
    """In this process, since no other is started."""
    monkeypatch.chdir(folder)
    refused = {
        "--out a": "out must be a folder without a recording",
        "--out d --keep x": "keep must be steps from 1 on, as 100,200-210, got 'x'",
        "--out d --keep 0": "keep must be",
        "--out d --keep 5-2": "keep must be",
        "--out d --every 0": "every must be",
        "--out d --samples 0": "samples must be",
    }
    for options, words in refused.items():
        status = cli.main(["record", *options.split(), "--", sys.executable, "train.py"])
        assert (status, words in capsys.readouterr().err) == (2, True)
    status = cli.main(["record", "--out", "d", "python", "-c", "pass"])
    words = "command must stand behind --, as in -- python train.py, got --out d python -c pass"
    assert (status, capsys.readouterr().err) == (2, f"megaopt: {words}\n")
    (folder / "map.json").write_text("[1]")
    status = cli.main(["record", "--out", "d", "--map", "map.json", "--", "python", "train.py"])
    words = "map must be a dict of texts, as {'b': 'a'}, got 'map.json'"
    assert (status, capsys.readouterr().err) == (2, f"megaopt: {words}\n")
    assert not (folder / "d").exists()


def test_tensors_are_not_kept_without_safetensors(folder, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    hide = lambda name, *rest: None if name == "safetensors" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    monkeypatch.chdir(folder)
    assert cli.main(["record", "--out", "d", "--keep", "2", "--", sys.executable, "train.py"]) == 2
    words = (
        "megaopt: keep must be left out where safetensors is not installed (pip install 'megaopt"
        "[record] @ git+https://github.com/megaopt/megaopt'), got '2'\n"
    )
    assert capsys.readouterr() == ("", words)
    assert not (folder / "d").exists()
    assert cli.main(["replay", "d", "--step", "1"]) == 2
    assert (
        "replay needs safetensors: pip install 'megaopt[record] @ git+" in capsys.readouterr().err
    )


FULL = """
import resource
import train
resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, resource.RLIM_INFINITY))
train.main()
"""


def test_a_full_disk_is_told_of_and_the_script_goes_on(folder):
    (folder / "full.py").write_text(FULL)
    script = [sys.executable, "full.py", "0.01", "7"]
    status, out, error = run(folder, *command("--out", "full", "--", *script))
    assert (status, "Traceback" in error) == (7, False)
    assert error.count("RuntimeWarning: nothing more is recorded in ") == 1
    assert "File too large" in error
    assert Recording(folder / "full").steps == [1]
    assert out.startswith("[")


def test_a_command_without_an_optimizer_is_told_of(folder):
    script = [sys.executable, "-c", "pass", "--mode", "an option of the script's own"]
    status, _, error = run(folder, *command("--out", "nothing", "--", *script))
    assert (status, "nothing was recorded" in error) == (0, True)
