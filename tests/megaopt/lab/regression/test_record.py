import json
import platform

import pytest
import torch

from megaopt.lab.regression.command import regress
from megaopt.lab.source import describe_source
from megaopt.lab.training.text import load_corpus

FORMS = {
    "reference": ("unfused", {"backend": "reference"}),
    "remainders": ("ties_away", {"backend": "reference", "masters": "remainders"}),
}


@pytest.fixture
def run(write_run, tmp_path, here):
    def run(perturb=None):
        status = regress(write_run(steps=3, **FORMS), out=tmp_path / "out", perturb=perturb)
        text = (tmp_path / "out" / "tiny" / "record.json").read_text(encoding="utf-8")
        return status, json.loads(text)

    return run


def test_an_identical_run_is_recorded(run, tmp_path):
    status, record = run()
    assert status == 0
    assert record["identical"] is True
    assert record["first_difference"] is None
    assert record["source"] == describe_source()
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["python"] == platform.python_version()
    assert record["hardware"]["device"] == "cpu"
    assert record["hardware"]["cores"]
    assert record["config"]["steps"] == 3
    assert record["config"]["model"]["width"] == 16
    assert record["config"]["variant"][2]["baseline"] == "unfused"
    assert record["corpus"]["sha256"] == load_corpus().sha256
    names = ["unfused", "ties_away", "reference", "remainders"]
    assert list(record["variants"]) == names
    baselines = [record["variants"][name]["baseline"] for name in names]
    assert baselines == [None, None, "unfused", "ties_away"]
    assert (tmp_path / "out" / "tiny" / "losses.png").read_bytes().startswith(b"\x89PNG")
    variants = record["variants"]
    losses = [float.fromhex(loss) for loss in variants["reference"]["losses"]]
    assert len(losses) == 3
    # an untrained model over 256 bytes: ln 256 = 5.545
    assert all(5 < loss < 6 for loss in losses)
    assert [loss.hex() for loss in losses] == variants["unfused"]["losses"]
    for name, baseline in (("reference", "unfused"), ("remainders", "ties_away")):
        found = variants[name]["digests"]
        assert found == variants[baseline]["digests"]
        assert variants[name]["identical"] is True
        assert len(set(found.values())) == len(found)
        assert {len(digest) for digest in found.values()} == {32}
        assert "norm.weight exp_avg" in found


def test_a_difference_is_recorded(run):
    status, record = run(perturb=2)
    assert status == 1
    assert record["identical"] is False
    assert record["perturb"] == 2
    found = record["first_difference"]
    assert list(found) == [
        *("step", "variant", "baseline", "tensor", "bits", "baseline_bits"),
    ]
    assert (found["step"], found["variant"]) == (2, "reference")
    assert found["tensor"] == "token_embedding.weight master"
    assert record["variants"]["reference"]["first_difference"] == found
    assert record["variants"]["reference"]["identical"] is False
    assert record["variants"]["remainders"]["identical"] is True
    assert record["variants"]["unfused"]["identical"] is None
