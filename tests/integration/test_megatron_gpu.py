"""Megatron-Core on GPUs: captured steps, states in host memory, FusedAdam in Megatron-FSDP."""

import json
import multiprocessing

import megatron_fsdp_ranks
import pytest
import torch
from how_to import needs
from tiny_runs import tiny_run, variant

from megaopt.lab.regression.command import regress

pytestmark = [pytest.mark.gpu, pytest.mark.long, needs("megatron")]
STOCK = tiny_run(
    8,
    batch_size=4,
    device="cuda",
    optimizer="warmup_steps = 2\nbeta2 = 0.95\nweight_decay = 0.1",
    megatron="ranks = 1\nmicro_batch_size = 2\nbucket_size = 2500\nclip_grad = 0.1",
) + variant("stock", "stock", inner="transformer_engine")


def ours(name, baseline="stock", **keys):
    return variant(name, "megaopt", baseline=baseline, contract="te", **keys)


GRAPHS = ours("eager") + ours("graph", cuda_graph=True)
GRAPHS += ours("precision_aware_graph", mode="precision_aware", cuda_graph=True)
HOST = {"cpu_offload": True, "resume_after": 4}
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
FORMATS = {
    "bf16": dict.fromkeys(BLOCKS, "bfloat16"),
    "8 bits": {"store_param_remainders": True, **BLOCKS},
}


def regressed(folder, variants):
    """Stock and these variants, in one run of the command, by name."""
    (folder / "tiny.toml").write_text(STOCK + variants, encoding="utf-8")
    regress(folder / "tiny.toml", out=folder / "out")
    record = json.loads((folder / "out" / "tiny" / "record.json").read_text(encoding="utf-8"))
    return record["variants"]


def assert_as_their_baselines(found, *names):
    told = {name: (found[name]["failure"], found[name]["identical"]) for name in names}
    assert told == dict.fromkeys(names, (None, True))


@needs("transformer_engine")
def test_a_captured_step_has_the_bits_of_transformer_engines_eager_one(tmp_path):
    """Over Megatron's own wrapper, with its norm on the device; clipped."""
    found = regressed(tmp_path, GRAPHS)
    assert_as_their_baselines(found, "eager", "graph", "precision_aware_graph")
    assert len(set(found["stock"]["losses"])) == 8


@needs("transformer_engine")
def test_states_in_host_memory_have_the_bits_of_stocks_and_are_resumed(tmp_path):
    """Moments, and all states; straight, and from Megatron's checkpoint after step 4."""
    hosts = ours("straight", cpu_offload=True) + ours("main_shards", **HOST)
    hosts += ours("precision_aware", mode="precision_aware", **HOST)
    found = regressed(tmp_path, hosts)
    assert_as_their_baselines(found, "straight", "main_shards", "precision_aware")


@needs("transformer_engine")
@pytest.mark.parametrize("name", FORMATS)
def test_moments_of_fewer_bits_in_host_memory_have_the_bits_of_the_card(tmp_path, name):
    """All states, resumed from Megatron's checkpoint after step 4."""
    formats = {"mode": "precision_aware", **FORMATS[name]}
    on_card = variant("card", "megaopt", contract="te", **formats)
    found = regressed(tmp_path, on_card + ours("host", "card", **formats, **HOST))
    assert_as_their_baselines(found, "host")
    assert found["card"]["losses"] != found["stock"]["losses"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fused_adam_in_megatron_fsdp_has_torchs_bits(tmp_path):
    """Its DTensors are cut unevenly; contract torch is torch's fused AdamW."""
    context, found = multiprocessing.get_context("spawn"), {}
    for kind in ("torch", "megaopt"):
        replies = context.Queue()
        ranks = [
            context.Process(
                target=megatron_fsdp_ranks.run, args=(rank, 2, kind, tmp_path / kind, replies)
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        found[kind] = dict(replies.get(timeout=120) for _ in ranks)
        for rank in ranks:
            rank.join(60)
    assert found["torch"] == found["megaopt"]
    assert len(set(found["torch"][0]["losses"])) == 4
    assert any(found["torch"][0]["exp_avg"])
