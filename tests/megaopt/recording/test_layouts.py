"""The same run has the same rows in every layout, and batches add over ranks."""

import functools
import operator

import pytest
import torch
from fsdp2_ranks import SHAPES, Bare, give, gradients, sharded
from interpreted import interpreted
from recorded import kept, places, rows
from torch.distributed.fsdp import fully_shard

from megaopt import FusedAdam, Recorder
from megaopt.recording.files import LANES, Recording
from megaopt.recording.pieces import ShardRange, cut
from megaopt.recording.places import box

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "ours": lambda params: FusedAdam(params, lr=1e-3, backend="reference"),
    "launched": lambda params: FusedAdam(params, lr=1e-3, backend="triton"),
    "8 bit": lambda params: FusedAdam(
        params,
        lr=1e-3,
        backend="reference",
        exp_avg_dtype="block_e4m3",
        exp_avg_sq_dtype="block_e5m3",
    ),
}


def bare(out, name, is_sharded, replicas=1, shapes=SHAPES, steps=3, keep=()):
    """Records steps of parameters alone."""
    torch.manual_seed(0)  # of which ours take the seed of their random bits
    model = Bare(shapes)
    if is_sharded:
        sharded(model, replicas)
    optimizer = OPTIMIZERS[name](model.parameters())
    with Recorder(model, optimizer, out, keep=keep):
        for step in range(steps):
            give(list(model.parameters()), gradients(step, shapes))
            optimizer.step()


def small(out, is_sharded, is_late=False):
    """Records a model that runs, on a half of each batch where two ranks share it.

    is_late: the recorder hears of the optimizer after the forward, as `megaopt record` does.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    rank = torch.distributed.get_rank() if is_sharded else 0
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.arange(16.0).view(4, 4)
    with Recorder(model, [] if is_late else optimizer, out, level="modules") as recorder:
        model(batch[2 * rank : 2 * rank + 2] if is_sharded else batch).sum().backward()
        if is_late:
            recorder.add_optimizer(optimizer)
        optimizer.step()


def batches(out):
    """The digest of the batches of a recording's first step, over all ranks."""
    found = [each[0]["batch"] for each in Recording(out).scalars(1)]
    lanes = [(int(b[:16], 16), int(b[16:], 16)) for rank in found for b in rank]
    return tuple(functools.reduce(operator.add, lane) % LANES for lane in zip(*lanes, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fsdp2_on_any_number_of_ranks(on_ranks, tmp_path, name):
    shapes = [(6, 600), (5, 3), (1, 4), (7,)] if name != "8 bit" else [(12, 512), (5, 1024)]
    bare(tmp_path / "plain", name, False, shapes=shapes, keep=[2])
    expected = rows(tmp_path / "plain")
    dtypes = {value.dtype for value in Recording(tmp_path / "plain").values.values()}
    assert dtypes == {"float32", *(["uint8"] if name == "8 bit" else [])}
    for world, replicas in ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2)):
        out = tmp_path / f"{world}-{replicas}"
        on_ranks(world, bare, out, name, True, replicas, shapes, keep=[2])
        assert rows(out) == expected
        assert kept(out, 2) == kept(tmp_path / "plain", 2)


def lanes(recording):
    return [
        {key: (each.digest.low, each.digest.high) for key, each in recording.digests(step).items()}
        for step in recording.steps
    ]


@interpreted
def test_shards_that_a_launch_sums_up(on_ranks, tmp_path):
    shapes = [(8, 4), (12,), (64, 16)]
    bare(tmp_path / "plain", "ours", False, shapes=shapes)
    on_ranks(2, bare, tmp_path / "sharded", "launched", True, 1, shapes)
    plain, sharded = Recording(tmp_path / "plain"), Recording(tmp_path / "sharded")
    assert lanes(plain) == lanes(sharded)
    uncounted = {q for (_, q), each in sharded.digests(2).items() if each.digest.nonfinite is None}
    assert uncounted == {"grad", "weight", "exp_avg", "exp_avg_sq"}


def test_samples_are_those_of_the_whole(on_ranks, tmp_path):
    bare(tmp_path / "plain", "adamw", False)
    on_ranks(3, bare, tmp_path / "sharded", "adamw", True)
    plain, sharded = Recording(tmp_path / "plain"), Recording(tmp_path / "sharded")
    for step in plain.steps:
        first, second = plain.samples(step), sharded.samples(step)
        assert first.keys() == second.keys()
        for key, (held, bits) in first.items():
            assert (held, bits.tolist()) == (second[key][0], second[key][1].tolist())


def test_batches_add_over_ranks(on_ranks, tmp_path):
    small(tmp_path / "plain", False)
    on_ranks(2, small, tmp_path / "sharded", True)
    assert batches(tmp_path / "plain") == batches(tmp_path / "sharded")
    lines = [sources[0] for sources in Recording(tmp_path / "sharded").scalars(1)]
    assert [len(line["losses"]) for line in lines] == [1, 1]


def test_meshes_are_known_before_the_optimizer(on_ranks, tmp_path):
    for name, is_late in (("early", False), ("late", True)):
        on_ranks(2, small, tmp_path / name, True, is_late)
    early, late = (Recording(tmp_path / name).run["layout"] for name in ("early", "late"))
    assert early == late
    (mesh,) = early["meshes"]
    assert "Shard(dim=0)" in mesh


@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((4, 6), (1, 0), (2, 6)),
        ((4, 6), (0, 2), (4, 3)),
        ((4, 6), (1, 2), (2, 3)),
        ((3, 4, 5), (0, 1, 0), (3, 2, 5)),
        ((3, 4, 5), (1, 1, 1), (2, 2, 3)),
        ((2, 3, 4, 5), (1, 1, 1, 1), (1, 2, 2, 3)),
        ((2, 3, 4, 5), (0, 1, 0, 2), (2, 2, 4, 2)),
        ((5,), (2,), (3,)),
        ((), (), ()),
    ],
)
def test_boxes_lie_where_torch_says(shape, start, size):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    pieces = tuple(box(shape, start, size))
    assert places(pieces) == part.flatten().tolist()
    for low in range(part.numel() + 1):
        for high in range(low, part.numel() + 1):
            assert places(cut(pieces, low, high)) == part.flatten()[low:high].tolist()
    for place in whole.flatten().tolist():
        local = [piece.local(place) for piece in pieces if piece.local(place) is not None]
        expected = (part.flatten() == place).nonzero().flatten().tolist()
        assert local == expected


def test_a_flat_shard_of_columns_is_three_pieces():
    (piece,) = box((8, 10), (0, 5), (8, 5))
    assert [numel for _, numel, _ in cut([piece], 3, 28)] == [2, 20, 3]
    assert isinstance(piece, ShardRange)
