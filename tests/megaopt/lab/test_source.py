"""The commit and the digest that records carry: of a checkout, a copy, an installed package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaopt
from megaopt.lab.source import SourceError, describe_source, portable

ROOT = Path(__file__).parents[3]
CACHES = shutil.ignore_patterns("__pycache__")

# each stage prints what is described; the package is imported once, since that takes seconds
STAGES = """
import json, os, subprocess, sys
from pathlib import Path
import megaopt
from megaopt.lab.source import SourceError, describe_source

place = Path(megaopt.__file__).parent
assert place.is_relative_to(sys.argv[1]), place

def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)
    return done.stdout.decode().strip()

def tell(stage, **more):
    try:
        found = describe_source()
    except ValueError as error:
        found = {"error": str(error)}
    print(json.dumps({"stage": stage, **found, **more}))

tell("installed")
os.environ["MEGAOPT_COMMIT"] = "ab" * 20
tell("named")
del os.environ["MEGAOPT_COMMIT"]
git(place.parents[1], "init")
git(place.parents[1], "commit", "--allow-empty", "-m", "somebody else's")
tell("within another checkout")
git(place.parent, "init")
git(place.parent, "add", ".")
git(place.parent, "commit", "-m", "megaopt")
head = git(place.parent, "rev-parse", "HEAD")
tell("checkout", head=head)
os.environ["MEGAOPT_COMMIT"] = head
tell("named as it is", head=head)
os.environ["MEGAOPT_COMMIT"] = "ab" * 20
tell("named otherwise", head=head)
del os.environ["MEGAOPT_COMMIT"]
(place / "kernels" / "calling.py").open("a").write("#")
tell("changed", head=head)
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """What is described of a copy that is laid out as a wheel lays it out."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    site = tmp_path_factory.mktemp("environment") / "site"
    shutil.copytree(ROOT / "megaopt", site / "megaopt", ignore=CACHES)
    for folder in ("kernels", "integration"):
        shutil.copytree(ROOT / folder, site / "megaopt" / folder, ignore=CACHES)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("MEGAOPT_COMMIT", None)
    command = [sys.executable, "-c", STAGES, str(site)]
    done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("stage"): line for line in lines}


def test_an_installed_package_has_a_version_and_the_digest_of_the_checkout(stages):
    found = stages["installed"]
    assert (found["commit"], found["dirty"]) == (None, None)
    assert found["version"] == megaopt.__version__
    assert found["sha256"] == describe_source()["sha256"]
    assert stages["within another checkout"] == found


def test_a_copy_takes_its_commit_from_the_variable(stages):
    assert stages["named"] == {**stages["installed"], "commit": "ab" * 20}


def test_a_checkout_has_its_commit(stages):
    found = stages["checkout"]
    assert (found["commit"], found["dirty"]) == (found["head"], False)
    assert stages["named as it is"] == found
    head = found["head"]
    message = f"MEGAOPT_COMMIT must be the checkout's commit {head}, got '{'ab' * 20}'"
    assert stages["named otherwise"]["error"] == message


def test_a_change_is_dirty_and_has_another_digest(stages):
    before, after = stages["checkout"], stages["changed"]
    assert (after["commit"], after["dirty"]) == (before["head"], True)
    assert after["sha256"] != before["sha256"]


@pytest.mark.parametrize("commit", ["", "main", "abc", "AB" * 20, "ab" * 20 + "\n", "g" * 40])
def test_what_is_no_commit_is_refused(commit, monkeypatch):
    monkeypatch.setenv("MEGAOPT_COMMIT", commit)
    with pytest.raises(SourceError) as refused:
        describe_source()
    message = f"MEGAOPT_COMMIT must be 40 hex digits in lower case, got {commit!r}"
    assert str(refused.value) == message


def test_a_command_line_has_no_folders_of_the_machine(tmp_path):
    """Paths of the checkout are relative to it; of others the last name is left."""
    page, out = ROOT / "docs" / "api.md", tmp_path / "record.json"
    words = ["megaopt", "bench", "--out", "out/x", str(out), f"--out={out}", str(page), "a=1"]
    found = ["megaopt", "bench", "--out", "out/x", "record.json", "--out=record.json"]
    assert portable(words) == [*found, "docs/api.md", "a=1"]
