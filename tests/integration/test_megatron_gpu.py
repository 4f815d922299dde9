"""Megatron-Core on GPUs: captured steps, states in host memory, FusedAdam in Megatron-FSDP."""

import json
import multiprocessing

import megatron_fsdp_ranks
import pytest
import torch
from how_to import needs
from tiny_runs import tiny_run, variant

from megaopt.commands.regression.command import regress

pytestmark = [pytest.mark.gpu, needs("megatron")]
STOCK = tiny_run(
    8,
    batch_size=4,
    device="cuda",
    optimizer="warmup_steps = 2\nbeta2 = 0.95\nweight_decay = 0.1",
    megatron="ranks = 1\nmicro_batch_size = 2\nbucket_size = 2500\nclip_grad = 0.1",
) + variant("stock", "stock", inner="transformer_engine")


def ours(name, baseline="stock", **keys):
    return variant(name, "megaopt", baseline=baseline, contract="te", **keys)


def assert_all_as_their_baselines(folder, text):
    """Runs a config; its variants in the record."""
    (folder / "tiny.toml").write_text(text, encoding="utf-8")
    status = regress(folder / "tiny.toml", folder / "out", None)
    record = json.loads((folder / "out" / "tiny" / "record.json").read_text(encoding="utf-8"))
    found = record["variants"]
    assert {name: each["failure"] for name, each in found.items()} == dict.fromkeys(found)
    assert status == 0
    return found


@needs("transformer_engine")
def test_a_captured_step_has_the_bits_of_transformer_engines_eager_one(tmp_path):
    """Over Megatron's own wrapper, with its norm on the device; clipped."""
    text = STOCK + ours("eager") + ours("main_shards", cuda_graph=True)
    text += ours("precision_aware", mode="precision_aware", cuda_graph=True)
    found = assert_all_as_their_baselines(tmp_path, text)
    assert len(set(found["stock"]["losses"])) == 8


BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
LOW_BIT = {"mode": "precision_aware", "store_param_remainders": True, **BLOCKS}
HOST = {"cpu_offload": True, "resume_after": 4}


@needs("transformer_engine")
def test_states_in_host_memory_have_the_bits_of_states_on_the_card_and_are_resumed(tmp_path):
    """Straight, and from Megatron's checkpoint after step 4; fp32 states, bf16, 8 bits."""
    text = STOCK + ours("straight", cpu_offload=True) + ours("main_shards", **HOST)
    text += ours("precision_aware", mode="precision_aware", **HOST)
    halves = {"mode": "precision_aware"} | dict.fromkeys(BLOCKS, "bfloat16")
    for name, formats in (("bf16", halves), ("low_bit", LOW_BIT)):
        text += variant(name, "megaopt", contract="te", **formats)
        text += ours(f"{name}_host", name, **formats, **HOST)
    found = assert_all_as_their_baselines(tmp_path, text)
    assert len({tuple(found[name]["losses"]) for name in ("stock", "bf16", "low_bit")}) == 3


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
