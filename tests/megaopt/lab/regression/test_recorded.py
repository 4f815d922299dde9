"""A run's losses beside those that were recorded of its config."""

from pathlib import Path

import pytest

from megaopt.lab.config import read_config
from megaopt.lab.configs import find_config
from megaopt.lab.regression import record

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(params=record.recorded())
def name(request):
    return request.param


def losses_of(name, processor):
    return {
        variant: float.fromhex(loss)
        for variant, loss in record.recorded()[name]["losses"][processor].items()
    }


def test_a_record_is_of_the_config_as_it_is(name):
    path = find_config(Path(f"{name}.toml"))
    assert record.recorded()[name]["config"] == record.digest_of(path)
    variants = [variant.name for variant in read_config(path).runs]
    for processor in record.recorded()[name]["losses"]:
        assert sorted(losses_of(name, processor)) == sorted(variants)


def test_a_runs_losses_are_found_by_every_bit(name):
    path = find_config(Path(f"{name}.toml"))
    losses = losses_of(name, "AVX2")
    found = record.describe_losses(path, losses)
    assert found.startswith("losses: those recorded with AVX2 and torch")
    losses["unfused"] += 2.0**-22
    found = record.describe_losses(path, losses)
    assert found.startswith("losses: not those recorded with torch")


def test_the_page_shows_the_recorded_losses():
    text = (REPOSITORY / "docs" / "regression.md").read_text(encoding="utf-8")
    rows = [line.strip(" │").split("│") for line in text.splitlines() if line.startswith("    │")]
    shown = {row[0].strip(): row[2].strip() for row in rows}
    losses = losses_of("gpt_tiny", "AVX512")
    assert shown == {variant: f"{loss:.9g}" for variant, loss in losses.items()}
    assert record.recorded()["gpt_tiny"]["torch"] in text
