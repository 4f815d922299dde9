"""A peer as a baseline: its optimizer owns the weights, and is compared like any other."""

import importlib.util

import pytest
from tiny_runs import fused, tiny_run, variant

from megaopt import FusedAdam
from megaopt.lab.regression import fused as owners

OPTIMIZER = "warmup_steps = 0\nbeta1 = 0.9\nbeta2 = 0.95\neps = 1e-8\nweight_decay = 0.1"
CONFIG = (
    tiny_run(3, learning_rate=0.01, optimizer=OPTIMIZER)
    + variant("theirs", "peer", library="transformer_engine")
    + fused("ours", "theirs")
)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def stand_in(**options):
    """An optimizer with TransformerEngine's face, which a CPU can run."""
    return lambda groups, config: FusedAdam(
        groups,
        betas=(config.beta1, config.beta2),
        master_weights=True,
        backend="reference",
        **options,
    )


@pytest.mark.parametrize(("options", "status"), [({}, 0), ({"eps": 1e-7}, 1)], ids=str)
def test_a_peer_is_compared_in_every_bit(megaopt, config, here, monkeypatch, options, status):
    monkeypatch.setitem(owners.LIBRARIES, "transformer_engine", stand_in(**options))
    found, out, _ = megaopt("regress", config)
    assert found == status
    assert ("step 1" in out) == bool(status)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is installed"
)
def test_a_peer_that_is_not_installed_is_named(megaopt, config):
    """And there is nothing to compare ours with; in processes of their own."""
    status, out, _ = megaopt("regress", config)
    assert status == 2
    missing = "variant = 'theirs' cannot run here: No module named 'transformer_engine'"
    assert f"rank 0 of theirs failed: megaopt.lab.toml_tables.ConfigError: {missing}" in out
    assert "failed: ours: its baseline theirs failed" in out
