from pathlib import Path

import pytest
from pydantic import ValidationError

import megaopt
from megaopt.float8 import RECIPES
from megaopt.lab import cli, configs
from megaopt.lab.config import FusedVariant, UnfusedVariant, read_config
from megaopt.lab.regression import command
from megaopt.lab.toml_tables import ConfigError

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
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 3


# what is replaced, by what; the key that is told, what is allowed, and what it is
REFUSED = {
    "unknown key": ("seed = 1", "seed = 1\nsteeps = 3", "steeps", "not permitted", "3"),
    "unknown key in a table": ("heads = 2", "heads = 2\nhead = 2", "model.head", "", "2"),
    "name inside": ("seed = 1", 'seed = 1\nname = "x"', "name", "left out", "'x'"),
    "missing key": ("heads = 2", "", "model.heads", "required", "nothing"),
    "wrong type": ("steps = 10", 'steps = "10"', "steps", "a valid integer", "'10'"),
    "boolean": ("steps = 10", "steps = true", "steps", "a valid integer", "True"),
    "scalar for a table": ("seed = 1", "seed = 1\nfloat8 = 3", "float8", "dictionary", "3"),
    "beyond int32": ("= 10", "= 2147483648", "steps", "equal to 2147483647", "2147483648"),
    "odd width": ("width = 8", "width = 7", "model.width", "a multiple of heads = 2", "7"),
    "thousands of digits": ("= 256", f"= 0x{'f' * 5000}", "model.vocabulary_size", "", "int"),
    "NaN": ("_rate = 1", "_rate = nan", "optimizer.learning_rate", "a finite number", "nan"),
    "beta of one": ("_rate = 1", "_rate = 1\nbeta2 = 1", "optimizer.beta2", "less than 1", "1"),
    "unknown kind": ('"fused"', '"fuzed"', "variant.1", "'fused', 'galore', 'muon'", "'fuzed'"),
    "kind of many digits": ('"fused"', f"0x{'f' * 5000}", "kind", "a text", "int"),
    "unknown baseline": (
        *('baseline = "unfused"', 'baseline = "x"'),
        *("stopped.baseline", "a baseline variant: unfused", "'x'"),
    ),
    "name used twice": ('"stopped"', '"unfused"', "unfused.name", "one variant", "'unfused'"),
    "name that leads elsewhere": ('"stopped"', '"../x"', "variant.1.fused.name", "", "'../x'"),
    "recipe inside": ("= 5", '= 5\nrecipe = "current"', "recipe", "[float8] has", "'current'"),
    "resumed at the end": ("= 5", "= 10", "stopped.resume_after", "less than steps = 10", "10"),
    "no recipe": ("[model]", "[float8]\nrecipes = []\n[model]", "float8.recipes", "1 item", "[]"),
    "unknown recipe": (
        *("[model]", '[float8]\nrecipes = ["current", "fp8"]\n[model]'),
        *("float8.recipes.1", "'delayed', 'current', 'block_128x128' or 'mxfp8'", "'fp8'"),
    ),
    "a recipe twice": (
        *("[model]", '[float8]\nrecipes = ["mxfp8", "mxfp8"]\n[model]'),
        *("float8.recipes", "each recipe once", "('mxfp8', 'mxfp8')"),
    ),
    "scaled products of odd sizes": (
        *("[model]", '[float8]\nrecipes = ["current"]\nscaled_matmul = true\n[model]'),
        *("model.width", "a multiple of 16 with float8.scaled_matmul", "8"),
    ),
    "ranks and resumed": ("= 5", "= 5\nranks = 2", "resume_after", "left out with ranks", "5"),
    "remainders in fp8": (
        *("[model]", '[float8]\nrecipes = ["current"]\n[model]', "stopped.masters"),
        *("one of created, external under [float8]", "'remainders'"),
    ),
    "views in fp8": (
        *("[model]", '[float8]\nrecipes = ["current"]\n[model]', "stopped.layout"),
        *("one of whole under [float8]", "'groups_and_views'"),
    ),
    "ties away in fp8": (
        *("[model]", '[float8]\nrecipes = ["current"]\n[model]', "unfused.rounding"),
        *("one of nearest_even under [float8]", "'nearest_away'"),
    ),
    "galore baseline resumed": (
        *('kind = "galore"', 'kind = "galore"\nresume_after = 2', "alone.resume_after"),
        *("left out of a baseline", "2"),
    ),
    "galore without its table": (
        *("[galore]\nrank = 2\n", "", "galore", "a table, as a variant is 'galore'", "None"),
    ),
    "a peer in fp8": (
        *("[model]", '[float8]\nrecipes = ["current"]\n[model]', "beside.kind"),
        *("one of unfused, fused under [float8]", "'peer'"),
    ),
    "no variants": ("seed = 1", "seed = 1\nvariant = []", "variant", "at least 1 item", "[]"),
    "no TOML": ("seed = 1", "seed = ", "", "cannot be read as TOML: Invalid value", ""),
    "deep": ("= 1", f"= {'[' * 5000}{']' * 5000}", "", "as TOML: nested too deeply", ""),
    "deep values": ("seed = 1", f"seed.{'.'.join('a' * 2000)} = 1", "seed", "", "of type dict"),
    "too large": ("seed = 1", f"seed = 1\n# {'x' * 2**16}", "", "more than 65536 bytes", ""),
}
# what a case needs beside GOOD
ALSO = {
    "views in fp8": ("resume_after = 5", 'layout = "groups_and_views"'),
    "ties away in fp8": ('kind = "unfused"', 'kind = "unfused"\nrounding = "nearest_away"'),
    **dict.fromkeys(
        ("galore baseline resumed", "galore without its table"),
        (
            "[[variant]]",
            '[galore]\nrank = 2\n[[variant]]\nname = "alone"\nkind = "galore"\n[[variant]]',
        ),
    ),
    "remainders in fp8": ("resume_after = 5", 'masters = "remainders"'),
    "a peer in fp8": (
        "[[variant]]",
        '[[variant]]\nname = "beside"\nkind = "peer"\nlibrary = "transformer_engine"\n[[variant]]',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_config_is_refused_by_name(tmp_path, case):
    old, new, key, allowed, value = REFUSED[case]
    text = GOOD.partition("[[variant]]")[0] if case == "no variants" else GOOD
    if case in ALSO:
        text = text.replace(*ALSO[case], 1)
        read_config(write(tmp_path, text))
    assert old in text
    path = write(tmp_path, text.replace(old, new, 1))
    with pytest.raises(ConfigError) as raised:
        read_config(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in (key, allowed, value):
        assert part in message.removeprefix(f"{path}: ")
    assert not value or message.partition(", got ")[2].endswith(value)


def test_every_wrong_key_has_a_line_of_its_own(tmp_path):
    path = write(tmp_path, GOOD.replace("heads = 2", 'head = 2\n"\\u001b" = 1', 1))
    with pytest.raises(ConfigError) as raised:
        read_config(path)
    keys = [line.removeprefix(f"{path}: ").split(":")[0] for line in str(raised.value).split("\n")]
    assert keys == ["model.heads", "model.head", r"model.'\x1b'"]


@pytest.mark.parametrize("name", ["...toml", "..toml"])
def test_a_file_whose_name_is_dots_is_refused(tmp_path, name):
    """Its run's folder would be the one above --out, or --out itself."""
    path = tmp_path / name
    path.write_text(GOOD, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"name: .*, got '.+'"):
        read_config(path)


PLAIN = [
    path
    for path in CONFIGS
    if not path.stem.endswith(("_te", "_fp8", "_galore", "_galore_ranks", "_muon"))
]


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

    def read_run(path):
        taken.append(path)
        raise ConfigError("read")

    monkeypatch.setattr(command, "read_run", read_run)
    assert cli.main(["regress"]) == cli.main(["regress", "gpt_tiny_fp8"]) == 2
    assert [path.name for path in taken] == ["gpt_tiny.toml", "gpt_tiny_fp8.toml"]
    assert all(path.is_file() for path in taken)


def test_the_version_is_shown_without_the_commands_packages(capsys, monkeypatch):
    monkeypatch.setattr(cli, "PACKAGES", ("nothing_of_this_name",))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megaopt {megaopt.__version__}\n"
