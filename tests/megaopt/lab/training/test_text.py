import hashlib

import pytest
import torch

from megaopt.lab.toml_tables import ConfigError
from megaopt.lab.training.text import Corpus, TextBatches, load_corpus

TEXT = "0fc370a38b7c23b9b6bc4b1ac25226ee4daff1f5824f33e605c1e52f8eb6d6c2"


def test_the_text_is_the_same_everywhere():
    """By its hash: what depends on the machine, on Python or on a run of it has another."""
    corpus = load_corpus()
    text = bytes(corpus.tokens.tolist())
    assert corpus.tokens.dtype == torch.uint8
    assert len(text) > 1_000_000
    assert corpus.sha256 == hashlib.sha256(text).hexdigest() == TEXT


def corpus_of(length):
    tokens = (torch.arange(length) % 251).to(torch.uint8)
    return Corpus(tokens=tokens, sha256="")


def batches_of(seed, length=1000):
    return TextBatches(corpus=corpus_of(length), seed=seed, batch_size=4, context=16)


def test_a_batch_depends_on_seed_and_step_alone():
    straight, resumed = batches_of(3), batches_of(3)
    expected = [straight.at(step) for step in range(1, 6)]
    torch.manual_seed(99)
    for step in (5, 2, 4):
        for tensor, same in zip(resumed.at(step), expected[step - 1], strict=True):
            assert torch.equal(tensor, same)


def test_targets_are_the_bytes_that_follow():
    inputs, targets = batches_of(0).at(1)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % 251)


def test_a_corpus_of_one_sequence_less_a_byte_is_refused():
    with pytest.raises(
        ConfigError, match="context must be less than the 16 bytes of the text, got 16"
    ):
        batches_of(0, length=16)
