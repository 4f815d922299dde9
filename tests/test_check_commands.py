"""tools/check_commands.py finds the commands that pages print, and sees one that fails."""

import re

import pytest
from record_pages import tool


@pytest.fixture
def check(monkeypatch):
    return tool("check_commands", monkeypatch)


def test_it_finds_what_pages_print(check):
    found = check.commands()
    assert found["make regress"] == "README.md"
    assert found["python docs/how-to/torch_loop.py --folder out"] == "docs/how-to/torch.md"
    assert found["megaopt verify --backends reference"] == "CONTRIBUTING.md"
    assert found["megaopt regress gpt_tiny --perturb 40"] == "README.md"  # within a line
    assert not any("-->" in command for command in found)


def test_each_reason_is_that_of_a_command(check):
    for pattern in check.ELSEWHERE:
        assert any(re.search(pattern, command) for command in check.commands()), pattern


def test_most_guides_are_run(check, monkeypatch):
    monkeypatch.setattr(check, "NEEDED", {})
    left_out = [each for each in check.commands() if "docs/how-to/" in each and check.why_not(each)]
    assert not left_out


@pytest.mark.parametrize(("code", "good"), [(0, True), (3, False)])
def test_a_command_that_fails_is_seen(check, tmp_path, capsys, code, good):
    command = f"python -c 'print(5); raise SystemExit({code})'"
    assert check.passes(command, "README.md", tmp_path) == good
    printed = capsys.readouterr().out
    assert printed.startswith("ok (" if good else "FAILED (")
    assert ("5" in printed.splitlines()[1:]) != good
