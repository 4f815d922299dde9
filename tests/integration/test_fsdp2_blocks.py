"""DTensors with moments in blocks: sharded steps are whole steps, and N ranks load what M saved."""

import re

import fsdp2_blocks
import fsdp2_ranks
import pytest
import torch
import torch.distributed as dist
from fsdp2_blocks import BLOCKS, SHAPES, trained
from fsdp2_ranks import assert_same_on_all, build, give, gradients, mesh_of, said, snapshot, train
from runs import BF16, MASTER, assert_same, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megaopt import FusedAdam

# --- what ranks do


def kinds_of_state(options):
    """Placements, shape and dtype of each state tensor, beside the parameter's own."""
    model, optimizer = build(options, shapes=SHAPES)
    train(model, optimizer, 1)
    found = []
    for param in model.parameters():
        for name, tensor in optimizer.state[param].items():
            if tensor is not None:
                alike = isinstance(tensor, DTensor) and tensor.placements == param.placements
                shards = tuple(tensor.to_local().shape), tuple(param.to_local().shape)
                own = tuple(param.shape), tuple(tensor.shape), tensor.dtype
                found.append((name, alike, *own, *shards))
    return found


def mesh_and_placements(placements):
    if not dist.is_initialized():
        return None, []
    if len(placements) == 1:
        return mesh_of(), placements
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2)), placements


def placed(shape, names, options, steps=3):
    """Steps of one parameter of these placements, such as ("rows", "columns", None)."""
    kinds = [Replicate() if name is None else Shard(name) for name in names]
    mesh, placements = mesh_and_placements(kinds)

    def split(whole):
        if mesh is None:
            return whole.clone()
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    param = torch.nn.Parameter(split(values(shape, 0).to(BF16)))
    optimizer = FusedAdam([param], **options)
    for (grad,) in (gradients(step, [shape], BF16) for step in range(steps)):
        give([param], [grad])
        optimizer.step()
    return snapshot(optimizer)


def refused(shape, names, options):
    """What is said of such a parameter, by the constructor and by add_param_group."""
    kinds = [Replicate() if name is None else Shard(name) for name in names]
    mesh, placements = mesh_and_placements(kinds)
    whole = values(shape, 0)
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    other = torch.nn.Parameter(values((3,), 0))
    optimizer, found = FusedAdam([other], **options), []
    before = snapshot(optimizer)
    for action in (
        lambda: FusedAdam([param], **options),
        lambda: optimizer.add_param_group({"params": [param]}),
    ):
        found.append(said(action))
    assert_same(snapshot(optimizer), before)
    assert torch.equal(param.full_tensor(), whole)
    return found


HYPER = {"lr": 0.01, "weight_decay": 0.1}
BLOCKS64 = {"exp_avg_dtype": "block64_e4m3_nearest", "exp_avg_sq_dtype": "block64_e5m3"}
BITS4 = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
KINDS = {
    "stochastic": {**BLOCKS, "weights": BF16, "weight_rounding": "stochastic", "seed": 7},
    "blocks of 64": {**BLOCKS64, "weights": BF16, **MASTER},
    "4 bits": {**BITS4, "weights": BF16, "weight_rounding": "stochastic", "seed": 7},
    "4 bits, nearest": {
        **BITS4,
        "exp_avg_dtype": "block32_e3m0_nearest",
        "weights": BF16,
        **MASTER,
    },
    "lion": {"optimizer": "FusedLion", "exp_avg_dtype": "block_e4m3"},
    "sgd": {
        "optimizer": "FusedSGD",
        "momentum": 0.9,
        "momentum_buffer_dtype": "block_e4m3_nearest",
        "weights": BF16,
        "master_weights": True,
        "master_weight_dtype": "remainder8",
    },
}
KINDS = {name: {**HYPER, **options} for name, options in KINDS.items()}
# ranks and, of these, rows with copies of one another's shards
LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[pytest.mark.slow] * ((place + number) % 4 > 0))
        for place, kind in enumerate(KINDS)
        for number, layout in enumerate(LAYOUTS)
    ],
)
@pytest.mark.sample(2)
def test_sharded_steps_are_whole_steps(on_ranks, kind, layout):
    world, replicas = LAYOUTS[layout]
    found = on_ranks(world, trained, KINDS[kind], 3, replicas)
    assert_same_on_all(found, trained(KINDS[kind], 3))


def test_clipped_steps_are_whole_steps(on_ranks):
    options = {**KINDS["stochastic"], "capturable": True}
    found = on_ranks(3, trained, options, 3, clip_norm=0.5)
    assert_same_on_all(found, trained(options, 3, clip_norm=0.5))


@pytest.mark.parametrize(("kind", "block", "packed"), [("stochastic", 128, 1), ("4 bits", 32, 2)])
def test_codes_and_scales_are_sharded_as_their_parameter(on_ranks, kind, block, packed):
    """packed: codes in a byte."""
    for rank in on_ranks(3, kinds_of_state, KINDS[kind]):
        assert len(rank) == 4 * (len(SHAPES) - 1) + 2
        for name, is_alike, shape, own, dtype, shard, whole in rank:
            assert is_alike
            if name.endswith("_scale"):
                scales = torch.Size(shape[1:]).numel() // block
                assert (own, shard) == ((shape[0], scales), (whole[0], scales))
                assert dtype == torch.uint8
            else:
                last = packed if dtype == torch.uint8 else 1
                assert own == (*shape[:-1], shape[-1] // last)
                assert shard == (*whole[:-1], whole[-1] // last)


@pytest.mark.sample(5)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 3), (3, 1)], ids=lambda w: f"{w[0]}to{w[1]}")
@pytest.mark.parametrize("kind", ["stochastic", "4 bits"])
@pytest.mark.thirds
def test_saved_on_some_ranks_loads_on_others(on_ranks, tmp_path, kind, worlds, flat):
    options, folder = KINDS[kind], str(tmp_path / "checkpoint")
    on_ranks(worlds[0], fsdp2_blocks.save, options, 2, folder, flat)
    found = on_ranks(worlds[1], fsdp2_blocks.load_and_train, options, 2, 2, folder, flat)
    for loaded, after in found:
        assert_same(loaded, trained(options, 2))
        assert_same(after, trained(options, 4))


@pytest.mark.parametrize("kind", ["4 bits", "lion"])
def test_full_state_dicts(on_ranks, kind):
    found = on_ranks(2, fsdp2_blocks.through_full_state, KINDS[kind], 2, 2)
    assert_same_on_all(found, trained(KINDS[kind], 4))


@pytest.mark.parametrize("kind", ["stochastic", "4 bits"])
def test_values_that_are_read_and_set_again_stay(on_ranks, kind):
    for same in on_ranks(3, fsdp2_blocks.read_and_set, KINDS[kind]):
        assert len(same) == 2 * len(SHAPES)
        assert all(same)


# --- columns

COLUMNS = {
    "columns of 2": (2, (40, 512), (1,)),
    "columns of 3": (3, (16, 384), (1,)),
    "rows and columns": (4, (33, 512), (0, 1)),
    "columns beside copies": (4, (33, 512), (None, 1)),
    "rows in parts": (4, (33, 256), (0, 0)),
    "rows of three dimensions": (3, (7, 9, 128), (0,)),
}
COLUMNS_4_BITS = {
    "columns of 3, 4 bits": (3, (43, 96), (1,)),
    "rows and columns, 4 bits": (4, (33, 128), (0, 1)),
    "columns beside copies, 4 bits": (4, (65, 64), (None, 1)),
}
STOCHASTIC = {**HYPER, **BLOCKS, "weight_rounding": "stochastic"}
CUTS = {name: (*cut, STOCHASTIC) for name, cut in COLUMNS.items()}
CUTS |= {name: (*cut, {**STOCHASTIC, **BITS4}) for name, cut in COLUMNS_4_BITS.items()}
CUTS["to nearest"] = (
    *COLUMNS["rows and columns"],
    {**HYPER, "exp_avg_dtype": "block_e4m3_nearest", "exp_avg_sq_dtype": "block_e5m3_nearest"},
)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("world", "shape", "placements", "options"), CUTS.values(), ids=CUTS)
def test_shards_of_whole_blocks(on_ranks, world, shape, placements, options, backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is off beside a GPU")
    found = on_ranks(world, placed, shape, placements, {**options, "backend": backend})
    assert_same_on_all(found, placed(shape, placements, options))


@pytest.mark.parametrize(
    ("world", "shape", "placements", "options"),
    [
        (2, (40, 384), (1,), BLOCKS),
        (2, (40, 2, 256), (2,), BLOCKS),
        (4, (40, 384), (0, 1), BLOCKS),
        (2, (70000,), (0,), BLOCKS),
        (2, (64, 96), (1,), BITS4),
        (2, (40, 4, 64), (1,), BITS4),
    ],
    ids=str,
)
def test_shards_that_cut_blocks_are_refused(on_ranks, world, shape, placements, options):
    moment, block = options["exp_avg_dtype"], 32 if options is BITS4 else 128
    message = (
        rf"parameter 0 of group [01]: exp_avg_dtype='{moment}' must find whole blocks of {block} "
        rf"elements in each shard, got placements .*Shard.*of shape {re.escape(str(shape))}"
    )
    for messages in on_ranks(world, refused, shape, placements, options):
        assert len(messages) == 2
        for each in messages:
            assert re.search(message, each), each


@pytest.mark.parametrize(
    ("shape", "options", "has_blocks"),
    [
        ((64, 100), BLOCKS, False),
        ((35, 2, 64), BLOCKS, True),
        ((65536,), BLOCKS, True),
        ((64, 4, 72), BITS4, False),
    ],
    ids=str,
)
def test_the_whole_shape_decides_which_moments_are_in_blocks(on_ranks, shape, options, has_blocks):
    """Rows that are no whole blocks keep fp32, whole or split over any number of ranks."""
    options = {**HYPER, **options}
    expected = placed(shape, (), options)
    assert ("exp_avg_scale" in expected["states"][0]) == has_blocks
    found = on_ranks(2, placed, shape, (0,), options)
    assert_same_on_all(found, expected)


# --- from one layout to another

MIXED = [(33, 128), (64, 100), (10,), (5, 8, 128), (9, 500), (65536,)]
"""Rows of whole blocks and of parts; the last is one of 65,536 elements in one dimension."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "flat"),
    [
        ("stochastic", False),
        ("sgd", True),
        pytest.param("stochastic", True, marks=pytest.mark.slow),
        pytest.param("sgd", False, marks=pytest.mark.slow),
    ],
)
def test_plain_and_sharded_checkpoints_are_the_same(on_ranks, tmp_path, kind, flat):
    """One process without ranks saves, two load, and the other way; every bit, codes and scales."""
    options, folder, other = KINDS[kind], str(tmp_path / "plain"), str(tmp_path / "sharded")
    fsdp2_ranks.save(options, 2, folder, flat, MIXED)
    load = (fsdp2_ranks.load_and_train, options, 0, 2)
    expected = [fsdp2_ranks.trained(options, 2, 1, MIXED)] * 2
    assert_same_on_all(on_ranks(2, *load, folder, flat, MIXED), expected)
    on_ranks(2, fsdp2_ranks.save, options, 2, other, flat, MIXED)
    assert_same([*fsdp2_ranks.load_and_train(options, 0, 2, other, flat, MIXED)], expected)
