"""The processes of variants with ranks: a pool, of which every variant uses the first so many."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from megaopt.commands.bits import Snapshot, loss_bits, pack, unpack
from megaopt.commands.config import FusedVariant, RunConfig
from megaopt.commands.exits import describe_error
from megaopt.commands.regression.compare import find_mismatch
from megaopt.commands.regression.processes import Processes, RankError
from megaopt.commands.regression.shards import ShardedWeights
from megaopt.commands.regression.variants import build_trainer_with
from megaopt.commands.training.determinism import deterministic
from megaopt.commands.training.trainer import Trainer

Batch = tuple[torch.Tensor, torch.Tensor]
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others."""


class Reply(NamedTuple):
    """What a rank tells of a step: its loss, its weights and, rank 0 alone, the gathered state."""

    loss: float
    packed: dict[str, Any]


def variants_with_ranks(config: RunConfig) -> list[FusedVariant]:
    """Those that workers train."""
    return [run for run in config.runs if isinstance(run, FusedVariant) and run.ranks is not None]


# --- in the processes


def _serve(
    rank: int, world: int, config: RunConfig, device: str, meeting: str, parent: Connection
) -> None:
    """A rank's process: trains its variants on each batch that the parent sends, until None."""
    try:
        with deterministic(config.cpu_threads):
            dist.init_process_group(
                "gloo", f"file://{meeting}", PATIENCE, world_size=world, rank=rank
            )
            trainers = _build_trainers(rank, config, torch.device(device))
            while (arrays := _next(parent)) is not None:
                batch = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
                parent.send({name: _train(each, batch) for name, each in trainers.items()})
            dist.destroy_process_group()
    except Exception as error:
        with suppress(OSError):  # the command has ended: nobody listens
            parent.send(describe_error(error))


def _next(parent: Connection) -> Any:
    """What the parent sends; None where it has ended."""
    try:
        return parent.recv()
    except (EOFError, OSError):
        return None


def _build_trainers(rank: int, config: RunConfig, device: torch.device) -> dict[str, Trainer]:
    variants = variants_with_ranks(config)
    sizes = sorted({variant.ranks for variant in variants if variant.ranks is not None})
    # all processes make all groups, in one order, their own or not
    groups = {size: dist.new_group(list(range(size)), PATIENCE) for size in sizes}
    return {
        variant.name: build_trainer_with(
            config,
            variant,
            device,
            lambda model, run, own: ShardedWeights(
                model, run.optimizer, own, groups[own.ranks or 0]
            ),
        )
        for variant in variants
        if variant.ranks is not None and rank < variant.ranks
    }


def _train(trainer: Trainer, batch: Batch) -> Reply:
    loss, owner = trainer.train_step(batch), trainer.owner
    assert isinstance(owner, ShardedWeights)
    gathered = owner.snapshot()
    return Reply(loss, pack(gathered if owner.rank == 0 else owner.weights(), arrays=True))


# --- beside the other variants


class WorkerGroup:
    """Starts and feeds the processes; a context in which they live.

    Args:
        config: the run; it has variants with ranks.
        device: where they train.
        folder: an existing folder, for them to meet.
    """

    def __init__(self, config: RunConfig, device: torch.device, folder: Path) -> None:
        self.config, self.device = config, device
        self._meeting = folder / "meeting"
        # torch's threads do not survive a fork
        self._context = multiprocessing.get_context("spawn")
        self._processes = Processes(self._context, daemon=True)
        self._connections: list[Connection] = []
        self._replies: list[dict[str, Reply]] = []

    def __enter__(self) -> WorkerGroup:
        world = max(variant.ranks or 0 for variant in variants_with_ranks(self.config))
        for rank in range(world):
            own, theirs = self._context.Pipe()
            given = (rank, world, self.config, str(self.device), str(self._meeting), theirs)
            self._processes.start(f"rank{rank}", _serve, *given)
            self._connections.append(own)
            theirs.close()  # so that its end is seen here
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            for connection in self._connections:
                with suppress(OSError):
                    connection.send(None)
            self._processes.join()
        # after an error one may wait for another
        self._processes.__exit__(kind, error, where)
        for connection in self._connections:
            connection.close()
        self._connections = []

    def begin(self, batch: Batch) -> None:
        """Lets all variants train on a batch; returns at once."""
        self._replies = []
        for connection in self._connections:
            with suppress(OSError):  # of a process that has ended: `replies` says so
                connection.send([tensor.numpy() for tensor in batch])

    def replies(self, name: str) -> list[Reply]:
        """What a variant's ranks tell of the step; waits for them.

        Raises:
            RankError: a process failed; the message ends with what it said.
        """
        if not self._replies:
            self._replies = self._receive()
        return [replies[name] for replies in self._replies if name in replies]

    def _receive(self) -> list[dict[str, Reply]]:
        received: dict[int, dict[str, Reply]] = {}
        while len(received) < len(self._connections):
            missing = {c: r for r, c in enumerate(self._connections) if r not in received}
            # whoever is first: one that failed lets the others wait
            for ready in wait(list(missing)):
                rank = missing[cast("Connection", ready)]
                received[rank] = self._take(rank)
        return [replies for _, replies in sorted(received.items())]

    def _take(self, rank: int) -> dict[str, Reply]:
        try:
            reply = self._connections[rank].recv()
        except (EOFError, OSError):
            reply = "its process ended"
        if isinstance(reply, str):
            raise RankError(f"rank {rank} failed: {reply[-2000:].strip()}")
        taken: dict[str, Reply] = reply
        return taken


class WorkerTrainer:
    """A variant with ranks in the place of a Trainer: it trains in the workers' processes.

    Loss and snapshot are rank 0's, or those of the first rank that has other bits.
    """

    def __init__(self, name: str, workers: WorkerGroup) -> None:
        self.name, self.workers = name, workers
        self._snapshot: Snapshot = {}

    @property
    def owner(self) -> WorkerTrainer:
        """Itself: whose snapshot is asked for."""
        return self

    def train_step(self, batch: Batch) -> float:
        """The loss of the step that `WorkerGroup.begin` began with the batch."""
        first, *others = self.workers.replies(self.name)
        self._snapshot = unpack(first.packed, self.workers.device)
        for other in others:
            theirs = unpack(other.packed, self.workers.device)
            snapshot = {name: {**kinds, **theirs[name]} for name, kinds in self._snapshot.items()}
            if find_mismatch(snapshot, self._snapshot) is not None:
                self._snapshot = snapshot
                break
        for other in others:
            if loss_bits(other.loss) != loss_bits(first.loss):
                return other.loss
        return first.loss

    def snapshot(self) -> Snapshot:
        """The weights and the state after the last step."""
        return self._snapshot
