import hashlib
import re

import pytest
import torch

from megaopt.commands.training.sentences import GRAMMAR, sentences
from megaopt.commands.training.text import Batches, Corpus, CorpusError, load_corpus

TEXT = "0fc370a38b7c23b9b6bc4b1ac25226ee4daff1f5824f33e605c1e52f8eb6d6c2"


def test_the_text_is_the_same_everywhere():
    """By its hash: what depends on the machine, on Python or on a run of it has another."""
    corpus = load_corpus()
    text = bytes(corpus.tokens.tolist())
    assert corpus.tokens.dtype == torch.uint8
    assert len(text) > 1_000_000
    assert corpus.sha256 == hashlib.sha256(text).hexdigest() == TEXT


def test_a_seed_gives_one_text_and_another_gives_another():
    text = sentences(5, 3000)
    assert sentences(5, 3000) == text
    assert sentences(6, 3000) != text
    assert sentences(5, 1000) == text[:1000]


def test_every_name_of_the_grammar_is_written_out():
    text = bytes(load_corpus().tokens.tolist()).decode()
    assert not re.search("[A-Z]", text)
    entries = " ".join(entry for entries in GRAMMAR.values() for entry in entries)
    assert set(re.findall("[a-z]+", entries)) == set(re.findall("[a-z]+", text))


def corpus_of(length):
    tokens = (torch.arange(length) % 251).to(torch.uint8)
    return Corpus(tokens=tokens, sha256="")


def batches_of(seed, length=1000):
    return Batches(corpus=corpus_of(length), seed=seed, batch_size=4, context=16)


def test_a_batch_depends_on_seed_and_step_alone():
    straight, resumed = batches_of(3), batches_of(3)
    expected = [straight.at(step) for step in range(1, 6)]
    torch.manual_seed(99)
    for step in (5, 2, 4):
        for tensor, same in zip(resumed.at(step), expected[step - 1], strict=True):
            assert torch.equal(tensor, same)


def test_other_steps_and_seeds_give_other_batches():
    drawn = [batches_of(seed).at(step)[0] for seed in (0, 1, 2) for step in (1, 2, 3)]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    batches_of(3).at(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_targets_are_the_bytes_that_follow():
    inputs, targets = batches_of(0).at(1)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % 251)


def test_the_first_and_the_last_byte_can_be_drawn():
    batches = batches_of(0, length=19)
    drawn = {int(start) for step in range(1, 20) for start in batches.at(step)[0][:, 0]}
    assert drawn == {0, 1, 2}
    assert max(int(batches.at(step)[1].max()) for step in range(1, 20)) == 18


def test_a_corpus_of_one_sequence_less_a_byte_is_refused():
    with pytest.raises(
        CorpusError, match="context must be less than the 16 bytes of the text, got 16"
    ):
        batches_of(0, length=16)
