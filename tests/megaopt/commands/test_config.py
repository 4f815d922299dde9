import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from megaopt.commands.config import (
    ConfigError,
    Float8Config,
    FusedVariant,
    PeerVariant,
    Recipe,
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


def test_the_learning_rate_rises_and_then_stays(tmp_path):
    optimizer = read_config(write(tmp_path, GOOD)).optimizer
    rates = [optimizer.learning_rate_at(step) for step in range(1, 7)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


KEYS = "batch_size, cpu_threads, device, float8, galore, model, optimizer, seed, steps, variant"
FUSED_KEYS = "backend, baseline, contract, kind, layout, masters, name, ranks, resume_after"
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
    "a fused key on a baseline": (
        *('kind = "unfused"', 'kind = "unfused"\nbackend = "triton"'),
        "the keys of variant[0] must be among kind, name, rounding, got 'backend'",
    ),
    "name inside": (
        *("seed = 1", 'seed = 1\nname = "x"'),
        "name must be left out: the file's own name is the run's, got 'x'",
    ),
    "missing key": ("seed = 1", "", "seed must be given, got nothing"),
    "missing key in a table": (
        *("heads = 2", ""),
        "model.heads must be given, got nothing",
    ),
    "missing number": (
        *("learning_rate = 1", ""),
        "optimizer.learning_rate must be given, got nothing",
    ),
    "wrong type": ("steps = 10", 'steps = "10"', f"steps must be {TO_MOST}, got '10'"),
    "float for an integer": (
        *("steps = 10", "steps = 10.0"),
        f"steps must be {TO_MOST}, got 10.0",
    ),
    "boolean for an integer": (
        *("steps = 10", "steps = true"),
        f"steps must be {TO_MOST}, got True",
    ),
    "boolean for a float": (
        *("weight_decay = 0.1", "weight_decay = true"),
        f"optimizer.weight_decay must be {NUMBER}, got True",
    ),
    "scalar for a table": (
        *("seed = 1", "seed = 1\nfloat8 = 3"),
        "float8 must be a table, got 3",
    ),
    "zero steps": ("steps = 10", "steps = 0", f"steps must be {TO_MOST}, got 0"),
    "steps beyond int32": (
        *("steps = 10", "steps = 2147483648"),
        f"steps must be {TO_MOST}, got 2147483648",
    ),
    "negative seed": (
        *("seed = 1", "seed = -1"),
        "seed must be a whole number from 0 to 2**63-1, got -1",
    ),
    "seed beyond int64": (
        *("seed = 1", "seed = 9223372036854775808"),
        "seed must be a whole number from 0 to 2**63-1, got 9223372036854775808",
    ),
    "too many threads": (
        *("steps = 10", "steps = 10\ncpu_threads = 1000000000000"),
        "cpu_threads must be a whole number from 1 to 1024, got 1000000000000",
    ),
    "unknown device": (
        *('"cpu"', '"tpu"'),
        "device must be one of 'auto', 'cpu', 'cuda', got 'tpu'",
    ),
    "width not divisible": (
        *("width = 8", "width = 7"),
        "model.width must be a multiple of heads, which is 2, got 7",
    ),
    "small vocabulary": (
        *("= 256", "= 255"),
        "model.vocabulary_size must be a whole number from 256 to 2**31-1, got 255",
    ),
    "large vocabulary": (
        *("= 256", f"= {2**64}"),
        f"model.vocabulary_size must be a whole number from 256 to 2**31-1, got {2**64}",
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
    "infinite decay": ("0.1", "inf", f"optimizer.weight_decay must be {NUMBER}, got inf"),
    "decay beyond fp32": ("0.1", "1e39", f"optimizer.weight_decay must be {NUMBER}, got 1e+39"),
    "decay beyond fp64": (
        *("0.1", f"1{'0' * 400}"),
        f"optimizer.weight_decay must be {NUMBER}, got a whole number of 1329 bits",
    ),
    "negative eps": (
        *("learning_rate = 1", "learning_rate = 1\neps = -1e-8"),
        f"optimizer.eps must be {NUMBER}, got -1e-08",
    ),
    "beta of one": (
        *("learning_rate = 1", "learning_rate = 1\nbeta2 = 1"),
        "optimizer.beta2 must be a number in [0, 1), got 1",
    ),
    "no kind": ('kind = "unfused"', "", "variant[0].kind must be given, got nothing"),
    "a kind of thousands of digits": (
        *('"fused"', f"0x{'f' * 5000}"),
        "variant[1].kind must be a text, got a whole number of 20000 bits",
    ),
    "unknown kind": (
        *('"fused"', '"fuzed"'),
        f"variant[1].kind must be one of {KINDS}, got 'fuzed'",
    ),
    "unknown baseline": (
        *('baseline = "unfused"', 'baseline = "x"'),
        "stopped.baseline must be the name of a baseline variant: unfused, got 'x'",
    ),
    "fused baseline": (
        *('baseline = "unfused"', 'baseline = "stopped"'),
        "stopped.baseline must be the name of a baseline variant: unfused, got 'stopped'",
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
    "resumed at 0": ("= 5", "= 0", f"variant[1].resume_after must be {TO_MOST}, got 0"),
    "no recipe": (
        *("[model]", "[float8]\nrecipes = []\n[model]"),
        "float8.recipes must be a list of at least one recipe, got []",
    ),
    "no list": (
        *("[model]", '[float8]\nrecipes = "mxfp8"\n[model]'),
        "float8.recipes must be a list, got 'mxfp8'",
    ),
    "no recipes": (
        *("[model]", "[float8]\n[model]"),
        "float8.recipes must be given, got nothing",
    ),
    "unknown recipe": (
        *("[model]", '[float8]\nrecipes = ["current", "fp8"]\n[model]'),
        f"float8.recipes[1] must be one of {RECIPE_NAMES}, got 'fp8'",
    ),
    "a recipe twice": (
        *("[model]", '[float8]\nrecipes = ["mxfp8", "mxfp8"]\n[model]'),
        "float8.recipes must be a list that has each recipe once, got ['mxfp8', 'mxfp8']",
    ),
    "unknown key of float8": (
        *("[model]", '[float8]\nrecipes = ["mxfp8"]\nhistory = 3\n[model]'),
        "the keys of float8 must be among recipes, scaled_matmul, got 'history'",
    ),
    "scaled products of odd sizes": (
        *("[model]", '[float8]\nrecipes = ["current"]\nscaled_matmul = true\n[model]'),
        "model.width must be a multiple of 16 with float8.scaled_matmul = true, got 8",
    ),
    "a recipe of a variant": (
        *("resume_after = 5", 'recipe = "mxfp8"'),
        f"the keys of variant[1] must be among {FUSED_KEYS}, got 'recipe'",
    ),
    "no ranks": (
        *("resume_after = 5", "ranks = 0"),
        "variant[1].ranks must be a whole number from 1 to 64, got 0",
    ),
    "ranks and resumed": (
        *("= 5", "= 5\nranks = 2"),
        "variant[1].resume_after must be left out of a variant with ranks, got 5",
    ),
    "ranks and views": (
        *("resume_after = 5", 'ranks = 2\nlayout = "groups_and_views"'),
        f"variant[1].layout must be 'whole' {WITH_RANKS}, got 'groups_and_views'",
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
    "deep keys": (
        *("seed = 1", f"seed = 1\n{'.'.join('a' * 2000)} = 1"),
        f"the keys must be among {KEYS}, got 'a'",
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


def test_every_variant_runs_once_for_each_recipe(tmp_path):
    config = read_config(write(tmp_path, FLOAT8))
    assert config.float8 == Float8Config(recipes=("mxfp8", "current"))
    assert config.runs == (
        UnfusedVariant(name="mxfp8.unfused", recipe="mxfp8"),
        FusedVariant(
            name="mxfp8.stopped", baseline="mxfp8.unfused", resume_after=5, recipe="mxfp8"
        ),
        UnfusedVariant(name="current.unfused", recipe="current"),
        FusedVariant(
            name="current.stopped", baseline="current.unfused", resume_after=5, recipe="current"
        ),
    )
    assert config.find_variant("current.stopped") == config.runs[3]
    with pytest.raises(
        ConfigError, match=r"variant must be one of mxfp8\.unfused, .*, got 'stopped'"
    ):
        config.find_variant("stopped")
    plain = read_config(write(tmp_path, GOOD))
    assert plain.runs == plain.variant


def test_the_recipes_are_those_of_float8():
    assert get_args(Recipe) == tuple(RECIPES)


MISFITS = {
    "remainders": (
        "resume_after = 5",
        'masters = "remainders"',
        r"stopped\.masters must be .*, got 'remainders'",
    ),
    "views": (
        "resume_after = 5",
        'layout = "groups_and_views"',
        r"stopped\.layout must be 'whole' .*`ranks`",
    ),
    "rounding": (
        'kind = "unfused"',
        'kind = "unfused"\nrounding = "nearest_away"',
        r"unfused\.rounding must be 'nearest_even' .*, got 'nearest_away'",
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


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["...toml", "..toml"])
def test_a_file_whose_name_is_dots_is_refused(tmp_path, name):
    """Its run's folder would be the one above --out, or --out itself."""
    path = tmp_path / name
    path.write_text(GOOD, encoding="utf-8")
    with pytest.raises(ConfigError, match="the file's name must be more than dots, got"):
        read_config(path)


def test_an_unknown_variant_is_refused_with_the_known_ones(tmp_path):
    config = read_config(write(tmp_path, GOOD))
    with pytest.raises(ConfigError, match=r"variant must be one of unfused, stopped, got 'x'"):
        config.find_variant("x")


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


def test_the_configs_are_found():
    assert [path.stem for path in CONFIGS] == [
        *("gpt_124m", "gpt_124m_fp8", "gpt_124m_te", "gpt_tiny", "gpt_tiny_fp8"),
        "gpt_tiny_galore",
    ]


def test_the_galore_config_stops_between_refreshes_and_at_one():
    config = read_config(next(path for path in CONFIGS if path.stem == "gpt_tiny_galore"))
    gap, matrices = config.galore.update_proj_gap, {0, 1, 3, 4, 5, 6, 8, 9}
    stops = {v.resume_after % gap for v in config.variant if v.resume_after is not None}
    assert len(stops & matrices) == len(stops - matrices) == 1
    assert {(v.kernel, v.layout) for v in config.variant if v.baseline is not None} == {
        *[("torch", "whole"), ("torch", "groups"), ("hybrid", "whole"), ("hybrid", "groups")]
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


def test_the_te_config_differs_from_its_model_only_in_the_variants():
    plain, te = (read_config(CONFIGS[0].with_stem(name)) for name in ("gpt_124m", "gpt_124m_te"))
    assert (te.model, te.optimizer, te.steps, te.seed) == (
        plain.model,
        plain.optimizer,
        plain.steps,
        plain.seed,
    )
    assert isinstance(te.variant[0], PeerVariant)
    assert {v.contract for v in te.variant if isinstance(v, FusedVariant)} == {"te"}
