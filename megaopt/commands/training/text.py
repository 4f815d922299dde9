"""The text to train on, as bytes: the same on every machine and with every Python."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from megaopt.commands.config import Run
from megaopt.commands.training.sentences import sentences

SEED, LENGTH = 1, 2**20


class CorpusError(ValueError):
    """There is too little text to train on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text as bytes, with the hash that identifies it."""

    tokens: torch.Tensor
    """uint8, shape (bytes,), on the CPU."""
    sha256: str
    """Hexadecimal SHA-256 of the bytes."""


@cache
def load_corpus() -> Corpus:
    """The text of all runs: 2**20 bytes of generated sentences; made once, so not to be written."""
    text = sentences(SEED, LENGTH).encode("ascii")
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return Corpus(tokens=tokens, sha256=hashlib.sha256(text).hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The batches of a run: that of a step depends on seed and step alone."""

    corpus: Corpus
    seed: int
    batch_size: int
    context: int

    def __post_init__(self) -> None:
        length = self.corpus.tokens.numel()
        if length <= self.context:
            raise CorpusError(
                f"context must be less than the {length} bytes of the text, got {self.context}"
            )

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, int64 of shape (batch_size, context), on the CPU.

        Nothing is drawn from a running generator, so a resumed run sees the batches that an
        uninterrupted one sees.
        """
        digest = hashlib.sha256(f"{self.seed}:{step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        last = self.corpus.tokens.numel() - self.context
        starts = torch.randint(last, (self.batch_size, 1), generator=generator)
        tokens = self.corpus.tokens[starts + torch.arange(self.context + 1)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batches_of(run: Run, corpus: Corpus) -> Batches:
    """The batches of a run."""
    return Batches(
        corpus=corpus, seed=run.seed, batch_size=run.batch_size, context=run.model.context
    )
