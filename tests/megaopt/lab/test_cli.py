import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attacks import full_disk
from tiny_runs import UNFUSED, fused, tiny_run

from megaopt.lab import cli
from megaopt.lab.configs import shipped


def small(device="cpu", backend="reference"):
    """A run of two steps."""
    run = tiny_run(2, device=device, optimizer="weight_decay = 0.1")
    return run + UNFUSED + fused(backend=backend)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(small(), encoding="utf-8")
    return path


def test_an_identical_run_exits_with_0(megaopt, config, tmp_path):
    status, out, err = megaopt("regress", config)
    assert (status, err) == (0, "")
    assert "identical" in out
    record = json.loads((tmp_path / "out" / "small" / "record.json").read_text())
    assert record["identical"] is True
    assert (tmp_path / "out" / "small" / "losses.png").exists()
    assert "writes over" not in out
    out = megaopt("regress", config)[1]
    assert "out/small has an earlier run's record, which this one writes over\n" in out


def test_a_difference_exits_with_1_and_is_named(megaopt, config, tmp_path):
    status, out, err = megaopt("regress", config, "--perturb", 2, "--out", tmp_path / "elsewhere")
    assert (status, err) == (1, "")
    assert "step 2, variant fused, token_embedding.weight master: " in out
    assert (tmp_path / "elsewhere" / "small" / "record.json").exists()
    assert not (tmp_path / "out").exists()


BAD_INPUT = {
    "perturb late": (
        ["regress", "small.toml", "--perturb", "3"],
        "perturb must be a step of the run, from 1 to 2, got 3",
    ),
    "no such variant": (
        ["train", "small.toml", "--variant", "x"],
        "variant must be one of unfused, fused, got 'x'",
    ),
    "no such checkpoint": (["train", "small.toml", "--resume", "none"], "none cannot be read: "),
    "no folder": (
        ["train", "small.toml", "--save", "no/folder"],
        "save must be a file in a folder that exists",
    ),
    "out is a file": (["regress", "small.toml", "--out", "small.toml"], "small.toml"),
    "unknown command": (["regres", "small.toml"], "regres"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_exits_with_2_and_is_named(megaopt, config, arguments, message):
    status, _, err = megaopt(*arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_a_run_is_trained_saved_and_resumed(megaopt, config, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert megaopt("train", config, "--steps", 1, "--save", checkpoint)[0] == 0
    status, resumed, _ = megaopt("train", config, "--resume", checkpoint)
    assert status == 0
    _, straight, _ = megaopt("train", config)
    last = straight.splitlines()[-1]
    assert last.startswith("fused: loss ")
    assert last.endswith(" at step 2")
    assert resumed.splitlines()[-1] == last


COMMANDS = {
    "record": (["regress", "small.toml"], "out/small/record.json"),
    "checkpoint": (["train", "small.toml", "--save", "saved"], "saved"),
}


@pytest.mark.parametrize(("arguments", "file"), COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_told_in_a_line(megaopt, config, tmp_path, arguments, file):
    """And what was there before stays."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"older")
    with full_disk(500):
        status, _, said = megaopt(*arguments)
    assert status == 2, said
    # (the test's folder is named whole or as it was asked for)
    assert said.startswith("megaopt: ")
    assert said.endswith(f"{file}: File too large\n")
    assert said.count("\n") == 1
    assert (tmp_path / file).read_bytes() == b"older"
    assert not [*tmp_path.rglob(".megaopt-*")]


PLACES = {
    "--save": ("must be a file, not a folder", "must be a file in a folder that exists"),
    "--result": ("must be a folder that is not there yet", "must be in a folder that exists"),
}


@pytest.mark.parametrize("option", PLACES)
def test_a_place_that_cannot_be_written_is_told_before_training(megaopt, config, option, tmp_path):
    taken, missing = PLACES[option]
    for place, message in ((tmp_path, taken), (tmp_path / "none" / "file", missing)):
        status, out, err = megaopt("train", config, option, place)
        assert (status, out) == (2, "")
        assert f"{option[2:]} {message}, got '{place}'" in err


def test_a_recording_on_a_full_disk_is_told_in_a_line(megaopt, config, tmp_path):
    with full_disk(500):
        status, _, said = megaopt("train", config, "--result", tmp_path / "result")
    assert (status, said) == (2, f"megaopt: {tmp_path / 'result'}: File too large\n")


def test_a_run_that_does_not_fit_is_refused_before_it_begins(megaopt, config):
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("= 256", f"= {2**31 - 1}"), encoding="utf-8")
    for arguments in (["regress", config], ["train", config]):
        status, _, err = megaopt(*arguments)
        assert status == 2
        assert "must be small enough for the " in err
        assert re.search(r"got a run that needs at least \d+\.\d GiB", err)


@pytest.mark.parametrize("package", cli.PACKAGES)
def test_a_missing_package_names_the_extra(megaopt, monkeypatch, package):
    find_spec = importlib.util.find_spec
    hide = lambda name, *rest: None if name == package else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    status, _, err = megaopt("doctor")
    assert status == 2
    # the form that works before an index has releases: a name alone would be a stranger's there
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', text, re.MULTILINE)[1]
    command = f"pip install 'megaopt[cli] @ git+{repository}'"
    assert err == f"megaopt needs {package}: {command}\n"


def test_no_text_installs_what_an_index_may_have_under_our_name():
    root = Path(__file__).parents[3]
    folders = ("megaopt", "integration", "kernels", "docs", "examples")
    files = [root / "README.md", *(path for name in folders for path in (root / name).rglob("*"))]
    texts = {p: p.read_text(encoding="utf-8") for p in files if p.suffix in (".py", ".md")}
    bare = re.compile(r"pip install '?megaopt(?![^'\n]* @ git)")
    assert not [path for path, text in texts.items() if bare.search(text)]


def run_as_a_process(folder, config):
    # as a process of its own: the environment decides before the kernels are imported
    command = [sys.executable, "-m", "megaopt", "regress", str(config)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_runs_from_the_command_line(tmp_path, config):
    config.write_text(small(backend="triton"), encoding="utf-8")
    if torch.cuda.is_available():
        config.write_text(small("cuda", "triton"), encoding="utf-8")
    done = run_as_a_process(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout


@pytest.mark.long
@pytest.mark.gpu
def test_a_run_on_the_gpu_is_identical_and_repeats_itself(tmp_path, config):
    pytest.importorskip(
        "tyro", reason="the commands' requirements (megaopt[cli]) are not installed"
    )
    config.write_text(small("cuda", "triton"), encoding="utf-8")
    records = []
    for _ in range(2):
        done = run_as_a_process(tmp_path, config)
        assert done.returncode == 0, done.stdout + done.stderr
        records.append((tmp_path / "out" / "small" / "record.json").read_text())
    assert records[0] == records[1]
    assert json.loads(records[0])["hardware"]["device"] == "cuda"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_writes_an_option_that_may_be_left_out_as_others(name, megaopt):
    status, out, _ = megaopt(*name.split(), "--help")
    assert status == 0
    assert "None" not in out


@pytest.mark.parametrize("name", ["regress", "train"])
def test_help_names_the_configs(name, megaopt):
    out = megaopt(name, "--help")[1]
    assert all(each in out for each in shipped())
