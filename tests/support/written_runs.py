"""Recordings of ranks and blocks that never ran: rows are written, and a fault is a row changed."""

import json
import zlib
from itertools import product

import numpy

from megaopt.recording.files import NOT_COUNTED, ROW, SAMPLE, Recording, Value, Writer, hexadecimal

# Recordings as older versions wrote them.


def undated(folder):
    """Takes away what tells from which step on an optimizer's groups are so, and what is new."""
    for rank in folder.glob("rank-*"):
        rewrite(rank / "manifest.jsonl", ("step", "anew"))
        rewrite(rank / "scalars.jsonl", ("has_all_old",))


def rewrite(path, left_out):
    lines = map(json.loads, path.read_text().splitlines())
    kept = ({key: own for key, own in line.items() if key not in left_out} for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


MODULES = ("embed", "blocks.0", "blocks.1", "head")
PARAMETERS = tuple(f"{module}.weight" for module in MODULES)
STEPS, AT, CALLS = 4, 3, 2
SHAPE = (8, 4)
HALF = 16
"""Elements of a parameter's half."""
ENVIRONMENT = {"torch": "2.10", "card": "H200", "variables": {}}


class Run:
    """What to write: a row is changed where `changed` says so, from its step on.

    Args:
        faults: (step, rank, name, quantity, call) of rows whose digests are other ones; None
            stands for any.
    """

    def __init__(self, *faults, world=2, shards=False, layout=None, **environment):
        self.faults, self.world, self.shards = faults, world, shards
        self.run = {
            "world": world,
            "level": "blocks",
            "every": 1,
            "argv": [],
            "environment": {**ENVIRONMENT, **environment},
            "layout": layout or {},
        }
        self.scalars, self.moves, self.counts = {}, [], {}

    def saying(self, step, rank, **numbers):
        """Other numbers of a step of a rank."""
        self.scalars[step, rank] = numbers
        return self

    def counting(self, rank, count):
        """A rank that counts what is not finite."""
        self.counts[rank] = count
        return self

    def moved(self, *moves):
        """Samples of quantities, moved by so many units in the last place: (step, quantity, by)."""
        self.moves = moves
        return self

    def write(self, folder):
        for rank in range(self.world):
            writer = Writer(folder, rank, self.run)
            groups, order = [list(PARAMETERS)], list(PARAMETERS)
            writer.optimizer({"class": "torch.optim.AdamW", "groups": groups, "order": order})
            for step in range(1, STEPS + 1):
                rows = numpy.array([self.row(writer, step, rank, *r) for r in self.rows()], ROW)
                samples = numpy.array(list(self.samples(writer, step, rank)), SAMPLE)
                writer.step(step, 0, self.numbers(step, rank), rows, samples)
            writer.close()
        return Recording(folder)

    def rows(self):
        for call, module in product(range(CALLS), MODULES):
            yield module, "forward", call
        for call, module in product(range(CALLS), MODULES[::-1]):
            yield module, "backward", call
        for name in PARAMETERS[::-1]:
            yield name, "local grad", 0
        for name, quantity in product(PARAMETERS, ("grad", "weight", "exp_avg", "old weight")):
            yield name, quantity, 0

    def row(self, writer, step, rank, name, quantity, call):
        alone = quantity in ("forward", "backward", "local grad")
        value = Value(name, quantity, "float32", SHAPE, None if alone else self.place(rank))
        whose = rank if alone else rank * self.shards
        # what a step finds is what the step before left
        at = (step - 1, "weight") if quantity == "old weight" else (step, quantity)
        low = zlib.crc32(repr((at, name, call, whose)).encode())
        return (
            writer.number(value),
            self.counts.get(rank, NOT_COUNTED),
            low + self.added(step, rank, name, quantity, call),
            1,
        )

    def place(self, rank):
        return (rank * HALF, HALF, 0, HALF) if self.shards else (0, 2 * HALF, 0, 2 * HALF)

    def added(self, *row):
        return sum(
            all(mine in (None, theirs) for mine, theirs in zip(fault, row, strict=True))
            for fault in self.faults
        )

    def samples(self, writer, step, rank):
        for name, quantity in product(PARAMETERS, ("grad", "weight")):
            by = sum(move for at, which, move in self.moves if at <= step and which == quantity)
            words = numpy.zeros(64, "<u4")
            start = zlib.crc32(f"{name} {quantity} {step}".encode()) % 1000
            words[:32] = int(numpy.float32(1).view("<u4")) + start + by
            number = writer.number(Value(name, quantity, "float32", SHAPE, self.place(rank)))
            yield number, 4, 2**32 - 1, words

    def numbers(self, step, rank):
        own = {
            "losses": [hexadecimal(step + rank / 8)],
            "grad_norm": None,
            "groups": [{"lr": hexadecimal(0.1), "foreach": None, "step": step}],
            "loss_scale": None,
            "skipped": None,
            "rng": {"torch": f"{step:032x}"},
            "batch": [f"{100 * step + 10 * rank + call:032x}" for call in range(CALLS)],
        }
        return {**own, **self.scalars.get((step, rank), {})}
