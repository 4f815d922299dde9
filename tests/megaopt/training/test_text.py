import hashlib

import pytest
import torch

from megaopt.training.text import Batches, Corpus, CorpusError, load_corpus


@pytest.fixture
def tree(tmp_path):
    files = {
        "b.py": "second",
        "a/z.py": "first",
        "c.txt": "not Python",
        "a/site-packages/p.py": "installed",
        "dist-packages/q.py": "installed",
        "a/__pycache__/r.py": "cached",
        # sorts between "b.py" and "b/..." as text: "b-" < "b." < "b/"
        "b-.py": "dash",
        "b/d.py": "third",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_corpus_is_the_sorted_source(tree):
    corpus = load_corpus(tree)
    text = b"first" + b"dash" + b"second" + b"third"
    assert bytes(corpus.tokens.tolist()) == text
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    assert corpus.files == 4


def test_a_changed_byte_changes_the_hash(tree):
    before = load_corpus(tree).sha256
    (tree / "b.py").write_text("sec0nd")
    assert load_corpus(tree).sha256 != before


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"holds no \*\.py file"):
        load_corpus(tmp_path)


def test_the_standard_library_is_a_corpus():
    corpus = load_corpus()
    assert corpus.tokens.dtype == torch.uint8
    assert corpus.tokens.numel() > 1_000_000


def corpus_of(length):
    tokens = (torch.arange(length) % 251).to(torch.uint8)
    return Corpus(tokens=tokens, sha256="", files=1)


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
