import dataclasses
from pathlib import Path

import pytest

import megaopt
from megaopt.commands import cli, configs
from megaopt.commands.config import (
    ConfigError,
    FusedVariant,
    UnfusedVariant,
    read_config,
)
from megaopt.float8 import RECIPES

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("gpt_*.toml"))

GOOD = """
seed = 1
steps = 10
batch_size = 2
device = "cpu"

[model]
layers = 1
heads = 2
width = 8
context = 8
vocabulary_size = 256

[optimizer]
learning_rate = 1
warmup_steps = 4
weight_decay = 0.1

[[variant]]
name = "unfused"
kind = "unfused"

[[variant]]
name = "stopped"
kind = "fused"
baseline = "unfused"
resume_after = 5
"""


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_config_is_read(tmp_path):
    config = read_config(write(tmp_path, GOOD))
    assert config.name == "run"
    assert config.model.width == 8
    assert config.optimizer.learning_rate == 1.0
    assert type(config.optimizer.learning_rate) is float
    assert config.variant == (
        UnfusedVariant(name="unfused"),
        FusedVariant(name="stopped", baseline="unfused", resume_after=5),
    )
    assert config.find_variant("stopped").resume_after == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3


KEYS = "batch_size, cpu_threads, device, float8, galore, model, optimizer, seed, steps, variant"
KINDS = "'unfused', 'peer', 'fused', 'galore'"
RECIPE_NAMES = "'delayed', 'current', 'block_128x128', 'mxfp8'"
TO_MOST = "a whole number from 1 to 2**31-1"
NUMBER = "a number from 0 to 3.4e38"
WITH_RANKS = "for a variant with ranks"

# what is replaced, by what, and the message without the file's name
REFUSED = {
    "unknown key": (
        *("seed = 1", "seed = 1\nsteeps = 3"),
        f"the keys must be among {KEYS}, got 'steeps' (did you mean 'steps'?)",
    ),
    "unknown key in a table": (
        *("heads = 2", "heads = 2\nhead = 2"),
        "the keys of model must be among context, heads, layers, vocabulary_size, width, "
        "got 'head' (did you mean 'heads'?)",
    ),
    "name inside": (
        *("seed = 1", 'seed = 1\nname = "x"'),
        "name must be left out: the file's own name is the run's, got 'x'",
    ),
    "missing key in a table": (
        *("heads = 2", ""),
        "model.heads must be given, got nothing",
    ),
    "wrong type": ("steps = 10", 'steps = "10"', f"steps must be {TO_MOST}, got '10'"),
    "boolean for an integer": (
        *("steps = 10", "steps = true"),
        f"steps must be {TO_MOST}, got True",
    ),
    "scalar for a table": (
        *("seed = 1", "seed = 1\nfloat8 = 3"),
        "float8 must be a table, got 3",
    ),
    "steps beyond int32": (
        *("steps = 10", "steps = 2147483648"),
        f"steps must be {TO_MOST}, got 2147483648",
    ),
    "width not divisible": (
        *("width = 8", "width = 7"),
        "model.width must be a multiple of heads, which is 2, got 7",
    ),
    "vocabulary of thousands of digits": (
        *("= 256", f"= 0x{'f' * 5000}"),
        "model.vocabulary_size must be a whole number from 256 to 2**31-1, "
        "got a whole number of 20000 bits",
    ),
    "NaN": (
        *("learning_rate = 1", "learning_rate = nan"),
        f"optimizer.learning_rate must be {NUMBER}, got nan",
    ),
    "beta of one": (
        *("learning_rate = 1", "learning_rate = 1\nbeta2 = 1"),
        "optimizer.beta2 must be a number in [0, 1), got 1",
    ),
    "unknown kind": (
        *('"fused"', '"fuzed"'),
        f"variant[1].kind must be one of {KINDS}, got 'fuzed'",
    ),
    "unknown baseline": (
        *('baseline = "unfused"', 'baseline = "x"'),
        "stopped.baseline must be the name of a baseline variant: unfused, got 'x'",
    ),
    "name used twice": (
        *('name = "stopped"', 'name = "unfused"'),
        "variant.name must be a name of one variant alone, got 'unfused'",
    ),
    "name that leads elsewhere": (
        *('name = "stopped"', 'name = "../x"'),
        "variant.name must be 1 to 100 letters, digits, '_', '-' and '.', got '../x'",
    ),
    "resumed at the end": (
        *("= 5", "= 10"),
        "stopped.resume_after must be less than steps, which is 10, got 10",
    ),
    "no recipe": (
        *("[model]", "[float8]\nrecipes = []\n[model]"),
        "float8.recipes must be a list of at least one recipe, got []",
    ),
    "unknown recipe": (
        *("[model]", '[float8]\nrecipes = ["current", "fp8"]\n[model]'),
        f"float8.recipes[1] must be one of {RECIPE_NAMES}, got 'fp8'",
    ),
    "a recipe twice": (
        *("[model]", '[float8]\nrecipes = ["mxfp8", "mxfp8"]\n[model]'),
        "float8.recipes must be a list that has each recipe once, got ['mxfp8', 'mxfp8']",
    ),
    "scaled products of odd sizes": (
        *("[model]", '[float8]\nrecipes = ["current"]\nscaled_matmul = true\n[model]'),
        "model.width must be a multiple of 16 with float8.scaled_matmul = true, got 8",
    ),
    "ranks and resumed": (
        *("= 5", "= 5\nranks = 2"),
        "variant[1].resume_after must be left out of a variant with ranks, got 5",
    ),
    "ranks and external masters": (
        *("resume_after = 5", 'ranks = 2\nmasters = "external"'),
        f"variant[1].masters must be 'created' {WITH_RANKS}, got 'external'",
    ),
    "no TOML": (
        *("seed = 1", "seed = "),
        "cannot be read as TOML: Invalid value (at line 2, column 8)",
    ),
    "nested deeply": (
        *("seed = 1", f"seed = {'[' * 5000}{']' * 5000}"),
        "cannot be read as TOML: nested too deeply",
    ),
    "deep values": (
        *("seed = 1", f"seed.{'.'.join('a' * 2000)} = 1"),
        "seed must be a whole number from 0 to 2**63-1, got {'a': {'a': {'a': {...}}}}",
    ),
    "too large": (
        *("seed = 1", f"seed = 1\n# {'x' * 2**16}"),
        "cannot be read as TOML: it has more than 65536 bytes",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_config_is_refused_by_name(tmp_path, old, new, message):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as raised:
        read_config(path)
    assert str(raised.value) == f"{path}: {message}"


FLOAT8 = GOOD.replace("[model]", '[float8]\nrecipes = ["mxfp8", "current"]\n\n[model]')


MISFITS = {
    "remainders": (
        "resume_after = 5",
        'masters = "remainders"',
        r"stopped\.masters must be .*, got 'remainders'",
    ),
    "peer": (
        'kind = "unfused"',
        'kind = "peer"\nlibrary = "transformer_engine"',
        r"unfused\.kind must be 'unfused' or 'fused' .*, got 'peer'",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), MISFITS.values(), ids=MISFITS)
def test_variants_that_no_recipe_goes_with_are_refused(tmp_path, old, new, message):
    read_config(write(tmp_path, GOOD.replace(old, new, 1)))
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, FLOAT8.replace(old, new, 1)))


def test_a_config_without_variants_is_refused(tmp_path):
    path = write(tmp_path, "variant = []\n" + GOOD.partition("[[variant]]")[0])
    with pytest.raises(ConfigError, match=r"variant must be at least one table.*, got \[\]"):
        read_config(path)


@pytest.mark.parametrize("name", ["...toml", "..toml"])
def test_a_file_whose_name_is_dots_is_refused(tmp_path, name):
    """Its run's folder would be the one above --out, or --out itself."""
    path = tmp_path / name
    path.write_text(GOOD, encoding="utf-8")
    with pytest.raises(ConfigError, match="the file's name must be more than dots, got"):
        read_config(path)


PLAIN = [path for path in CONFIGS if not path.stem.endswith(("_te", "_fp8", "_galore"))]


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_the_configs_of_the_repository_compare_all_forms(path):
    config = read_config(path)
    fused = [variant for variant in config.variant if isinstance(variant, FusedVariant)]
    forms = {(v.backend, v.masters, v.layout, v.resume_after is not None) for v in fused}
    assert forms == {
        ("reference", "created", "whole", False),
        ("triton", "created", "whole", False),
        ("triton", "external", "whole", False),
        ("triton", "created", "groups_and_views", False),
        ("triton", "created", "whole", True),
        ("triton", "remainders", "whole", False),
    }


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.endswith("_fp8")], ids=str)
def test_the_fp8_configs_run_every_recipe(path):
    config = read_config(path)
    assert config.float8.recipes == tuple(RECIPES)
    plain = read_config(path.with_stem(path.stem.removesuffix("_fp8")))
    if config.device == "cuda":
        assert config.float8.scaled_matmul
        assert config.model == plain.model
    else:
        fused = [v for v in config.variant if isinstance(v, FusedVariant)]
        assert {v.ranks for v in fused} == {None, 1, 2, 3}
        assert [v.resume_after for v in fused if v.resume_after] == [config.steps // 2]


# --- configs by name, from any folder, and the version


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
