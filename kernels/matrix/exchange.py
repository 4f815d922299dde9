"""Ranks that share matrices: what they do for one another, and how a rule makes updates there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megaopt.kernels.matrix.plan import FLOAT32, check_update
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import Matrix, Work

Tensors = list[torch.Tensor]
NEUTRAL = (1.0, 1.0, 1.0, 0.0, 0.0)
"""Controls that leave an update as it is."""
ALIGNED = 256
"""Pieces of a step's memory begin at multiples of so many bytes."""
WHOLLY: Any = ...
"""The rows of a parameter that is one matrix: of a kept tensor all of it."""


class ParameterMatrix(NamedTuple):
    """A matrix of a parameter."""

    param: int
    """The parameter's place in the batch."""
    rows: Any
    """Its rows among those of all matrices of the parameter, a slice; WHOLLY: it is the only one.
    """
    shape: tuple[int, ...]


class MatrixPart(NamedTuple):
    """Numbers of a matrix that this rank has; of one there may be several."""

    piece: int
    """The matrix's place in its bucket."""
    first: int
    """Its first number in the rank's part of the parameter, where its numbers follow each other."""
    numel: int


class MatrixBox(NamedTuple):
    """Rows of numbers of a matrix, and where they lie in a message, one behind another."""

    matrix: int
    """Its place in `Bucket.indices`."""
    first: int
    """The count of the matrix's numbers before its first."""
    rows: int
    columns: int
    stride: int
    """The distance between the beginnings of rows in the matrix."""
    place: int
    """The count of the message's numbers before its first."""


class Local(NamedTuple):
    """A matrix of which no other rank has any part."""

    piece: ParameterMatrix
    runs: list[tuple[int, int]]
    """Its numbers in this rank's tensor: where those that follow each other begin, how many."""


class Bucket(Protocol):
    """Matrices that are on their way together."""

    pieces: Sequence[ParameterMatrix]
    parts: Sequence[MatrixPart]
    """The parts, in the order in which they are sent; none is empty."""
    returned: Sequence[int]
    """The places at which parts begin among those that come back."""
    indices: Sequence[int]
    """The places of the matrices that this rank makes."""
    unpacked: Sequence[MatrixBox]
    """The boxes of the matrices `indices` in which the numbers lie that come to this rank."""
    packed: Sequence[MatrixBox]
    """The boxes in which those lie that it sends back."""
    owner: int | None
    """The rank to which the parts of the only matrix go, where all ranks make it together."""


class Exchange(Protocol):
    """The ranks that hold the parts of a batch of matrices; all call the same in the same order.

    `near` has numbers of parts and `far` those of whole matrices, both as bytes, uint8.
    """

    buckets: Sequence[Any]
    """The buckets, each a Bucket."""
    lows: Sequence[Any]
    """The buckets of what `before` makes of each one's matrices: the same where that is SAME."""
    owned: Sequence[Sequence[ParameterMatrix]]
    """The matrices that each rank makes, in the order of the buckets."""
    rank: int
    """This rank's place among them."""
    ranks: int
    """The number of ranks."""
    local: Sequence[Local]
    """Matrices in no bucket, which this rank makes: it alone has them."""
    most: tuple[int, int]
    """The most numbers of `near` and of `far` that a bucket takes."""
    keeps_order: bool
    """Messages to owners come behind those that went back before: all are of NCCL's stream."""

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds up in place over the ranks that hold the other parts of the same matrices."""

    def there(self, bucket: Any, near: torch.Tensor, far: torch.Tensor, size: int) -> Any:
        """Sends parts in `near` to their matrices' owners; returns what waits, or None.

        size: bytes of a number.
        """

    def back(self, bucket: Any, far: torch.Tensor, near: torch.Tensor, size: int) -> Any:
        """Sends each rank its parts; returns what waits, or None."""

    def hand_out(self, whole: torch.Tensor, owner: int) -> None:
        """Gives all ranks the owner's tensor, in place."""

    def spread(
        self, tensors: Tensors, lengths: Sequence[int], memory: torch.Tensor
    ) -> torch.Tensor:
        """Puts together what all ranks have, of so many numbers each, one behind another.

        memory: of `tiles.room_of` numbers; nothing else is taken.
        """


# --- how a rule makes updates


class UpdateMaker:
    """The way in which updates are made: by the rule's transform, of fp32.

    A rule may have a way of its own.
    """

    direction = sent = FLOAT32
    """The formats of directions, and of what ranks send one another."""
    plans: Any = None
    """The maker of elementwise plans, as a backend is one; None: the backend."""
    shares_work = False
    """Ranks may make a matrix together: there are `room`, `together` and `finish`."""
    launches: Any = None
    """The class that steps a bucket by launches, as TorchBucket by torch's operations: MuonBucket;
    where the rule has a `before`, it is also given the low bucket and places: GaLoreBucket."""
    alone: Any = None
    """Makes the launches of matrices that one rank alone has; None: they are in buckets, too."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def sums(self, pieces: Sequence[ParameterMatrix], device: torch.device) -> torch.Tensor | None:
        """New memory for what is added up over the ranks of each matrix; None where nothing is."""
        return None

    def measure(self, directions: Tensors, parts: Sequence[MatrixPart], sums: torch.Tensor) -> None:
        """Adds what is known of this rank's parts of directions to the sums."""

    def cast(
        self, directions: Tensors, parts: Sequence[MatrixPart], notes: Any, out: Tensors
    ) -> None:
        """Makes what is sent of directions; `out` are these themselves where formats are alike."""

    def notes(self, sums: Any, pieces: Sequence[ParameterMatrix]) -> Any:
        """Returns what `cast` and `make` must know of the matrices, by the sums over all ranks."""

    def make(
        self,
        wholes: Tensors,
        pieces: Sequence[ParameterMatrix],
        indices: Sequence[int],
        notes: Any,
        states: Any,
    ) -> Tensors:
        """Makes the updates of matrices.

        pieces: of the bucket. indices: the matrices' places there, and in the notes. states: what
        states keep for each, which may be written.
        """
        updates = []
        for whole, index, state in zip(wholes, indices, states, strict=True):
            update = self.matrix.rule.after.run(whole, Work(self.matrix.how, Place(0), state))
            check_update(self.matrix, update, whole.dtype, pieces[index].shape)
            updates.append(update)
        return updates


class Renewal(NamedTuple):
    """A step in which what states keep is made anew."""

    turns: Sequence[int]
    """Parameters by their places in the batch, the same on all ranks."""
    renew: Callable[[Sequence[int], Callable[[int], torch.Tensor]], None]
    """Makes it anew for some of them, of the gradient of the one at an index of these."""


NOTHING_NEW = Renewal((), lambda params, grad: None)
