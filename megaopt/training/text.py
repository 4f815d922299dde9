"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

# installed packages and caches lie inside the standard library's folder but are no part of it
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


class CorpusError(ValueError):
    """There is no text to train on, or too little of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text as bytes, with the hash that identifies it."""

    tokens: torch.Tensor
    """uint8, shape (bytes,), on the CPU."""
    sha256: str
    """Hexadecimal SHA-256 of the bytes."""
    files: int
    """Number of files that were concatenated."""


def source_files(root: Path) -> list[Path]:
    """The *.py files under root, without installed packages, sorted by relative path."""
    found = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    kept = [path for path in found if not EXCLUDED_FOLDERS.intersection(path.parts)]
    # sorted as text: the order of Path objects differs between systems
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load_corpus(root: Path | None = None) -> Corpus:
    """Concatenates the source files under root.

    Args:
        root: a folder; the running Python's standard library by default.

    Raises:
        CorpusError: no source file was found.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = source_files(root)
    if not files:
        raise CorpusError(f"root = {str(root)!r} holds no *.py file: the text is Python's source")
    text = b"".join(path.read_bytes() for path in files)
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return Corpus(tokens=tokens, sha256=hashlib.sha256(text).hexdigest(), files=len(files))


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
