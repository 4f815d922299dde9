"""FusedMuon's DTensors: each matrix is made by one rank, and has the bits of one process."""

import pytest
from fsdp2_ranks import assert_same_on_all, trained
from muon_ranks import SHAPES
from runs import BF16, FP32, MASTER, REMAINDERS

from megaopt import FusedMuon

FP16 = {"precision": "fp16"}
NORMUON = {"second_moment": "normuon"}
DRAWN = {"weight_rounding": "stochastic", "seed": 7, "momentum_buffer_dtype": "bfloat16_stochastic"}
KINDS = {
    "fp32": {"weights": FP32},
    "masters, fp16": {"weights": BF16, **MASTER, **FP16},
    "remainders": {"weights": BF16, **REMAINDERS, "momentum_buffer_dtype": BF16},
    "24 bits": {"weights": BF16, "master_weights": True, "master_weight_dtype": "remainder8"},
    "kahan, normuon": {
        "weights": BF16, "master_weights": True, "master_weight_dtype": "kahan", **NORMUON, **FP16,
    },
    "drawn": {"weights": BF16, **DRAWN, **NORMUON},
}  # fmt: skip
STEPS = 10


LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (4, 2)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_fully_shard_has_the_bits_of_one_process(on_ranks, layout, options):
    """Weights, masters, momenta, second moments."""
    world, replicas = layout
    own = ({**options, "optimizer": FusedMuon}, STEPS)
    expected = trained(*own, shapes=SHAPES)
    assert_same_on_all(on_ranks(world, trained, *own, replicas, shapes=SHAPES), expected)
