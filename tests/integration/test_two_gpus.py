"""DTensors on two cards, over NCCL: the bits of one process."""

import shutil

import pytest
import torch
from disturbed import disturbed
from fsdp2_ranks import assert_same_on_all
from fsdp2_uses import USES, resumed_beside_one, stepped_beside_one
from galore_whole_ranks import placed_galore
from llama_ranks import OPTIMIZERS, trained_and_resumed
from muon_ranks import placed
from ranks import Ranks
from runs import BF16, MASTER, REMAINDERS, assert_same

from megaopt import FusedAdam, FusedLion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
SHAPES = (
    (768, 3072), (1000, 77), (7, 5), (2304, 768), (33,), (1, 40), (513, 1024), (8, 96, 64),
    (300, 300),
)  # fmt: skip
"""Wide, uneven, tiny, a vector, a row, experts, a square."""
CASES = {
    "adam": (placed, {"optimizer": FusedAdam, "weights": BF16, **MASTER}),
    "adam, remainders": (placed, {"optimizer": FusedAdam, "weights": BF16, **REMAINDERS}),
    "lion": (placed, {"optimizer": FusedLion, "weights": BF16, **MASTER}),
    "muon": (placed, {"weights": BF16, **MASTER}),
    "muon, block_int8": (
        placed, {"weights": BF16, **MASTER, "momentum_buffer_dtype": "block_int8"},
    ),
    "muon, fp16, auto": (
        placed, {"weights": BF16, **MASTER, "precision": "fp16", "method": "auto"},
    ),
    "muon, fp16, normuon, remainders": (
        placed,
        {"weights": BF16, **REMAINDERS, "precision": "fp16", "second_moment": "normuon"},
    ),
    "muon, drawn": (placed, {"weights": BF16, "weight_rounding": "stochastic", "seed": 7}),
    "galore": (
        placed_galore, {"weights": BF16, **MASTER, "proj_type": "left", "precision": "bf16"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_two_cards(tmp_path_factory):
    """Calls a function on two ranks with a card each; what it returned on each."""
    pools = []

    def run(function, *arguments, **named):
        if not pools or pools[-1].failed:
            folder = tmp_path_factory.mktemp("ranks")
            pools.append(Ranks(2, folder, backend="cpu:gloo,cuda:nccl"))
        return pools[-1](function, *arguments, **named)

    yield run
    for pool in pools:
        pool.close(kill=True)  # nobody needs NCCL to end its groups one after another


@pytest.mark.parametrize("placements", ["rows", "by turns"])
@pytest.mark.parametrize("name", CASES)
def test_two_cards_have_the_bits_of_one(on_two_cards, name, placements):
    """Where streams are late by chance, and memory lies elsewhere in each step."""
    made, options = CASES[name]
    step = {"clip_norm": 1.0, "shapes": SHAPES, "device": "cuda"}
    split = {"placements": placements, "sizes": (2,)}
    found = on_two_cards(disturbed, 0, made, options, 12, **split, **step)
    assert_same_on_all(found, made(options, 12, **step))


@pytest.mark.parametrize("kind", ["adam", "muon", "galore"])
@pytest.mark.parametrize("use", [name for name, use in USES.items() if use.ranks == 2])
def test_fsdp2_as_used(on_two_cards, use, kind):
    """By the gradients that it makes, steps have the bits of one process."""
    step = (stepped_beside_one, use, kind)
    for untouched in on_two_cards(disturbed, 0, *step, device="cuda"):
        assert not untouched


@pytest.mark.parametrize(("use", "kind"), [("experts", "muon"), ("mixed, bf16", "adam")])
def test_a_run_goes_on_from_a_checkpoint(on_two_cards, tmp_path, use, kind):
    """The run goes on while it is saved."""
    saves = (resumed_beside_one, use, kind, str(tmp_path / "saved"), True)
    for straight, resumed in on_two_cards(disturbed, 0, *saves, device="cuda"):
        assert_same(resumed, straight)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(5))
def test_a_llama_goes_on_as_if_it_had_not_stopped(start, tmp_path):
    """200 steps of each optimizer under FSDP2, saved 20 before the end; a start has new processes.

    It needs the cards alone: where they change between processes, each message waits for both.
    """
    ranks = Ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl", patience=600)
    try:
        for name in OPTIMIZERS:
            found = ranks(disturbed, start, trained_and_resumed, name, 200, tmp_path / "saved")
            for straight, resumed in found:
                assert len(straight) == 200
                assert resumed == straight[-20:], name
                assert straight[-1] < straight[0], name
            shutil.rmtree(tmp_path / "saved")  # 5 GB
            print(f"start {start}, {name}: as if it had not stopped")
    finally:
        ranks.close(kill=True)
