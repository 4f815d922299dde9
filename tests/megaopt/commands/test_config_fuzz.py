"""Broken configs, a thousand of them: each is refused in words, with 2, and none gets further."""

import random
import re
from pathlib import Path

import pytest
from config_fuzz import write_broken

from megaopt.commands import cli
from megaopt.commands.regression import command, gpt, single
from megaopt.commands.toml_tables import ConfigError
from megaopt.commands.training.text import Corpus, load_corpus

SOURCES = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
COMMANDS = {
    "regress": lambda path, out: ["regress", str(path), "--out", str(out)],
    "train": lambda path, out: ["train", str(path), "--save", str(out / "x")],
}
VALID = "the config is valid"
# a parameter, what it may be, and what it is; or why a file is no TOML; or what is not here
# a key, what it should be, and what it is; or why a file is no TOML; or what is not here
LINE = (
    r"([^\n]+: )?("
    r"[^\n]+, got [^\n]+"
    r"|cannot be read as TOML: [^\n]+"
    r"|[\w.]+ needs [^\n]+: pip install [^\n]+"
    rf"|{VALID})"
)
MESSAGE = re.compile(rf"megaopt: {LINE}(\n{LINE}){{,9}}\n")


def stop(*_: object, **__: object) -> None:
    raise ConfigError(VALID)


@pytest.fixture
def refuse(monkeypatch, tmp_path, capsys):
    """Runs a command on the broken config of a seed; what it said on stderr."""
    corpus: Corpus = load_corpus()
    for module in (command, gpt):
        monkeypatch.setattr(module, "load_corpus", lambda: corpus)
    # a valid config would build models: that is another test's
    monkeypatch.setattr(command, "Regression", stop)
    monkeypatch.setattr(single, "GptTraining", stop)

    def refuse(seed, name):
        path = write_broken(tmp_path, SOURCES, seed)
        status = cli.main(COMMANDS[name](path, tmp_path))
        out, err = capsys.readouterr()
        assert status == 2, (path, err)
        assert MESSAGE.fullmatch(err), (path, err)
        assert max(map(len, err.split("\n"))) < 1000, (path, err)
        assert "internal error" not in err, (path, err)
        assert out == ""
        return err

    return refuse


def check(refuse, seeds):
    messages = []
    for seed in seeds:
        name = random.Random(seed).choice(list(COMMANDS))
        messages.append(refuse(seed, name))
    return messages


def test_broken_configs_are_refused(refuse):
    messages = check(refuse, range(50))
    # the tries reach what the checks are for
    for part in ("Input should be", "cannot be read as TOML", "got nothing", "nested too deeply"):
        assert any(part in message for message in messages), part


@pytest.mark.slow
def test_a_thousand_broken_configs_are_refused(refuse):
    messages = check(refuse, range(1000, 2000))
    assert sum(VALID in message for message in messages) < 100
