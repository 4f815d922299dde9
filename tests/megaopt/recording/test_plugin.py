"""The plugin of pytest, in runs of pytest that have nothing else."""

import subprocess
import sys

import pytest
from forked import forked, pytest_alone

TESTS = """
import sys
import pytest
import torch


def train(recorded_run, lr=0.1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with recorded_run(model, optimizer) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    return recorder


def test_same(recorded_run):
    from megaopt.recording.plugin import assert_same_run
    a, b = train(recorded_run), train(recorded_run)
    assert_same_run(a, b)
    assert_same_run(a.folder, str(b.folder))


def test_other(recorded_run):
    from megaopt.recording.plugin import assert_same_run
    assert_same_run(train(recorded_run), train(recorded_run, lr=LR))


@pytest.mark.golden("golden.json")
def test_golden(recorded_run):
    train(recorded_run, lr=LR)


@pytest.mark.golden("golden.json")
def test_golden_of_nothing():
    pass
"""


@pytest.fixture
def tried(tmp_path):
    """Runs some of the tests with an lr: the status, and what pytest printed."""

    def run(name, *options, lr=0.1):
        (tmp_path / "test_runs.py").write_text(TESTS.replace("LR", str(lr)))
        command = ["-q", "-p", "no:cacheprovider", "-k", name, *options]
        plugin = ["-p", "megaopt.recording.plugin", "--strict-markers", "-W", "error"]
        return forked(pytest_alone, [*command, *plugin], folder=tmp_path)

    return run


def test_runs_are_held_to_each_other(tried):
    status, out = tried("same or other", lr=0.2)
    assert status == 1
    assert "1 failed, 1 passed" in out
    assert "AssertionError: differ: step 1: weight of weight differs; equal: gradient, old" in out
    assert "lr of group 0: 0.1, and 0.2" in out


def test_a_run_is_held_to_its_file(tried, tmp_path):
    status, out = tried("test_golden and not nothing")
    assert status == 1
    assert "golden.json must be there: pytest --golden-update writes it" in out
    assert tried("test_golden and not nothing", "--golden-update")[0] == 0
    assert tried("test_golden and not nothing")[0] == 0
    status, out = tried("test_golden and not nothing", lr=0.2)
    assert status == 1
    assert "Failed: differ: step 1: " in out or "\ndiffer: step 1: " in out
    before = (tmp_path / "golden.json").read_text()
    assert tried("test_golden and not nothing", "--golden-update", lr=0.2)[0] == 0
    assert (tmp_path / "golden.json").read_text() != before
    assert '"because": "pytest --golden-update"' in (tmp_path / "golden.json").read_text()


def test_a_tree_with_changes_is_refused_in_words(tried, tmp_path):
    golden = ("test_golden and not nothing", "--golden-update")
    assert tried(*golden)[0] == 0
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    status, out = tried(*golden, lr=0.2)
    assert status == 1
    assert "the git tree must be clean, got changes:  M test_runs.py" in out
    assert "RecordingError" not in out


@pytest.mark.slow
def test_a_golden_test_records_a_run(tried):
    status, out = tried("nothing")
    assert status == 1
    assert "a test marked golden must record a run by recorded_run, got none" in out


def test_the_plugin_imports_nothing_before_it_is_used():
    """Comparing needs numpy alone, and `megaopt record` begins without torch."""
    modules = {
        "plugin": "torch numpy triton",
        "golden": "torch rich matplotlib",
        "compare": "torch rich matplotlib",
    }
    code = f"""
import importlib, sys
for name, unwanted in {modules}.items():
    importlib.import_module(f"megaopt.recording.{{name}}")
    assert not sys.modules.keys() & {{*unwanted.split()}}, name
import megaopt.lab.record
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
