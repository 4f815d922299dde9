"""fp8 weights on several processes: what each rank writes is what the whole weight would get."""

import re
from datetime import timedelta
from typing import Any, NamedTuple

import float8_ranks
import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from float8_ranks import BOUNDS, HYPER, WORLD, bytes_of, give, gradients, initial_weights, shards_of
from handling import both_backends
from ranks import start_ranks
from runs import assert_same

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight
from megaopt.float8.shard import Float8Shard

# --- what ranks do


STEPS = 2


class Case(NamedTuple):
    """A run of shards, on the first so many ranks."""

    ranks: int
    backend: str
    recipe: Float8Recipe
    options: dict[str, Any]
    controlled: bool = False


def arguments(case):
    """Of `step`: a coefficient makes the kernels read controls."""
    return {"clip_coefficient": torch.tensor(0.75)} if case.controlled else {}


def whole(case):
    """The weights and the optimizer after the same steps by one process: the reference."""
    weights = initial_weights(case.recipe)
    optimizer = FusedAdam(weights, backend="reference", **HYPER, **case.options)
    for step in range(STEPS):
        for weight, grad in zip(weights, gradients(step), strict=True):
            weight.grad = grad
        optimizer.step(**arguments(case))
    return weights, optimizer


def step_case(rank, group, case):
    weights = initial_weights(case.recipe)
    shards = shards_of(weights, case.ranks, rank, group)
    optimizer = FusedAdam(shards, backend=case.backend, **HYPER, **case.options)
    for step in range(STEPS):
        give(shards, gradients(step))
        optimizer.step(**arguments(case))
    state = [optimizer.state[shard] for shard in shards]
    return {"parts": [bytes_of(weight) for weight in weights], "state": state}


def in_groups(rank, meeting):
    """Joins the others; the group of the first so many ranks, by their number."""
    torch.set_num_threads(1)
    wait = timedelta(minutes=4)  # a rank that waits for ever fails
    dist.init_process_group("gloo", f"file://{meeting}", wait, world_size=WORLD, rank=rank)
    return {size: dist.new_group(list(range(size))) for size in (2, 3)}


def skipped(rank, groups, how, options):
    """Rank 0 alone has an overflow in the second of three steps: the loss of each, the bytes."""
    case = Case(WORLD, "reference", RECIPES["current"], {"dtype": torch.float32, **options})
    weights = initial_weights(case.recipe)
    shards = shards_of(weights, WORLD, rank, groups[WORLD])
    optimizer = FusedAdam(shards, backend=case.backend, **HYPER, **case.options)
    raised = False
    for step in (0, 7, 1):
        give(shards, gradients(step))
        overflow = step == 7 and rank == 0
        if how == "found_inf":
            optimizer.grad_scale, optimizer.found_inf = (
                torch.ones(()),
                torch.tensor(float(overflow)),
            )
        elif overflow:
            shards[0].grad = shards[0].grad.clone().fill_(torch.nan)
        try:
            optimizer.step()
        except FloatingPointError:
            raised = True
    counted = int(optimizer.param_groups[0]["step"])
    return {"parts": [bytes_of(weight) for weight in weights], "raised": raised, "steps": counted}


def unlike(rank, groups):
    """Rank 1 has no gradient for a weight that the others have: what each says, and its bytes."""
    weights = initial_weights(RECIPES["current"])
    shards = shards_of(weights, WORLD, rank, groups[WORLD])
    optimizer = FusedAdam(shards, backend="reference", **HYPER)
    give(shards, gradients(0))
    if rank == 1:
        shards[1].grad = None
    before = [bytes_of(weight) for weight in weights]
    try:
        optimizer.step()
        message = "no error"
    except ValueError as error:
        message = str(error)
    after = [bytes_of(weight) for weight in weights]
    same = all(torch.equal(o[k], n[k]) for o, n in zip(before, after, strict=True) for k in o)
    return {"message": message, "unchanged": same}


def several_groups(rank, groups):
    """Ranks 0 and 1 share one weight, all three another, with gradients of other dtypes."""
    weights = initial_weights(RECIPES["current"])
    shards = [shards_of(weights, 3, rank, groups[3])[1]]
    if rank < 2:
        shards.insert(0, shards_of(weights, 2, rank, groups[2])[0])
    optimizer = FusedAdam(shards, backend="reference", use_decoupled_grad=True, **HYPER)
    for step in range(STEPS):
        for shard in shards:
            grad = gradients(step)[0 if shard.weight is weights[0] else 1].flatten()
            grad = grad[shard.start : shard.start + shard.numel()]
            # the same numbers in another dtype are another batch, in another place
            shard.decoupled_grad = grad.float() if rank == 1 and shard is shards[0] else grad
        optimizer.step()
    return [bytes_of(weight) for weight in weights]


SKIPS = {
    "found_inf": ("found_inf", {}),
    "found_inf, capturable": ("found_inf", {"capturable": True}),
    "skip": ("nonfinite", {"nonfinite": "skip"}),
    "skip, capturable": ("nonfinite", {"nonfinite": "skip", "capturable": True}),
    "error": ("nonfinite", {"nonfinite": "error"}),
}


def meet_hazards(rank, meeting, folder):
    """A rank's process: what one rank does alone."""
    groups = in_groups(rank, meeting)
    saved = {name: skipped(rank, groups, *how) for name, how in SKIPS.items()}
    saved["unlike"], saved["groups"] = unlike(rank, groups), several_groups(rank, groups)
    torch.save(saved, f"{folder}/{rank}")
    dist.destroy_process_group()


def step_cases(rank, meeting, cases, folder):
    """A rank's process."""
    groups = in_groups(rank, meeting)
    saved = {
        name: step_case(rank, groups[case.ranks], case)
        for name, case in cases.items()
        if rank < case.ranks
    }
    torch.save(saved, f"{folder}/{rank}")
    dist.destroy_process_group()


FP32 = torch.float32
MASTERS = {"dtype": FP32}
FP16_MASTERS = {"master_weights": True, "master_weight_dtype": torch.float16}
FP16_MOMENT = {**MASTERS, "exp_avg_dtype": torch.float16}
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
    for name, recipe in RECIPES.items()
}
ALONE = {
    "stochastic": {"weight_rounding": "stochastic"},
    "remainder8_stochastic": {
        "master_weights": True,
        "master_weight_dtype": "remainder8_stochastic",
    },
}
DRAWN = {
    f"{name}, {kept}, {backend}": Case(ranks, backend, RECIPES[name], options)
    for kept, options in ALONE.items()
    for name, ranks, backend in [
        *((name, 2, "triton") for name in RECIPES),
        *((name, 3, "reference") for name in RECIPES),
    ]
}
"""Without fp32 masters: random bits go by the element's place in the whole weight."""
WHOLE = {**PAIRS, **REFERENCE, **DRAWN}
SCALED = {
    f"{recipe}, {kind}": Case(2, "triton", RECIPES[recipe], options)
    for recipe in ("delayed", "block_128x128", "mxfp8")
    for kind, options in (("fp16 masters", FP16_MASTERS), ("fp16 moment", FP16_MOMENT))
}
"""A shard's master or moment has a scale of its own: not the whole's, but the reference's."""
TWINS = {f"{name}, twin": case._replace(backend="reference") for name, case in SCALED.items()}


KERNELS = (
    *("delayed, 2 ranks", "current, 3 ranks", "mxfp8, no masters", "delayed, fp16 moment"),
    *("block_128x128, stochastic, triton", "current, remainder8_stochastic, triton"),
    "mxfp8, fp16 masters",
)
"""Those that are quick enough for each test run: the interpreter takes its time."""


def some_of(cases):
    slow = {name: case.backend == "triton" and name not in KERNELS for name, case in cases.items()}
    marks = {name: [pytest.mark.slow] * is_slow for name, is_slow in slow.items()}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=own) for n, own in marks.items()])


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """What each rank has after the cases of the tests that are asked for."""
    own = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in own if hasattr(item, "callspec")}
    cases = {**WHOLE, **SCALED, **TWINS}
    cases = {name: cases[name] for name in cases if name.removesuffix(", twin") in asked}
    return in_processes(step_cases, tmp_path_factory.mktemp("ranks"), cases)


def in_processes(function, folder, *arguments):
    """Forked from one that has torch already; what each rank has saved in the folder."""
    given = (str(folder / "meeting"), *arguments, str(folder))
    start_ranks(function, given, float8_ranks.WORLD)
    return [torch.load(folder / str(rank)) for rank in range(float8_ranks.WORLD)]


@some_of(WHOLE)
def test_shards_are_the_whole(name, saved):
    case = WHOLE[name]
    weights, optimizer = whole(case)
    for rank in range(case.ranks):
        for index, weight in enumerate(weights):
            assert_same_shard(saved[rank][name], case, index, rank, weight, optimizer.state[weight])


def assert_same_codes(found, ranks, index, rank, weight):
    """The rank's codes are those of the whole, and all else that a weight is made of is."""
    start, stop = BOUNDS[ranks][index][rank : rank + 2]
    own, expected = (
        {**parts, "data8": parts["data8"].flatten()[start:stop]}
        for parts in (found, float8_ranks.bytes_of(weight))
    )
    assert_same(own, expected, f"weight {index} of rank {rank}")


def assert_same_shard(found, case, index, rank, weight, state):
    """The rank's codes and state are those of the whole; its scales are the whole's."""
    start, stop = BOUNDS[case.ranks][index][rank : rank + 2]
    assert_same_codes(found["parts"][index], case.ranks, index, rank, weight)
    for kind, tensor in state.items():
        own = found["state"][index][kind]
        if tensor is None:
            assert own is None
        else:
            expected = tensor.flatten()[start:stop]
            assert_same_bits(own, expected, f"weight {index}, {kind} of rank {rank}")


@some_of(SCALED)
def test_kernels_on_shards_are_the_reference(name, saved):
    for rank in range(SCALED[name].ranks):
        assert_same(saved[rank][name], saved[rank][f"{name}, twin"], f"rank {rank}")


# --- what one rank does alone


@pytest.fixture(scope="module")
def hazards(tmp_path_factory):
    return in_processes(meet_hazards, tmp_path_factory.mktemp("hazards"))


@pytest.mark.parametrize("name", SKIPS)
def test_a_step_that_one_rank_skips_is_skipped_by_all(name, hazards):
    weights, _ = whole(Case(3, "reference", RECIPES["current"], MASTERS))
    for rank in range(3):
        found = hazards[rank][name]
        assert found["steps"] == 2
        assert found["raised"] is (name == "error")
        for index, weight in enumerate(weights):
            assert_same_codes(found["parts"][index], 3, index, rank, weight)


def test_a_rank_without_a_gradient_that_others_have_is_refused(hazards):
    for rank, found in enumerate(hazards):
        expected = r"must step the same, got gradient of parameter \d of group 0: .*none on rank 1"
        assert re.search(expected, found["unlike"]["message"])
        assert f"(this is rank {rank})" in found["unlike"]["message"]
        assert found["unlike"]["unchanged"]


def test_groups_of_other_ranks_and_batches_of_other_dtypes(hazards):
    weights, _ = whole(Case(3, "reference", RECIPES["current"], {}))
    for rank, found in enumerate(hazards):
        for index, ranks in ((0, 2), (1, 3)):
            if rank < ranks:
                assert_same_codes(found["groups"][index], ranks, index, rank, weights[index])


@both_backends
def test_a_part_alone_is_refused_and_the_whole_is_not(backend):
    weight = float8_ranks.initial_weights(RECIPES["current"])[1]
    before = {name: tensor.clone() for name, tensor in float8_ranks.bytes_of(weight).items()}
    part, all_of_it = Float8Shard(weight, 0, 899), Float8Shard(weight, 0, 900)
    part.grad, all_of_it.grad = torch.ones(899).bfloat16(), torch.ones(900).bfloat16()
    optimizer = FusedAdam([all_of_it, part], backend=backend)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0: .*elements 0 to 899 of 900"):
        optimizer.step()
    assert len(optimizer.state) == 0
    for name, tensor in float8_ranks.bytes_of(weight).items():
        assert_same_bits(tensor, before[name], name)
    FusedAdam([all_of_it], backend=backend).step()
    assert not torch.equal(float8_ranks.bytes_of(weight)["data8"], before["data8"])


def test_moments_in_blocks_beside_a_part_are_refused():
    """A cut block would have a scale of its own: whole weights keep them."""
    weight = torch.nn.Parameter(Float8Weight.from_values(torch.randn(64, 256).bfloat16(), "mxfp8"))
    moments = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
    FusedAdam([weight], weight_rounding="stochastic", **moments)
    with pytest.raises(ValueError, match=r"parameter 0 .*'block_e4m3' must not be given for fp8"):
        FusedAdam([Float8Shard(weight, 0, 300)], weight_rounding="stochastic", **moments)
