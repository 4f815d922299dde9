"""Broken configs, a thousand of them: each is refused in words, with 2, and none gets further."""

import random
import re
from pathlib import Path

import pytest

from megaopt.lab import cli
from megaopt.lab.regression import command, gpt, single
from megaopt.lab.toml_tables import ConfigError
from megaopt.lab.training.text import Corpus, load_corpus

# Bad configs, drawn from good ones by a seed: what a command must refuse in words.

HUGE = (2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**400)
NUMBERS = (0, -1, 1, 2, 3, 7, 2**31 - 1, -(2**63), *HUGE)
VALUES = (
    *map(str, NUMBERS),
    *(str(-number) for number in HUGE),
    "0x" + "f" * 5000,
    *("nan", "-nan", "inf", "-inf", "0.0", "-0.0", "1e308", "1e39", "-1e308", "1e-320", "0.5"),
    *("true", "false", '""', "''", '"10"', '"nan"', '"x"', '"../x"', '"-x"', '"."', '"a b"'),
    *('"\\u0000"', '"\\ud800"', '"\\U0010FFFF"', '"' + "x" * 300 + '"', '"' + "é" * 5000 + '"'),
    *('"""\n"""', "[]", "[[]]", "[1, 2]", '["x", 1]', "{}", "{a = 1}", "[{}]", "[{}, 1]"),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"),
    *('"cpu"', '"cuda"', '"auto"', '"unfused"', '"fused"', '"peer"', '"stock"', '"megaopt"'),
)
DEEP = (
    *("[" * depth + "]" * depth for depth in (50, 1500, 5000, 50_000)),
    *("{a=" * depth + "1" + "}" * depth for depth in (50, 1500, 5000, 50_000)),
)
HEADERS = ("[model]", "[optimizer]", "[megatron]", "[float8]", "[[variant]]", "[x]", "[[model]]")
BYTES = (b"\xff", b"\xc3\x28", b"\x00", b"\xed\xa0\x80", b"\r", b"\x1b[2J", b"\xef\xbb\xbf", b"=")


def _key_lines(lines):
    return [number for number, line in enumerate(lines) if b" = " in line]


def another_value(lines, rng):
    """Another value for a key."""
    number = rng.choice(_key_lines(lines))
    key, _, _ = lines[number].partition(b" = ")
    lines[number] = key + b" = " + rng.choice(VALUES).encode()


def a_deep_value(lines, rng):
    """A value that is nested, for a key."""
    number = rng.choice(_key_lines(lines))
    key, _, _ = lines[number].partition(b" = ")
    lines[number] = key + b" = " + rng.choice(DEEP).encode()


def deep_keys(lines, rng):
    """A key, or a table, that leads through many tables."""
    path = ".".join(["a"] * rng.choice((30, 300, 2000)))
    line = rng.choice((f"{path} = 1", f"[{path}]", f"model.{path} = 1"))
    lines.insert(rng.randrange(len(lines) + 1), line.encode())


def left_out(lines, rng):
    """A line less."""
    del lines[rng.randrange(len(lines))]


def twice(lines, rng):
    """A line twice."""
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))


def an_unknown_key(lines, rng):
    """A key that nobody knows, or a known one in another place."""
    keys = ("x", "name", '""', "'a.b'", "kind", "steps", "recipe", "\u00e9", "a.b")
    line = f"{rng.choice(keys)} = {rng.choice(VALUES)}"
    lines.insert(rng.randrange(len(lines) + 1), line.encode())


def another_header(lines, rng):
    """A table's beginning, somewhere."""
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(HEADERS).encode())


def a_table_left_out(lines, rng):
    """A table less, with all that is in it."""
    begins = [n for n, line in enumerate(lines) if line.startswith(b"[")]
    begin = rng.choice(begins or [0])
    end = next((n for n in begins if n > begin), len(lines))
    del lines[begin:end]


def other_bytes(lines, rng):
    """Bytes that are no text, or no TOML, within a line."""
    number = rng.randrange(len(lines))
    place = rng.randrange(len(lines[number]) + 1)
    lines[number] = lines[number][:place] + rng.choice(BYTES) + lines[number][place:]


def cut_off(lines, rng):
    """The end less, perhaps all."""
    del lines[rng.randrange(len(lines)) :]
    if lines and rng.random() < 0.5:
        lines[-1] = lines[-1][: rng.randrange(len(lines[-1]) + 1)]


CHANGES = (
    *[another_value] * 8,
    *[left_out, twice, an_unknown_key] * 2,
    *(a_deep_value, deep_keys, another_header, a_table_left_out, other_bytes, cut_off),
)


def broken(text, rng):
    """A config's bytes with one to three changes."""
    lines = text.split(b"\n")
    for change in rng.choices(CHANGES, k=rng.choice((1, 1, 1, 2, 3))):
        if _key_lines(lines):
            change(lines, rng)
    return b"\n".join(lines)


def write_broken(folder, sources, seed):
    """A file, or in one of fifty cases a folder or nothing, in the place of a config; its path."""
    rng = random.Random(seed)
    path = folder / f"broken_{seed}.toml"
    kind = rng.random()
    if kind < 0.01:
        path.mkdir()
    elif kind > 0.02:
        path.write_bytes(broken(rng.choice(sources).read_bytes(), rng))
    return path


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
