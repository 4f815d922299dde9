"""GaLoreAdamW inside Megatron-Core: flat shards, on 1 to 3 ranks, have the bits of one process."""

import importlib.util
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from megatron_galore import alone, error_of, galore_case, gone_on, said_of, saved, stepped
from runs import assert_same


def slow_but(names, quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


CASES = {
    "left": galore_case({"proj_type": "left"}, fp32_grads=False),
    "right": galore_case({"proj_type": "right"}),
    "std, by svd": galore_case({"refresh": "svd", "stagger": False}),
    "reverse_std, bf16, fp32 weights": galore_case(
        {"proj_type": "reverse_std", "precision": "bf16"}, dtype=torch.float32
    ),
    "scaled, of one bucket": galore_case({"rank": 7, "scale": 0.25}, buckets=None),
}
QUICK = ("left-2", "right-3")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, id=f"{name}-{world}",
                     marks=[] if f"{name}-{world}" in QUICK else [pytest.mark.slow])
        for name in CASES for world in (1, 2, 3)
    ],
)  # fmt: skip
def test_shards_have_the_bits_of_one_process(pools, once, name, world):
    """Weights, masters, moments, projections and their energies, over refreshes."""
    (expected,) = once(1, alone, CASES[name])
    for found in pools(world)(stepped, CASES[name]):
        assert_same(found, expected)
