"""What ranks do in the tests of FusedMuon's DTensors."""

import contextlib
from unittest import mock

from fsdp2_ranks import build, trained

from megaopt import FusedMuon
from megaopt.kernels.matrix import bucket, tiles
from megaopt.kernels.muon import newton_schulz
from megaopt.step.ranks import owners

SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 20), (5, 6, 7), (4, 3, 2, 2), (1, 5)]
"""Tall, wide, of fewer rows than ranks, a vector, experts, a convolution."""


def made_at(options, placements=None, sizes=(), shapes=SHAPES, **named):
    """A model and an optimizer of its DTensors; without placements of whole tensors."""
    own = {"optimizer": FusedMuon, **options}
    return build(own, shapes=shapes, place=placements, sizes=sizes, **named)


def placed(options, steps, placements=None, sizes=(), shapes=SHAPES, **named):
    """What an optimizer of DTensors, a FusedMuon where options name none, has after steps."""
    own = {"optimizer": FusedMuon, **options}
    return trained(own, steps, shapes=shapes, place=placements, sizes=sizes, **named)


def divided(options, steps, shapes, kind="group", alone=False, **named):
    """What a FusedMuon has of plain parameters, which all ranks have; alone: all make all."""
    own = {"optimizer": FusedMuon, **options}
    return trained(own, steps, shapes=shapes, place=None if alone else kind, **named)


def matrices_made(function, *arguments, **named):
    """The shapes of the matrices that this rank makes in a function."""
    shapes, iterated = [], newton_schulz.iterated

    def counting(room, *own):
        shapes.extend(tuple(matrix.shape) for matrix in room.first)
        return iterated(room, *own)

    with mock.patch.object(newton_schulz, "iterated", counting):
        function(*arguments, **named)
    return shapes


def in_small_buckets(room, *arguments, made=placed, **named):
    """What `made` returns with buckets of so many bytes."""
    with mock.patch.object(owners.Owners.__init__, "__defaults__", (False, False, room)):
        return made(*arguments, **named)


def by_launches(options, *arguments, made=placed, **named):
    """What `made` returns where no rank steps a bucket by torch's operations, as the twin does."""
    refused = AssertionError("a bucket of torch's operations")
    with mock.patch.object(bucket.TorchBucket, "direct", side_effect=refused):
        return made({**options, "backend": "triton"}, *arguments, **named)


CHANGED = {
    "coefficients": {"ns_steps": 3},
    "lr": {"lr": "much"},
    "eps": {"eps": None},
    "sizes": {"split_sizes": (3,)},
}


def by_small_tiles(function, *arguments, **named):
    """What a function returns, and the multiply-adds of this rank's products."""
    work = []
    names = ("products", "symmetric_products")
    with contextlib.ExitStack() as stack:
        for module in (tiles, newton_schulz.launch):
            own = {name: counted(getattr(module, name), work) for name in names}
            stack.enter_context(mock.patch.multiple(module, **own))
        stack.enter_context(mock.patch.object(tiles, "UNIT", 8))
        found = function(*arguments, **named)
    return found, sum(work)


def counted(function, work):
    """The function, which notes the multiply-adds of its products."""

    def call(left, *own, **others):
        is_symmetric = function.__name__ == "symmetric_products"
        right = others.get("right") if is_symmetric else own[0]
        turned = [each.mT for each in left] if right is None else right
        for a, b in zip(left, turned, strict=True):
            work.append(a.shape[0] * b.shape[1] * a.shape[1] * (0.5 if is_symmetric else 1))
        return function(left, *own, **others)

    return call
