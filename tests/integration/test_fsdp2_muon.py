"""FusedMuon's DTensors: each matrix is made by one rank, and has the bits of one process."""

import itertools
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp2_ranks import (
    MESHES,
    PLACEMENTS,
    assert_same_on_all,
    build,
    give,
    gradients,
    is_last_rank,
    left_out,
    load_and_train,
    odd_last_rank,
    odd_step,
    raised_by,
    said,
    save,
    snapshot,
    split_like,
    split_muon,
    train,
    trained,
)
from galore_ranks import placed_galore
from interpreted import interpreted
from late_exchange import late
from muon_ranks import (
    CHANGED,
    SHAPES,
    by_launches,
    by_small_tiles,
    in_small_buckets,
    matrices_made,
    placed,
)
from ranks import Ranks
from runs import BF16, FP32, MASTER, REMAINDERS, assert_same
from slow_cases import names_but, slow_but
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megaopt import FusedMuon, GaLoreAdamW
from megaopt.kernels.matrix import boxes, bucket, tiles
from megaopt.kernels.muon import launch, newton_schulz, wave
from megaopt.kernels.muon import ranks as muon_ranks
from megaopt.step.ranks import owners

# --- what ranks do


def beside_local(*arguments, **named):
    """What `by_launches` returns, and how many matrices no other rank has a part of."""
    counts, init = [], owners.Owners.__init__

    def counting(self, *own):
        init(self, *own)
        counts.append(len(self.local))

    with mock.patch.object(owners.Owners, "__init__", counting):
        return by_launches(*arguments, **named), sum(counts)


def bytes_sent(options, shapes, replicas=1):
    """Bytes that this rank sends others in a step after the first, by collective."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, replicas, shapes=shapes)
    train(model, optimizer, 1)
    sent, rank = {}, dist.get_rank()
    names = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "broadcast")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*own, **others):
            if name == "all_to_all_single":
                lengths = list(own[3])
                lengths[rank] = 0
                count = sum(lengths)
            else:
                count = own[0].numel() * own[0].element_size()
            sent[name] = sent.get(name, 0) + count
            return originals[name](*own, **others)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in names}):
        train(model, optimizer, 1, first=1)
    return sent


LAUNCHES = {
    "direct": (wave.PartLaunches, "direct"),
    "sums": (muon_ranks.PartNorms, "measure"),
    "cast": (muon_ranks.PartNorms, "cast"),
    "boxes": (boxes.BoxCopies, "copy"),
    "products": (wave.Iteration, "step"),
    "apply": (wave.PartLaunches, "apply"),
    "local": (launch.MuonLaunches, "step"),
}


PLACES = {"exchange": (bucket, "unpacked"), "tiles": (tiles, "products"), **LAUNCHES}
"""Where a step fails."""


AT_FIRST = {
    "plans": (muon_ranks, "BoxCopies"),
    "notes": (wave.Iteration, "note"),
    **LAUNCHES,
}


def said_of_a_first_step(kind, turn, options, shapes):
    """The error of a first step in which the last rank fails, and what steps after it come to.

    kind: of AT_FIRST. turn: which of the calls of this rank fails.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    give(model.parameters(), gradients(0, shapes, next(model.parameters()).dtype))
    error = None
    if dist.get_rank() == dist.get_world_size() - 1:
        place, name = AT_FIRST[kind]
        calls, call = itertools.count(), getattr(place, name)

        def failing(*own, **others):
            if next(calls) == turn:
                raise RuntimeError("no memory")
            return call(*own, **others)

        with mock.patch.object(place, name, failing):
            error = raised_by(optimizer.step)
    else:
        error = raised_by(optimizer.step)
    train(model, optimizer, 2)
    return error, snapshot(optimizer)


def moved_once(kind, options, shapes):
    """What four steps come to whose gradients lie in one place, but for one that fails between.

    kind: of LAUNCHES, which fails on all ranks. A step's memory is always the same.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    params, place = list(model.parameters()), LAUNCHES[kind]
    memory, empty = {}, torch.empty

    def same(*size, dtype=None, **others):
        if dtype != torch.uint8:
            return empty(*size, dtype=dtype, **others)
        return memory.setdefault(size, empty(*size, dtype=dtype, **others))

    with mock.patch.object(torch, "empty", same):
        give(params, gradients(0, shapes, params[0].dtype))
        before = [param.grad for param in params]
        for step in range(4):
            news = gradients(step, shapes, params[0].dtype)
            for param, grad, new in zip(params, before, news, strict=True):
                grad.to_local().copy_(split_like(param, new).to_local())
                param.grad = grad
            optimizer.step()
            if step == 2:
                give(params, gradients(9, shapes, params[0].dtype))
                with mock.patch.object(*place, side_effect=RuntimeError("no memory")):
                    assert "no memory" in raised_by(optimizer.step)
    return snapshot(optimizer)


def said_after_a_fault(options):
    """The errors of a step in which a product and all calls after it fail, and of a step after."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=SHAPES)
    train(model, optimizer, 1)
    give(model.parameters(), gradients(1, SHAPES, next(model.parameters()).dtype))
    fault, later = RuntimeError("the product"), RuntimeError("a call after it")
    with (
        mock.patch.object(newton_schulz.launch, "products", side_effect=fault),
        mock.patch.object(owners.Owners, "back", side_effect=later),
    ):
        first = raised_by(optimizer.step)
    return first, raised_by(optimizer.step)


def lying_otherwise(options, steps, turns, shapes):
    """What an optimizer has after steps in which local gradients lie in columns.

    turns: of the second matrix on all ranks, of which some have a row, and of the third on the
        first rank alone; otherwise none does.
    """
    model, optimizer = build(options, shapes=shapes)
    params = list(model.parameters())
    for step in range(steps):
        give(params, gradients(step, shapes, params[0].dtype))
        for param in params[1 : 1 + turns * (1 if dist.get_rank() else 2)]:
            local = param.grad._local_tensor
            param.grad._local_tensor = local.t().contiguous().t()
        optimizer.step()
    return snapshot(optimizer)


def in_a_world_anew(folder, shapes):
    """What two optimizers have after steps, of equal meshes before and after a group ends."""
    found, (rank, world) = [], (dist.get_rank(), dist.get_world_size())
    for number in range(2):
        found.append(placed({}, 2, "rows and columns", (1, world), shapes))
        dist.destroy_process_group()
        meeting = f"file://{folder}/{number}"
        dist.init_process_group("gloo", meeting, world_size=world, rank=rank)
    return found


def said_of_parts_of_blocks(momentum):
    """What the constructor says of experts whose matrices, unlike rows, are no whole blocks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 16, 600), mesh, [Shard(0)]))
    group = {"params": [experts], "split_sizes": [4, 12]}
    return said(lambda: FusedMuon([group], momentum_buffer_dtype=momentum))


def said_of(kind, options, shapes=SHAPES):
    """As odd_step, of one whose last rank is odd: it has a group CHANGED, or fails in a PLACE."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    oddity = partial(odd_last_rank, kind=kind, places=PLACES, options=CHANGED)
    return odd_step(model, optimizer, 2, oddity)


def said_of_left_out(options, reason, shapes=SHAPES):
    """As odd_step, of one that is left out; a "nan" is in the last rank's gradient."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    return odd_step(model, optimizer, 2, partial(left_out, reason=reason, here=is_last_rank()))


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


SHARDED = {
    f"{layout}-{kind}": (*sizes, options)
    for layout, sizes in LAYOUTS.items()
    for kind, options in KINDS.items()
}
QUICK = [
    "1-fp32",
    "2x2-drawn",
    "2x2-masters, fp16",
    *(f"{2 + i % 2}-{k}" for i, k in enumerate(KINDS)),
]


@pytest.mark.parametrize(("world", "replicas", "options"), slow_but(SHARDED, QUICK))
@pytest.mark.sample(2)
def test_fully_shard_has_the_bits_of_one_process(on_ranks, world, replicas, options):
    """Weights, masters, momenta, second moments."""
    own = ({**options, "optimizer": FusedMuon}, STEPS)
    expected = trained(*own, shapes=SHAPES)
    assert_same_on_all(on_ranks(world, trained, *own, replicas, shapes=SHAPES), expected)


@pytest.mark.parametrize(
    "options", slow_but({k: (o,) for k, o in KINDS.items()}, ["drawn", "kahan, normuon"])
)
def test_eight_ranks_of_which_some_have_nothing(on_ranks, options):
    own = ({**options, "optimizer": FusedMuon}, 2)
    expected = trained(*own, shapes=SHAPES, clip_norm=1.0)
    found = on_ranks(8, trained, *own, shapes=SHAPES, clip_norm=1.0)
    assert_same_on_all(found, expected)


@pytest.mark.parametrize("split", slow_but({"whole": (False,), "split": (True,)}, ["split"]))
@pytest.mark.parametrize("placements", [*PLACEMENTS, *MESHES])
@pytest.mark.sample(2)
def test_any_placements_have_the_bits_of_one_process(on_ranks, placements, split):
    """Also of two dimensions of a mesh, and of matrices that lie one below another."""
    # random bits go by places, which these do not have
    kind = "masters, fp16" if placements == "the last two" else "drawn"
    options = {**KINDS[kind], **FP16}
    sizes = (2, 2) if placements in MESHES else (3,)
    expected = placed(options, 3, split=split, clip_norm=1.0)
    named = {"placements": placements, "sizes": sizes, "split": split, "clip_norm": 1.0}
    assert_same_on_all(on_ranks(4 if len(sizes) == 2 else 3, placed, options, 3, **named), expected)


@pytest.mark.parametrize("room", [1, 700])
def test_buckets_of_any_size_have_the_same_bits(on_ranks, room):
    """A byte is a matrix each."""
    options, named = KINDS["masters, fp16"], {"placements": "rows", "sizes": (3,)}
    found = on_ranks(3, in_small_buckets, room, options, 3, **named)
    assert_same_on_all(found, placed(options, 3))


LATE = {
    "masters, fp16": (placed, KINDS["masters, fp16"]),
    "drawn": (placed, KINDS["drawn"]),
    "galore": (placed_galore, {"proj_type": "left", "weights": BF16, **MASTER}),
}


@pytest.mark.parametrize(("made", "options"), LATE.values(), ids=list(LATE))
@pytest.mark.parametrize("room", [1, 700, 2**26])
@pytest.mark.parametrize("in_order", [False, True], ids=["apart", "in order"])
def test_nobody_touches_memory_that_is_on_its_way(on_ranks, made, options, room, in_order):
    """Messages move when they are waited for; a poison stands where they come until then."""
    named = {"placements": "rows", "sizes": (2,), "in_order": in_order}
    found = on_ranks(2, late, in_small_buckets, room, options, 3, made=made, **named)
    assert_same_on_all(found, made(options, 3))


def test_one_place_begins_messages_that_others_wait_for():
    """`late` holds that place, and torch keeps the memory of its messages until they are there."""
    root = Path(__file__).parents[2]
    files = [
        f for name in ("megaopt", "kernels", "integration") for f in (root / name).rglob("*.py")
    ]
    begins = re.compile(r"async_op=True|\b(isend|irecv|batch_isend_irecv)\(")
    found = [file.name for file in files if begins.search(file.read_text(encoding="utf-8"))]
    assert found == ["owners.py"]


def test_the_first_error_of_a_fault_is_the_one_that_is_raised(on_ranks):
    """After a fault of a device all calls fail, those to other ranks too."""
    ((error, after),) = on_ranks(1, said_after_a_fault, KINDS["masters, fp16"])
    assert error == "RuntimeError: the product"
    assert after is None


@interpreted
@pytest.mark.parametrize("kind", ["masters, fp16", "drawn"])
def test_launches_have_the_same_bits(on_ranks, kind):
    options = {**KINDS[kind], "optimizer": FusedMuon}
    expected = trained(options, 2, shapes=SHAPES[:6], clip_norm=1.0)
    own = ({**options, "backend": "triton"}, 2)
    assert_same_on_all(on_ranks(2, trained, *own, shapes=SHAPES[:6], clip_norm=1.0), expected)


TINY = [(6, 10), (10, 6), (5, 9), (1, 7), (9,), (5, 4, 6)]
"""Of none is half of the work, which all ranks would make together; of 5 experts 2 ranks have 3 and
2."""
SHORT = {"ns_steps": 2}
LAUNCHED = {
    "columns": {"weights": BF16, **MASTER},
    "by turns": {"weights": BF16, **MASTER, **FP16, "method": "gram"},
    "rows": {"weights": BF16, **REMAINDERS, **FP16, **NORMUON},
    "rows twice": {"weights": BF16, **DRAWN, **NORMUON},
    "copies of columns": {"weights": BF16, **REMAINDERS, **FP16, "momentum_buffer_dtype": BF16},
    "columns and copies": {"weights": FP32, **FP16, **NORMUON, "method": "gram"},
    "rows and columns": {"weights": BF16, **DRAWN, **FP16},
    "the last two": {"weights": FP32, **NORMUON},
}
"""For each placement options that step by launches; with them all precisions and forms."""


def launched(on_ranks, placements, options, steps=2, **named):
    """What steps by launches leave on each rank."""
    sizes = (2, 2) if placements in MESHES else (2,)
    own = {"placements": placements, "sizes": sizes, "shapes": TINY, **named}
    called = (by_launches, {**SHORT, **options}, steps)
    return on_ranks(4 if placements in MESHES else 2, *called, **own)


def one_process(options, steps=2, **step):
    return placed({**SHORT, **options}, steps, shapes=TINY, **step)


@interpreted
@pytest.mark.parametrize(
    "placements", names_but(LAUNCHED, ["columns", "by turns", "rows twice", "copies of columns"])
)
def test_launches_of_any_placements_have_the_same_bits(on_ranks, placements):
    options = LAUNCHED[placements]
    found = launched(on_ranks, placements, options, clip_norm=1.0)
    assert_same_on_all(found, one_process(options, clip_norm=1.0))


MANY = [(5, 6), (6, 5), (5, 5), (4, 6)] * 2
"""Four or more a rank."""
LATE_LAUNCHES = {
    f"{room}-{'in order' if in_order else 'apart'}-{placements}": (room, in_order, placements)
    for placements in ("rows", "by turns", "rows and columns")
    for room in (1, 120, 2**26)
    for in_order in (False, True)
}


@interpreted
@pytest.mark.parametrize(
    ("room", "in_order", "placements"),
    slow_but(
        LATE_LAUNCHES,
        ["1-apart-rows", "1-in order-by turns", "120-in order-rows", f"{2**26}-apart-by turns"],
    ),
)
def test_launches_do_not_touch_memory_that_is_on_its_way(on_ranks, room, in_order, placements):
    """Many buckets take turns with it: each of a matrix or two a rank, or of all."""
    options, sizes = LAUNCHED[placements], (2, 2) if placements in MESHES else (2,)
    called = (late, in_small_buckets, room, {**SHORT, **options}, 2)
    own = {"made": by_launches, "in_order": in_order}
    named = {"placements": placements, "sizes": sizes, "shapes": MANY}
    found = on_ranks(4 if placements in MESHES else 2, *called, **own, **named)
    assert_same_on_all(found, placed({**SHORT, **options}, 2, shapes=MANY))


BLOCKS = {
    "rows": {"momentum_buffer_dtype": "block_int8", **MASTER, "weights": BF16, **FP16},
    "columns": {"momentum_buffer_dtype": "block_int8", "weights": FP32, **NORMUON},
    "rows and columns": {"momentum_buffer_dtype": "block_e4m3", **MASTER, "weights": BF16},
}


@interpreted
@pytest.mark.parametrize("placements", BLOCKS)
def test_launches_of_momenta_in_blocks_have_the_same_bits(on_ranks, placements):
    options = {**BLOCKS[placements], "seed": 5}
    shapes = [(16, 256), (17, 256), (16, 256)]
    shapes += [(3, 16, 256)] if placements == "rows" else []  # of which a rank has two
    found = launched(on_ranks, placements, options, shapes=shapes)
    assert found[0]["states"][0]["momentum_buffer"].dtype == torch.uint8
    assert_same_on_all(found, placed({**SHORT, **options}, 2, shapes=shapes))


@interpreted
@pytest.mark.parametrize("placements", names_but(("rows", "columns", "rows twice"), ["columns"]))
def test_launches_of_rows_of_several_matrices_have_the_same_bits(on_ranks, placements):
    """Three in a parameter, which begin within a rank's rows."""
    options = {**LAUNCHED[placements], "adjust_lr_fn": "match_rms_adamw"}
    own = {"shapes": [(24, 6)] * 3 + [(10, 6), (6, 10), (9, 7)], "split": True}
    found = launched(on_ranks, placements, options, **own)
    assert_same_on_all(found, placed({**SHORT, **options}, 2, **own))


EXPERTS = {
    "3 and 2": ("rows", [(5, 4, 6), (6, 10), (10, 6)], [3, 2]),
    "2 and none": ("rows", [(2, 4, 6), (1, 6, 5), (1, 6, 5), (6, 10), (10, 6)], [3, 1]),
    "more than its part": ("rows", [(3, 4, 4)] * 4 + [(4, 4)], [6, 4]),
    "on four": ("rows twice", [(5, 4, 6), (6, 10), (10, 6), (6, 10)], [2, 1, 1, 1]),
    "with copies": ("copies of rows", [(5, 4, 6), (6, 10), (10, 6)], [0, 0, 0, 0]),
}


@interpreted
@pytest.mark.parametrize(("placements", "shapes", "local"), EXPERTS.values(), ids=EXPERTS)
def test_experts_that_one_rank_has_are_launched_beside_the_rest(
    on_ranks, placements, shapes, local
):
    """As many as each has alone; others of the same parameter go to their owners."""
    options = {**SHORT, "weights": BF16, **MASTER, **FP16, **NORMUON}
    sizes = (2, 2) if len(local) == 4 else (2,)
    named = {"placements": placements, "sizes": sizes, "shapes": shapes}
    found = on_ranks(len(local), beside_local, options, 2, **named)
    assert [count for _, count in found] == local
    assert_same_on_all([run for run, _ in found], placed(options, 2, shapes=shapes))


LEFT_OUT = {f"{why}-{way}": (why, way) for why in ("found_inf", "nan") for way in (False, True)}


@interpreted
@pytest.mark.parametrize(
    ("reason", "capturable"), slow_but(LEFT_OUT, ["found_inf-True", "nan-False"])
)
def test_launches_that_are_left_out_leave_everything(on_ranks, reason, capturable):
    options = {**SHORT, **KINDS["kahan, normuon"], "capturable": capturable, "nonfinite": "skip"}
    launches = {**options, "backend": "triton"}
    *_, straight = said_of_left_out(options, "found_inf", TINY)
    for error, before, after, then in on_ranks(2, said_of_left_out, launches, reason, TINY):
        assert error is None
        assert_same(after, before)
        assert_same(then, straight)


MATRICES = [shape for shape in TINY if len(shape) > 1]
"""Without those that other launches step, which nobody takes back."""


@interpreted
@pytest.mark.parametrize("kind", names_but(LAUNCHES, ["boxes", "cast"]))
def test_launches_that_fail_on_one_rank_change_nothing_on_any(on_ranks, kind):
    options = {**SHORT, **KINDS["kahan, normuon"]}
    straight = placed(options, 3, shapes=MATRICES)
    launches = {**options, "backend": "triton"}
    for rank, found in enumerate(on_ranks(2, said_of, kind, launches, MATRICES)):
        error, before, after, then = found
        assert ("RuntimeError: no memory" if rank else FAILED) in error
        assert_same(after, before)
        assert_same(then, straight)


@interpreted
@pytest.mark.parametrize("kind", names_but(("direct", "boxes", "apply"), ["boxes"]))
def test_gradients_that_move_for_a_step_that_fails_are_followed(on_ranks, kind):
    """Steps before and after read them in one place, the one that fails on one rank in another."""
    options = {**SHORT, "weights": BF16, **MASTER, **FP16}
    straight = placed(options, 4, shapes=MANY[:4])
    launches = {**options, "backend": "triton"}
    found = on_ranks(2, moved_once, kind, launches, MANY[:4])
    assert_same_on_all(found, straight)


FIRST = [*((kind, 0) for kind in AT_FIRST), ("plans", 1), ("boxes", 1), ("notes", 1)]


@interpreted
@pytest.mark.parametrize(
    ("kind", "turn"), slow_but({f"{k}-{t}": (k, t) for k, t in FIRST}, ["plans-1", "notes-0"])
)
def test_a_first_step_whose_launches_fail_on_one_rank_can_be_taken_again(on_ranks, kind, turn):
    """What was planned before is not planned twice."""
    options = {**SHORT, **KINDS["kahan, normuon"]}
    launches = {**options, "backend": "triton"}
    found = on_ranks(2, said_of_a_first_step, kind, turn, launches, MATRICES)
    for rank, (error, _) in enumerate(found):
        assert ("RuntimeError: no memory" if rank else FAILED) in error
    assert_same_on_all([then for _, then in found], placed(options, 2, shapes=MATRICES))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("options", [{}, {**MASTER, "weights": BF16}], ids=["fp32", "masters"])
def test_a_step_sends_two_bytes_a_number_each_way(on_ranks, options, world, replicas):
    """To others: there from one copy, and back to all; sums are some bytes each.

    Experts are made where they are.
    """
    shapes = [(24, 12), (12, 24), (48, 12), (12, 12, 12)]
    numels, experts = 24 * 12 * 2 + 48 * 12, 12**3
    sent = on_ranks(world, bytes_sent, options, shapes, replicas)
    shards = world // replicas
    there = 2 * numels * (shards - 1) // shards
    back = 2 * numels * (world - 1) // shards + 2 * experts * (replicas - 1)
    assert sum(own["all_to_all_single"] for own in sent) == there + back
    matrices, peers = 3 + 12, 1
    for own in sent:
        assert own.keys() == {"all_to_all_single", "all_reduce"}
        # a matrix's bins, 16 rows of two int64, and the message in which ranks agree
        # words and two votes go to those with copies too
        beside = 8 * (4 + 2) * (replicas > 1)
        most = 8 * (16 * 16 * 2 + 4) * peers + 8 * shards + beside
        assert own["all_reduce"] - matrices * 256 <= most


def test_each_matrix_is_made_once_and_ranks_share_the_work(on_ranks):
    shapes = [(20, 30)] * 6 + [(7, 5)]
    made = on_ranks(3, matrices_made, trained, {"optimizer": FusedMuon}, 1, shapes=shapes)
    assert sorted(map(len, made)) == [2, 2, 3]


@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (3, 1)), ((4, 2), (2, 1)), ((3, 1), (4, 2))]
)
@pytest.mark.parametrize("kind", names_but(("masters, fp16", "kahan, normuon"), ["kahan, normuon"]))
def test_it_resumes_on_another_number_of_ranks(on_ranks, tmp_path, before, after, kind):
    options, folder = KINDS[kind], str(tmp_path / "saved")
    (world, copies), (others, their_copies) = before, after
    options = {**options, "optimizer": FusedMuon}
    on_ranks(world, save, options, 2, folder, False, SHAPES, copies)
    given = (options, 2, 2, folder, False, SHAPES, their_copies)
    found = on_ranks(others, load_and_train, *given)
    expected = trained(options, 4, shapes=SHAPES)
    assert_same_on_all([after for _, after in found], expected)


LARGE = [(40, 90), (10, 12), (7,)]
DIFFER = "ranks that hold parts of the same parameters must step the same"
FAILED = "another rank that steps the same parameters failed in this step"
WRONG = {
    "gradient": (DIFFER, DIFFER, SHAPES),
    "dtype": (DIFFER, DIFFER, SHAPES),
    "coefficients": (DIFFER, DIFFER, SHAPES),
    "lr": (DIFFER, "lr must be a finite number", SHAPES),
    "eps": (DIFFER, "eps must be a finite number", SHAPES),
    "sizes": (DIFFER, "split_sizes must add up to", SHAPES),
    "exchange": (FAILED, "RuntimeError: no memory", SHAPES),
    "tiles": (FAILED, "RuntimeError: no memory", LARGE),
}


@pytest.mark.parametrize("kind", WRONG)
def test_ranks_that_differ_or_fail_change_nothing_on_any(on_ranks, kind):
    """And all go on with the next step as if there had been none."""
    options, (elsewhere, there, shapes) = KINDS["kahan, normuon"], WRONG[kind]
    straight = trained({**options, "optimizer": FusedMuon}, 3, shapes=shapes)
    found = on_ranks(3, said_of, kind, options, shapes)
    for rank, (error, before, after, then) in enumerate(found):
        assert (there if rank == 2 else elsewhere) in error
        assert_same(after, before)
        assert_same(then, straight)


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shapes", [LARGE, [(90, 40)]], ids=["wide", "tall"])
@pytest.mark.parametrize(
    ("world", "replicas"), slow_but({"2": (2, 1), "3": (3, 1), "2x2": (4, 2)}, ["3", "2x2"])
)
def test_a_matrix_that_is_most_of_the_work_is_made_by_all(on_ranks, form, shapes, world, replicas):
    """Each rank makes tiles of it; the bits are those of one process."""
    options = {**MASTER, "weights": BF16, **FP16, **NORMUON, "method": form, "optimizer": FusedMuon}
    expected = trained(options, 3, shapes=shapes)
    found = on_ranks(world, by_small_tiles, trained, options, 3, replicas, shapes)
    assert_same_on_all([run for run, _ in found], expected)
    alone = by_small_tiles(trained, options, 3, 1, shapes)[1]
    works = [work for _, work in found]
    assert sum(works) < 1.5 * alone
    assert max(works) < 0.75 * alone


@pytest.mark.parametrize("momentum", names_but(("block_e4m3", "block32_e3m0"), ["block_e4m3"]))
@pytest.mark.parametrize("placements", ["rows", "columns", "rows and columns"])
def test_momenta_in_blocks_have_the_bits_of_one_process(on_ranks, placements, momentum):
    """Of shards of whole blocks: a row is of one or two, uneven rows go to ranks."""
    options = {**MASTER, "weights": BF16, "momentum_buffer_dtype": momentum, "seed": 5}
    shapes, sizes = [(33, 256), (64, 128)], (2, 2) if placements in MESHES else (2,)
    shapes = shapes[:1] if placements == "columns" else shapes
    shapes = [(shape[0], 256) for shape in shapes]
    expected = placed(options, 2, shapes=shapes)
    named = {"placements": placements, "sizes": sizes, "shapes": shapes}
    found = on_ranks(4 if len(sizes) == 2 else 2, placed, options, 2, **named)
    assert found[0]["states"][0]["momentum_buffer"].dtype == torch.uint8
    assert_same_on_all(found, expected)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("reason", ["found_inf", "nan"])
def test_a_step_that_is_left_out_leaves_everything(on_ranks, reason, capturable):
    """Also where numbers on the device say so, and owners make updates before they are known."""
    options = {**KINDS["kahan, normuon"], "capturable": capturable, "nonfinite": "skip"}
    for error, before, after, then in on_ranks(3, said_of_left_out, options, reason):
        assert error is None
        assert_same(after, before)
        with pytest.raises(AssertionError):
            assert_same(then["states"], before["states"])


@pytest.mark.parametrize("placements", ["rows", "columns", "rows and columns"])
def test_contract_eo_has_the_bits_of_one_process(on_ranks, placements):
    """By torch's operations, which are alike for all elements."""
    options = {"contract": "eo", "ns_coefficients": "quintic", "adjust_lr_fn": "spectral"}
    shapes, sizes = [(24, 16), (12, 36)], (2, 2) if placements in MESHES else (3,)
    expected = placed(options, 3, shapes=shapes)
    named = {"placements": placements, "sizes": sizes, "shapes": shapes}
    assert_same_on_all(on_ranks(4 if len(sizes) == 2 else 3, placed, options, 3, **named), expected)


@interpreted
def test_sizes_that_come_again_are_split_over_ranks_too(on_ranks):
    """Rows of one matrix lie apart, as in Megatron's QKV weights; launches, fp16."""
    options = {**KINDS["masters, fp16"], "optimizer": split_muon}
    shapes = [(12, 10), (24, 6), (4, 9)]
    expected = trained(options, 2, shapes=shapes)
    for backend in ("reference", "triton"):
        found = on_ranks(3, trained, {**options, "backend": backend}, 2, shapes=shapes)
        assert_same_on_all(found, expected)


RANKED = {"rank": 3, "update_proj_gap": 2, "proj_type": "auto", "refresh": "svd"}
OTHERWISE = {"muon": {"optimizer": FusedMuon}, "galore": {"optimizer": GaLoreAdamW, **RANKED}}


@pytest.mark.parametrize("options", OTHERWISE.values(), ids=OTHERWISE)
def test_ranks_whose_gradients_lie_otherwise_in_memory_have_the_same_bits(on_ranks, options):
    """As columns do in a shard of several rows, and not in one of a single row."""
    shapes = [(9, 4), (5, 4), (12, 8), (10, 6)]
    straight = on_ranks(4, lying_otherwise, options, 3, False, shapes)
    for found in on_ranks(4, lying_otherwise, options, 3, True, shapes):
        assert_same(found, straight[0])


def test_a_group_that_begins_anew_is_another(tmp_path):
    """Its meshes equal those from before, whose groups are gone."""
    ranks, one = Ranks(2, tmp_path), placed({}, 2, shapes=LARGE)
    for found in ranks(in_a_world_anew, tmp_path, LARGE):
        assert_same(found, [one, one])
    ranks.close()


def test_momenta_in_blocks_of_two_matrices_are_refused(on_ranks):
    """One process steps them; of ranks each would send a part of a block."""
    for text in on_ranks(2, said_of_parts_of_blocks, "block_e4m3"):
        assert "momentum_buffer_dtype='block_e4m3' must find whole blocks of 128" in text
        assert "got matrices of [(4, 600), (12, 600)]" in text
