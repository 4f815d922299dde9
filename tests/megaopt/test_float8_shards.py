"""fp8 weights on several processes: what each rank writes is what the whole weight would get."""

import dataclasses

import float8_ranks
import pytest
import torch
from bits import assert_same_bits
from float8_ranks import BOUNDS, Case

from megaopt.float8 import RECIPES

FP32 = torch.float32
MASTERS = {"dtype": FP32}
FP16_MASTERS = {"master_weights": True, "master_weight_dtype": torch.float16}
FP16_MOMENT = {**MASTERS, "exp_avg_dtype": torch.float16}
E5M2 = {
    f"{name}-e5m2": dataclasses.replace(recipe, dtype=torch.float8_e5m2)
    for name, recipe in RECIPES.items()
}
PAIRS = {
    **{
        f"{name}, {ranks} ranks": Case(ranks, "triton", recipe, MASTERS, controlled=ranks == 3)
        for name, recipe in RECIPES.items()
        for ranks in (2, 3)
    },
    **{
        f"{name}, no masters": Case(2, "triton", RECIPES[name], {}) for name in ("current", "mxfp8")
    },
}
REFERENCE = {
    f"{name}, reference": Case(3, "reference", recipe, MASTERS, controlled=True)
    for name, recipe in {**RECIPES, **E5M2}.items()
}
WHOLE = {**PAIRS, **REFERENCE}
SCALED = {
    f"{recipe}, {kind}": Case(2, "triton", RECIPES[recipe], options)
    for recipe in ("delayed", "block_128x128", "mxfp8")
    for kind, options in (("fp16 masters", FP16_MASTERS), ("fp16 moment", FP16_MOMENT))
}
"""A shard's master or moment has a scale of its own: not the whole's, but the reference's."""
TWINS = {f"{name}, twin": case._replace(backend="reference") for name, case in SCALED.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What each rank has after all the cases."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (str(folder / "meeting"), {**WHOLE, **SCALED, **TWINS}, str(folder))
    torch.multiprocessing.spawn(float8_ranks.step_cases, arguments, nprocs=float8_ranks.WORLD)
    return [torch.load(folder / str(rank)) for rank in range(float8_ranks.WORLD)]


@pytest.mark.parametrize("name", WHOLE)
def test_shards_are_the_whole(name, saved):
    case = WHOLE[name]
    weights, optimizer = float8_ranks.whole(case)
    for rank in range(case.ranks):
        for index, weight in enumerate(weights):
            assert_same_shard(saved[rank][name], case, index, rank, weight, optimizer.state[weight])


def assert_same_shard(found, case, index, rank, weight, state):
    """The rank's codes and state are those of the whole; its scales are the whole's."""
    start, stop = BOUNDS[case.ranks][index][rank : rank + 2]
    parts = float8_ranks.bytes_of(weight)
    assert found["parts"][index].keys() == parts.keys()
    for kind, tensor in parts.items():
        own, expected = found["parts"][index][kind], tensor
        if kind == "data8":
            own, expected = own.flatten()[start:stop], expected.flatten()[start:stop]
        assert_same_bits(own, expected, f"weight {index}, {kind} of rank {rank}")
    for kind, tensor in state.items():
        own = found["state"][index][kind]
        if tensor is None:
            assert own is None
        else:
            expected = tensor.flatten()[start:stop]
            assert_same_bits(own, expected, f"weight {index}, {kind} of rank {rank}")


@pytest.mark.parametrize("name", SCALED)
def test_kernels_on_shards_are_the_reference(name, saved):
    for rank in range(SCALED[name].ranks):
        found, expected = saved[rank][name], saved[rank][f"{name}, twin"]
        for index in range(len(float8_ranks.SHAPES)):
            for part in ("parts", "state"):
                for kind, tensor in expected[part][index].items():
                    what = f"weight {index}, {kind} of rank {rank}"
                    assert_same_bits(found[part][index][kind], tensor, what)
