import json
import multiprocessing
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from tiny_runs import tiny_run, variant

from megaopt.lab.configs import find_config
from megaopt.lab.regression.command import regress
from megaopt.lab.regression.megatron.config import read_megatron_run
from megaopt.lab.regression.plan import plan_trials
from megaopt.lab.regression.processes import Group, RankError, RankTask
from megaopt.lab.regression.regression import is_installed
from megaopt.lab.source import describe_source

needs_megatron = pytest.mark.skipif(
    not (is_installed("megatron.core") and is_installed("psutil")),
    reason="needs megatron-core, psutil",
)
needs_plug = pytest.mark.skipif(
    not is_installed("megaopt.integration.megatron"), reason="needs megaopt.integration.megatron"
)


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    """Processes are copies of one that has imported Megatron; another test's may not have."""
    forkserver._forkserver._stop()


OPTIMIZER = "warmup_steps = 2\nbeta2 = 0.95\nweight_decay = 0.1"
MEGATRON = "ranks = 2\nmicro_batch_size = 1\nbucket_size = 2500"
STOCK = variant("stock", "stock", inner="unfused")
TWICE = STOCK + "runs = 2\n"
RESUMED = STOCK.replace('"stock"', '"resumed"', 1) + 'baseline = "stock"\nresume_after = 2\n'
AT_1 = STOCK.replace('"stock"', '"at_1"', 1) + "resume_after = 2\nresume_ranks = 1\n"
OURS = """[[variant]]
name = "{name}"
kind = "megaopt"
baseline = "{baseline}"
backend = "reference"
{keys}
"""


@pytest.fixture
def write(tmp_path):
    def write(variants, steps=4, patience=300):
        path = tmp_path / "tiny.toml"
        tables = {"optimizer": OPTIMIZER, "megatron": MEGATRON}
        text = tiny_run(steps, batch_size=4, run=f"patience = {patience}", **tables)
        path.write_text(text + variants, encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(write, tmp_path):
    """Runs variants; the exit status and the record."""

    def run(variants, perturb=None):
        status = regress(write(variants), out=tmp_path / "out", perturb=perturb)
        text = (tmp_path / "out" / "tiny" / "record.json").read_text(encoding="utf-8")
        return status, json.loads(text)

    return run


@pytest.mark.slow
@needs_megatron
@needs_plug
def test_pipeline_stages_and_times_over_runs(tmp_path):
    """Each stage has its part of the weights; of two runs the times are joined."""
    tables = {"optimizer": OPTIMIZER, "megatron": MEGATRON + "\npipeline_parallel = 2"}
    text = tiny_run(3, batch_size=4, **tables).replace("layers = 1", "layers = 2")
    text += STOCK + OURS.format(name="ours", baseline="stock", keys="runs = 2")
    (tmp_path / "tiny.toml").write_text(text, encoding="utf-8")
    assert regress(tmp_path / "tiny.toml", out=tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / "tiny" / "record.json").read_text(encoding="utf-8"))
    found = record["variants"]
    stages = {name.partition(" (")[2].partition(")")[0] for name in found["ours"]["digests"]}
    assert stages == {"pipeline stage 0", "pipeline stage 1"}
    assert list(found) == ["stock", "ours", "ours.2"]
    times = record["times"]["ours"]
    own = [found[name]["measured"]["step_milliseconds"] for name in ("ours", "ours.2")]
    spread = times["step_milliseconds"]
    assert (spread["least"], spread["most"]) == (min(own), max(own))
    assert spread["median"] == sum(own) / 2
    other = found["stock"]["measured"]["step_milliseconds"]
    assert spread["of_baseline"] == spread["median"] / other
    assert times["runs"] == 2


@pytest.mark.slow
@needs_megatron
def test_stock_repeats_itself_and_resumes(run, tmp_path):
    # bf16 weights are their cast masters already
    status, record = run(TWICE + RESUMED + "cast_after_load = true\n" + AT_1)
    assert status == 0
    assert record["finished"]
    assert record["identical"]
    variants = record["variants"]
    assert record["source"] == describe_source()
    assert list(variants) == ["stock", "stock.2", "resumed", "at_1"]
    assert [each["identical"] for each in variants.values()] == [None, True, True, None]
    assert [each["baseline"] for each in variants.values()] == [None, "stock", "stock", None]
    stock = variants["stock"]
    losses = [float.fromhex(loss) for loss in stock["losses"]]
    assert len(losses) == 4
    # an untrained model over 256 bytes: ln 256 = 5.545
    assert all(5 < loss < 6 for loss in losses)
    assert losses[-1] < losses[0]
    assert all(float.fromhex(norm) > 0 for norm in stock["grad_norms"])
    # one process sums what two did in another order, and has the same shards put together
    assert variants["at_1"]["digests"].keys() == stock["digests"].keys()
    summaries = variants["at_1"]["measured"]["summaries"]
    two = stock["measured"]["summaries"]
    assert len(summaries) == 1
    assert sum(each["owned_elements"] for each in two) == summaries[0]["parameters"]
    assert len(two[0]["buckets"][0]) > 1
    # masters and two moments of 4 bytes
    for each in (*summaries, *two):
        assert each["state_bytes"] == 12 * each["owned_elements"]
    for name in ("losses.png", "times.png"):
        assert (tmp_path / "out" / "tiny" / name).read_bytes().startswith(b"\x89PNG")


@needs_megatron
@pytest.mark.slow
def test_a_flipped_bit_is_noticed(run):
    status, record = run(TWICE, perturb=2)
    assert status == 1
    assert not record["identical"]
    found = record["first_difference"]
    assert (found["step"], found["variant"], found["baseline"]) == (2, "stock.2", "stock")
    assert found["tensor"] == "embedding.word_embeddings.weight master"
    assert len(found["bits"]) == len(found["baseline_bits"]) == 32
    assert found["bits"] != found["baseline_bits"]


NAMES = ("muon_tensor", "muon_pipeline", "muon_experts", "galore")


@needs_megatron
@needs_plug
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_configs_of_rules_for_matrices(tmp_path, name):
    """Muon on tensor-parallel ranks, pipeline stages and ranks of experts; GaLore on shards."""
    assert regress(find_config(Path(f"megatron_gpt_tiny_{name}")), out=tmp_path) == 0


GALORE = """
[galore]
rank = 2
update_proj_gap = 5
"""
WHOLE = variant("whole", "megaopt", layout="whole")
EXPERTS = "\nclip_grad = 0.0\nexperts = 2\nexpert_parallel = 2"


@needs_megatron
@needs_plug
@pytest.mark.slow
@pytest.mark.parametrize("megatron", ["\nclip_grad = 0.0", EXPERTS], ids=["dense", "experts"])
def test_galores_shards_have_the_bits_of_whole_weights_but_for_a_flipped_one(tmp_path, megatron):
    """Also resumed between refreshes; the bit is flipped later, in the shards that go on."""
    tables = {"optimizer": OPTIMIZER, "megatron": MEGATRON + megatron}
    text = tiny_run(4, batch_size=4, **tables) + GALORE + WHOLE
    text += OURS.format(name="shards", baseline="whole", keys="")
    text += OURS.format(name="resumed", baseline="whole", keys="resume_after = 2")
    (tmp_path / "tiny.toml").write_text(text, encoding="utf-8")
    assert regress(tmp_path / "tiny.toml", out=tmp_path / "out", perturb=3) == 1
    record = json.loads((tmp_path / "out" / "tiny" / "record.json").read_text(encoding="utf-8"))
    found, first = record["variants"], record["first_difference"]
    assert [each["failure"] for each in found.values()] == [None, None, None]
    assert [each["identical"] for each in found.values()] == [None, False, True]
    assert (first["step"], first["variant"]) == (3, "shards")
    assert first["tensor"] == "embedding.word_embeddings.weight master"
    kinds = {name.rsplit(" ", 1)[1] for name in found["whole"]["digests"]}
    assert {"projection", "captured_energy", "exp_avg", "exp_avg_sq", "weight"} <= kinds


@pytest.mark.slow
@needs_megatron
@needs_plug
def test_muon_has_the_bits_of_megatrons_own_under_its_contract_alone(tmp_path):
    tables = {"optimizer": OPTIMIZER, "megatron": MEGATRON + '\noptimizer = "muon"'}
    whole = 'layout = "whole"\n'
    text = tiny_run(2, batch_size=4, **tables) + STOCK + whole
    text += OURS.format(name="eo", baseline="stock", keys=whole + 'contract = "eo"')
    text += OURS.format(name="ieee", baseline="stock", keys=whole)
    (tmp_path / "tiny.toml").write_text(text, encoding="utf-8")
    assert regress(tmp_path / "tiny.toml", out=tmp_path / "out") == 1
    record = json.loads((tmp_path / "out" / "tiny" / "record.json").read_text(encoding="utf-8"))
    found = record["variants"]
    assert [found[name]["identical"] for name in ("eo", "ieee")] == [True, False]
    kinds = {tuple(name.rsplit(" ", 1)) for name in found["eo"]["digests"]}
    matrices = {name for name, kind in kinds if kind == "momentum_buffer"}
    assert matrices == {
        name for name, kind in kinds if ".linear_" in name and name.endswith(".weight")
    }  # fmt: skip


def assert_identical(result):
    status, record = result
    assert record["first_difference"] is None
    assert {each["failure"] for each in record["variants"].values()} == {None}
    assert status == 0


PRECISION_AWARE = 'mode = "precision_aware"\n'
RESUMES = "resume_after = 2\n"


@needs_megatron
@needs_plug
def test_ours_equals_stock(run):
    aware = OURS.format(name="precision_aware", baseline="stock", keys=PRECISION_AWARE)
    assert_identical(run(STOCK + aware))


@needs_megatron
@needs_plug
@pytest.mark.slow
def test_ours_equals_stock_in_every_mode_and_on_other_ranks(run):
    variants = STOCK + AT_1
    for name, keys in (("main_shards", ""), ("precision_aware", PRECISION_AWARE)):
        variants += OURS.format(name=name, baseline="stock", keys=keys)
        resume = keys + RESUMES
        variants += OURS.format(name=f"{name}_resumed", baseline="stock", keys=resume)
        resume += "resume_ranks = 1\n"
        variants += OURS.format(name=f"{name}_at_1", baseline="at_1", keys=resume)
    assert_identical(run(variants))


@needs_megatron
@pytest.mark.slow
def test_a_variant_that_fails_is_told_and_the_others_go_on(run, capsys):
    # this contract has no backend on a CPU
    failing = OURS.format(name="failing", baseline="stock", keys='contract = "te"')
    status, record = run(failing + STOCK)
    assert status == 2
    assert not record["identical"]
    assert "rank " in record["variants"]["failing"]["failure"]
    assert "Error: " in record["variants"]["failing"]["failure"]
    assert record["variants"]["failing"]["identical"] is None
    assert record["variants"]["stock"]["failure"] is None
    assert "failed: failing" in capsys.readouterr().out


# --- the processes


@pytest.fixture
def group(write, tmp_path):
    """The group of a job, of the first so many of its two ranks; ended after the test."""
    groups = []

    def group(steps, patience, ranks=2):
        run = read_megatron_run(write(STOCK, steps=steps, patience=patience))
        job = plan_trials(run)[0].jobs[0]
        groups.append(Group([RankTask(run, job, "cpu", tmp_path, rank) for rank in range(ranks)]))
        groups[-1].start()
        return groups[-1]

    before = set(multiprocessing.active_children())
    yield group
    for each in groups:
        each.end()
    assert set(multiprocessing.active_children()) <= before


def wait(group, on_step=lambda step: None):
    while not group.look():
        on_step(group.steps)
        time.sleep(0.05)


@needs_megatron
@pytest.mark.slow
def test_ranks_that_wait_are_ended(group):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0 of stock failed|nothing for patience=5 s"):
        wait(group(steps=2, patience=5, ranks=1))
    assert time.monotonic() - began < 60


@needs_megatron
def test_a_killed_rank_ends_the_others(group):
    ranks = group(steps=100_000, patience=60)
    with pytest.raises(RankError, match="rank 1 of stock failed"):
        wait(ranks, lambda step: ranks.processes[1].kill() if step >= 2 else None)
