"""Configs by name, from any folder, and the version."""

from pathlib import Path

import pytest

import megaopt
from megaopt.commands import cli, configs

OURS = Path(__file__).parents[3] / "configs" / "gpt_tiny.toml"


@pytest.mark.parametrize("name", ["gpt_tiny", "gpt_tiny.toml", "configs/gpt_tiny.toml"])
def test_a_config_of_the_package_is_found_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert configs.find_config(Path(name)).samefile(OURS)


def test_a_file_of_the_users_own_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = Path("gpt_tiny.toml")
    own.write_text("seed = 2\n", encoding="utf-8")
    assert configs.find_config(own) == own


def test_an_unknown_name_is_refused_with_those_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["regress", "gpt_tyni"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("megaopt: gpt_tyni: config must be a file or one of gpt_124m, ")
    assert all(name in said for name in configs.shipped())


def test_regress_takes_the_config_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken = []
    monkeypatch.setattr(cli, "_load", lambda *_: lambda config, *_: taken.append(config) or 0)
    assert cli.main(["regress"]) == cli.main(["regress", "gpt_tiny_fp8"]) == 0
    assert [path.name for path in taken] == ["gpt_tiny.toml", "gpt_tiny_fp8.toml"]
    assert all(path.is_file() for path in taken)


def test_the_version_is_shown_without_the_commands_packages(capsys, monkeypatch):
    monkeypatch.setattr(cli, "PACKAGES", ("nothing_of_this_name",))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megaopt {megaopt.__version__}\n"
