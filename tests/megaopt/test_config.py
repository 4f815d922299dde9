import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from megaopt.config import (
    ConfigError,
    Float8Config,
    FusedVariant,
    PeerVariant,
    Recipe,
    UnfusedVariant,
    read_config,
)
from megaopt.float8 import RECIPES

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("gpt_*.toml"))

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


REFUSED = {
    "unknown key": ("seed = 1", "seed = 1\nsteeps = 3", r"steeps = 3 .*unknown key.*\bsteps\b"),
    "unknown key in a table": ("heads = 2", "heads = 2\nhead = 2", r"model\.head = 2 .*unknown"),
    "a fused key on a baseline": (
        'kind = "unfused"',
        'kind = "unfused"\nbackend = "triton"',
        r"variant\[0\]\.backend = 'triton' .*unknown key",
    ),
    "name inside": ("seed = 1", 'seed = 1\nname = "x"', r"name = 'x' .*file's own name"),
    "missing key": ("seed = 1", "", r"seed is missing"),
    "missing key in a table": ("heads = 2", "", r"model\.heads is missing"),
    "wrong type": ("steps = 10", 'steps = "10"', r"steps = '10' .*type int"),
    "float for an integer": ("steps = 10", "steps = 10.0", r"steps = 10\.0 .*type int"),
    "boolean for an integer": ("steps = 10", "steps = true", r"steps = True .*type int"),
    "boolean for a float": (
        "weight_decay = 0.1",
        "weight_decay = true",
        r"optimizer\.weight_decay = True .*type float",
    ),
    "scalar for a table": ("[model]", "model = 3\n[modell]", r"modell = .*unknown key"),
    "zero steps": ("steps = 10", "steps = 0", r"steps = 0 .*>= 1"),
    "negative seed": ("seed = 1", "seed = -1", r"seed = -1 .*>= 0"),
    "unknown device": ('"cpu"', '"tpu"', r"device = 'tpu' .*'auto', 'cpu', 'cuda'"),
    "width not divisible": ("width = 8", "width = 7", r"model\.width = 7 .*multiple"),
    "small vocabulary": ("= 256", "= 255", r"model\.vocabulary_size = 255 .*>= 256"),
    "NaN": (
        "learning_rate = 1",
        "learning_rate = nan",
        r"optimizer\.learning_rate = nan .*finite number >= 0",
    ),
    "infinite decay": ("0.1", "inf", r"optimizer\.weight_decay = inf .*finite"),
    "beta of one": (
        "learning_rate = 1",
        "learning_rate = 1\nbeta2 = 1",
        r"optimizer\.beta2 = 1\.0 .*\[0, 1\)",
    ),
    "no kind": ('kind = "unfused"', "", r"variant\[0\]\.kind = None .*'unfused', 'peer', 'fused'"),
    "unknown kind": (
        '"fused"',
        '"fuzed"',
        r"variant\[1\]\.kind = 'fuzed' .*'unfused', 'peer', 'fused'",
    ),
    "unknown baseline": (
        'baseline = "unfused"',
        'baseline = "x"',
        r"stopped\.baseline = 'x' .*baseline variant: unfused",
    ),
    "fused baseline": ('baseline = "unfused"', 'baseline = "stopped"', r"stopped\.baseline"),
    "name used twice": ('name = "stopped"', 'name = "unfused"', r"'unfused' .*used once"),
    "name that leads elsewhere": ('name = "stopped"', 'name = "../x"', r"name = '\.\./x'"),
    "resumed at the end": ("= 5", "= 10", r"stopped\.resume_after = 10 .*less than .*10"),
    "resumed at 0": ("= 5", "= 0", r"resume_after = 0 .*>= 1"),
    "no recipe": (
        "[model]",
        "[float8]\nrecipes = []\n[model]",
        r"float8\.recipes = \[\] .*one recipe",
    ),
    "no list": (
        "[model]",
        '[float8]\nrecipes = "mxfp8"\n[model]',
        r"float8\.recipes = 'mxfp8' .*a list",
    ),
    "no recipes": ("[model]", "[float8]\n[model]", r"float8\.recipes is missing"),
    "unknown recipe": (
        "[model]",
        '[float8]\nrecipes = ["current", "fp8"]\n[model]',
        r"float8\.recipes\[1\] = 'fp8' .*'delayed', 'current', 'block_128x128', .*'mxfp8'",
    ),
    "a recipe twice": (
        "[model]",
        '[float8]\nrecipes = ["mxfp8", "mxfp8"]\n[model]',
        r"float8\.recipes = 'mxfp8' .*each recipe once",
    ),
    "unknown key of float8": (
        "[model]",
        '[float8]\nrecipes = ["mxfp8"]\nhistory = 3\n[model]',
        r"float8\.history = 3 .*unknown key; .*recipes",
    ),
    "scaled products of odd sizes": (
        "[model]",
        '[float8]\nrecipes = ["current"]\nscaled_matmul = true\n[model]',
        r"model\.width = 8 .*multiple of 16",
    ),
    "a recipe of a variant": (
        '"unfused"\nresume_after = 5',
        '"unfused"\nrecipe = "mxfp8"',
        r"variant\[1\]\.recipe = 'mxfp8' .*unknown key",
    ),
    "no ranks": ("resume_after = 5", "ranks = 0", r"ranks = 0 .*>= 1"),
    "ranks and resumed": ("= 5", "= 5\nranks = 2", r"resume_after = 5 .*ranks"),
    "ranks and views": (
        "resume_after = 5",
        'ranks = 2\nlayout = "groups_and_views"',
        r"layout = 'groups_and_views' .*'whole'",
    ),
    "ranks and external masters": (
        "resume_after = 5",
        'ranks = 2\nmasters = "external"',
        r"masters = 'external' .*'created'",
    ),
    "no TOML": ("seed = 1", "seed = ", r"cannot be read as TOML"),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_config_is_refused_by_name(tmp_path, old, new, message):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"(?s)run\.toml: .*{message}"):
        read_config(path)


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
    with pytest.raises(ConfigError, match=r"variant = 'stopped' .*mxfp8\.unfused, mxfp8\.stopped"):
        config.find_variant("stopped")
    plain = read_config(write(tmp_path, GOOD))
    assert plain.runs == plain.variant


def test_the_recipes_are_those_of_float8():
    assert get_args(Recipe) == tuple(RECIPES)


MISFITS = {
    "remainders": (
        "resume_after = 5",
        'masters = "remainders"',
        r"stopped\.masters = 'remainders'",
    ),
    "views": ("resume_after = 5", 'layout = "groups_and_views"', r"stopped\.layout = .*`ranks`"),
    "rounding": (
        'kind = "unfused"',
        'kind = "unfused"\nrounding = "nearest_away"',
        r"unfused\.rounding = 'nearest_away' .*'nearest_even'",
    ),
    "peer": (
        'kind = "unfused"',
        'kind = "peer"\nlibrary = "transformer_engine"',
        r"unfused\.kind = 'peer' .*'unfused' or 'fused'",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), MISFITS.values(), ids=MISFITS)
def test_variants_that_no_recipe_goes_with_are_refused(tmp_path, old, new, message):
    read_config(write(tmp_path, GOOD.replace(old, new, 1)))
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, FLOAT8.replace(old, new, 1)))


def test_a_config_without_variants_is_refused(tmp_path):
    path = write(tmp_path, "variant = []\n" + GOOD.partition("[[variant]]")[0])
    with pytest.raises(ConfigError, match=r"variant = \[\] .*at least one"):
        read_config(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        read_config(tmp_path / "none.toml")


def test_an_unknown_variant_is_refused_with_the_known_ones(tmp_path):
    config = read_config(write(tmp_path, GOOD))
    with pytest.raises(ConfigError, match=r"variant = 'x' .*unfused, stopped"):
        config.find_variant("x")


PLAIN = [path for path in CONFIGS if not path.stem.endswith(("_te", "_fp8"))]


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
        *("gpt_124m", "gpt_124m_fp8", "gpt_124m_te", "gpt_tiny", "gpt_tiny_fp8")
    ]


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
