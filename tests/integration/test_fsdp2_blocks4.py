"""DTensors with moments of 4 bits: sharded steps are whole steps, and N ranks load what M saved."""

import re

import fsdp2_blocks
import pytest
import torch
from fsdp2_blocks import trained
from runs import BF16, MASTER, assert_same

HYPER = {"lr": 0.01, "weight_decay": 0.1}
BITS4 = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
KINDS = {
    "stochastic": {**BITS4, "weights": BF16, "weight_rounding": "stochastic", "seed": 7},
    "masters": {**BITS4, "exp_avg_dtype": "block32_e3m0_nearest", "weights": BF16, **MASTER},
    "lion": {"optimizer": "FusedLion", "exp_avg_dtype": "block32_e3m0"},
}
KINDS = {name: {**HYPER, **options} for name, options in KINDS.items()}
# ranks and, of these, rows with copies of one another's shards
LAYOUTS = {"1": (1, 1), "3": (3, 1), "2x2": (4, 2)}


def assert_same_on_all(found, expected):
    for rank, own in enumerate(found):
        assert_same(own, expected, f"rank {rank}")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in quick else pytest.mark.slow)
        for quick in [{("stochastic", "3")}]
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_sharded_steps_are_whole_steps(on_ranks, kind, layout):
    world, replicas = LAYOUTS[layout]
    found = on_ranks(world, trained, KINDS[kind], 3, replicas)
    assert_same_on_all(found, trained(KINDS[kind], 3))


def test_codes_and_scales_are_sharded_as_their_parameter(on_ranks):
    for rank in on_ranks(2, fsdp2_blocks.kinds_of_state, KINDS["stochastic"]):
        packed = 0
        for name, is_alike, shape, own, dtype, shard, whole in rank:
            assert is_alike
            elements = torch.Size(shape[1:]).numel()
            if name.endswith("_scale"):
                assert (own, shard) == ((shape[0], elements // 32), (whole[0], elements // 32))
            elif str(dtype) == "torch.uint8":
                packed += 1
                assert own == (*shape[:-1], shape[-1] // 2)
                assert shard == (*whole[:-1], whole[-1] // 2)
            else:
                assert (own, shard) == (shape, whole)
        assert packed == 2 * (len(fsdp2_blocks.SHAPES) - 1)


@pytest.mark.parametrize(
    "flat", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nested", "flat"]
)
@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param(worlds, marks=[] if worlds == (2, 3) else pytest.mark.slow)
        for worlds in [(1, 2), (2, 3), (3, 1), (3, 2)]
    ],
    ids=lambda w: f"{w[0]}to{w[1]}",
)
def test_saved_on_some_ranks_loads_on_others(on_ranks, tmp_path, worlds, flat):
    options, folder = KINDS["stochastic"], str(tmp_path / "checkpoint")
    on_ranks(worlds[0], fsdp2_blocks.save, options, 2, folder, flat)
    found = on_ranks(worlds[1], fsdp2_blocks.load_and_train, options, 2, 2, folder, flat)
    for loaded, after in found:
        assert_same(loaded, trained(options, 2))
        assert_same(after, trained(options, 4))


@pytest.mark.slow
def test_full_state_dicts(on_ranks):
    options = KINDS["stochastic"]
    found = on_ranks(2, fsdp2_blocks.through_full_state, options, 2, 2)
    assert_same_on_all(found, trained(options, 4))


def test_values_that_are_read_and_set_again_stay(on_ranks):
    for same in on_ranks(3, fsdp2_blocks.read_and_set, KINDS["stochastic"]):
        assert same
        assert all(same)


COLUMNS = {
    "columns of 3": (3, (43, 96), (1,)),
    "rows and columns": (4, (33, 128), (0, 1)),
    "columns beside copies": (4, (65, 64), (None, 1)),
    "rows of three dimensions": (3, (7, 9, 96), (0,)),
}


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world", "shape", "placements"),
    [
        pytest.param(*case, marks=[] if "and" in name else pytest.mark.slow, id=name)
        for name, case in COLUMNS.items()
    ],
)
def test_shards_of_whole_blocks(on_ranks, world, shape, placements, backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is off beside a GPU")
    options = {**HYPER, **BITS4, "weight_rounding": "stochastic"}
    found = on_ranks(world, fsdp2_blocks.placed, shape, placements, {**options, "backend": backend})
    assert_same_on_all(found, fsdp2_blocks.placed(shape, placements, options))


@pytest.mark.parametrize(
    ("world", "shape", "placements"),
    [(2, (64, 96), (1,)), (2, (40, 4, 64), (1,)), (2, (40, 2, 128), (2,))],
    ids=str,
)
def test_columns_that_cut_blocks_are_refused(on_ranks, world, shape, placements):
    message = (
        r"parameter 0 of group [01]: exp_avg_dtype='block32_e3m0' must find whole blocks of 32 "
        rf"elements in each shard, got placements .*Shard.*of shape {re.escape(str(shape))}"
    )
    for said in on_ranks(world, fsdp2_blocks.refused, shape, placements, BITS4):
        assert len(said) == 2
        for each in said:
            assert re.search(message, each), each


def test_rows_that_are_no_whole_blocks_keep_fp32(on_ranks):
    expected = fsdp2_blocks.placed((64, 4, 72), (), HYPER)
    found = on_ranks(2, fsdp2_blocks.placed, (64, 4, 72), (0,), {**HYPER, **BITS4})
    assert_same_on_all(found, expected)
