"""A peer as a baseline: its optimizer owns the weights, and is compared like any other."""

from pathlib import Path

import pytest
from tiny_runs import fused, tiny_run, variant

from megaopt import FusedAdam
from megaopt.commands import cli
from megaopt.commands.regression import peer

OPTIMIZER = "warmup_steps = 0\nbeta1 = 0.9\nbeta2 = 0.95\neps = 1e-8\nweight_decay = 0.1"
CONFIG = (
    tiny_run(3, learning_rate=0.01, optimizer=OPTIMIZER)
    + variant("theirs", "peer", library="transformer_engine")
    + fused("ours", "theirs")
)


def stand_in(**options):
    """An optimizer with TransformerEngine's face, which a CPU can run."""
    return lambda groups, config: FusedAdam(
        groups,
        betas=(config.beta1, config.beta2),
        master_weights=True,
        backend="reference",
        **options,
    )


def run(tmp_path: Path) -> int:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    return cli.main(["regress", str(config), "--out", str(tmp_path)])


@pytest.mark.parametrize(("options", "status"), [({}, 0), ({"eps": 1e-7}, 1)], ids=str)
def test_a_peer_is_compared_in_every_bit(tmp_path, monkeypatch, capsys, options, status):
    monkeypatch.setitem(peer.LIBRARIES, "transformer_engine", stand_in(**options))
    assert run(tmp_path) == status
    assert ("step 1" in capsys.readouterr().out) == bool(status)


def test_a_peer_that_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    def missing(groups, config):
        raise ModuleNotFoundError("No module named 'transformer_engine'")

    monkeypatch.setitem(peer.LIBRARIES, "transformer_engine", missing)
    assert run(tmp_path) == 2
    message = capsys.readouterr().err
    assert "variant = 'theirs' cannot run here: No module named 'transformer_engine'" in message
