"""The text to train on, as bytes: the same on every machine and with every Python.

English-looking sentences, drawn from a grammar.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from megaopt.lab.config import TrainingConfig
from megaopt.lab.toml_tables import require

SEED, LENGTH = 1, 2**20

# a name in capitals stands for one of its entries
PHRASES = {
    "TEXT": ["SENTENCE SENTENCE\n", "SENTENCE SENTENCE SENTENCE\n", "SENTENCE\n"],
    "SENTENCE": [
        "CLAUSE.", "CLAUSE, LINK CLAUSE.", "HOW CLAUSE.", "AT THING, CLAUSE.", "CLAUSE; CLAUSE.",
        "LINK CLAUSE, CLAUSE.", "is it that CLAUSE?", "CLAUSE, which WAS KIND.",
    ],
    "CLAUSE": [
        "THING DID THING", "THING DID THING AT THING", "THING WAS KIND", "THING DID THING HOW",
        "THING AT THING WAS KIND", "THING WAS KIND LINK KIND", "THING that DID THING DID THING",
    ],
    "THING": ["THE NOUN", "THE KIND NOUN", "THE NOUN of THE NOUN", "THE KIND, KIND NOUN"],
}  # fmt: skip
WORDS = {
    "THE": "the a this that every another some no each one our their",
    "KIND": (
        "old new small large long first last quiet early dark young clear open deep broken heavy "
        "bright narrow common strange empty simple cold slow warm hidden round careful wooden "
        "distant patient green sudden golden honest hollow gentle ancient crooked"
    ),
    "NOUN": (
        "man house day water hand year river night door word road city child letter morning light "
        "ship voice table winter garden machine story field window stone harbour market bridge "
        "teacher number engine forest captain island village lamp summer horse doctor mountain "
        "clock station painter valley engineer museum library orchard lantern question answer "
        "carpenter journey mirror railway kitchen shepherd signal cathedral"
    ),
    "DID": (
        "saw found took kept made held followed left knew opened brought carried heard turned "
        "remembered watched crossed built moved reached covered changed drew answered closed "
        "counted measured mended gathered forgot described surrounded repeated borrowed"
    ),
    "WAS": "was became seemed remained looked grew stayed felt",
    "AT": "in on from with under over near behind beside beyond across toward against",
    "HOW": (
        "again then often slowly never always quickly soon almost quietly suddenly together "
        "perhaps carefully rarely yesterday gladly"
    ),
    "LINK": "and but while because when so although before until where",
}
GRAMMAR = PHRASES | {name: words.split() for name, words in WORDS.items()}
NAME = re.compile("[A-Z]+")


class _Writer:
    """Draws by a linear congruential generator of 64 bits (Knuth's), in whole numbers alone."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, count: int) -> int:
        """Returns a whole number from 0 to count - 1."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 32) * count >> 32

    def write(self, name: str) -> str:
        """One of the entries of a name, the first of them more often, with its names written."""
        entries = GRAMMAR[name]
        entry = entries[self.below(1 + self.below(len(entries)))]
        return NAME.sub(lambda match: self.write(match[0]), entry)


def sentences(seed: int, length: int) -> str:
    """Lines of sentences.

    Args:
        seed: an integer >= 0; another seed, another text.
        length: number of characters, all of them ASCII: the last sentence is cut there.
    """
    writer, written, lines = _Writer(seed), 0, []
    while written < length:
        lines.append(writer.write("TEXT"))
        written += len(lines[-1])
    return "".join(lines)[:length]


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
class TextBatches:
    """The batches of a run: that of a step depends on seed and step alone."""

    corpus: Corpus
    seed: int
    batch_size: int
    context: int

    def __post_init__(self) -> None:
        length = self.corpus.tokens.numel()
        allowed = f"less than the {length} bytes of the text"
        require(length > self.context, "context", self.context, allowed)

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


def batches_of(run: TrainingConfig, corpus: Corpus) -> TextBatches:
    """The batches of a run."""
    return TextBatches(
        corpus=corpus, seed=run.seed, batch_size=run.batch_size, context=run.model.context
    )
