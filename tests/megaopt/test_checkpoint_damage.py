"""A damaged checkpoint is refused, wherever the damage lies; one without a digest never lies."""

import random

import pytest
import torch
from checkpoints import example, flipped, is_refused

from megaopt.commands import checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


@pytest.fixture
def whole(path):
    """The bytes of a checkpoint."""
    checkpoint.save(path, example())
    return path.read_bytes()


@pytest.fixture
def without_digest(path):
    """The bytes of a file of torch.save."""
    torch.save(example(), path)
    return path.read_bytes()


def directory_of(content):
    """Where the zip archive's directory begins, with all that follows it."""
    return content.index(b"PK\1\2")


def with_slow(name, few, many):
    slow = pytest.param(many, marks=pytest.mark.slow)
    return pytest.mark.parametrize(name, [few, slow], ids=["few", "many"])


def tries(few, many):
    return with_slow("tries", few, many)


def one_in(few):
    """Every so many-th place; every one in the slow test."""
    return with_slow("every", few, 1)


def test_a_whole_file_loads(path, whole, without_digest):
    assert not is_refused(path, whole, example())
    assert not is_refused(path, without_digest, example())


@tries(1_000, 20_000)
def test_any_flipped_bit_is_refused(path, whole, tries):
    generator = random.Random(0)
    for _ in range(tries):
        place = generator.randrange(8 * len(whole))
        assert is_refused(path, flipped(whole, *divmod(place, 8)), example()), place


@one_in(11)
def test_flipped_bits_of_the_archives_directory_and_of_the_digest_are_refused(path, whole, every):
    for place in range(8 * directory_of(whole), 8 * len(whole), every):
        assert is_refused(path, flipped(whole, *divmod(place, 8)), example()), place


@one_in(13)
def test_a_truncated_file_is_refused(path, whole, every):
    lengths = {*range(0, len(whole), every), *range(len(whole) - 200, len(whole))}
    for length in sorted(lengths):
        assert is_refused(path, whole[:length], example()), length


@tries(300, 10_000)
def test_a_file_with_a_piece_cut_out_is_refused(path, whole, tries):
    generator = random.Random(1)
    for _ in range(tries):
        begin, end = sorted(generator.sample(range(len(whole) + 1), 2))
        end = generator.choice([end, begin + 1, begin + 64])
        assert is_refused(path, whole[:begin] + whole[end:], example()), (begin, end)


@tries(300, 10_000)
def test_a_file_with_bytes_behind_before_or_within_is_refused(path, whole, tries):
    generator = random.Random(2)
    for _ in range(tries):
        place = generator.choice([len(whole), 0, generator.randrange(len(whole))])
        added = generator.randbytes(generator.choice([1, 2, 22, 512, 4096]))
        added = generator.choice([added, bytes(len(added)), whole])
        assert is_refused(path, whole[:place] + added + whole[place:], example()), place


@tries(300, 10_000)
def test_a_file_with_a_part_overwritten_is_refused(path, whole, tries):
    generator = random.Random(3)
    for _ in range(tries):
        place, size = generator.randrange(len(whole)), generator.choice([1, 8, 512])
        part = whole[place : place + size]
        new = generator.choice([bytes(len(part)), generator.randbytes(len(part))])
        damaged = whole[:place] + new + whole[place + len(part) :]
        assert is_refused(path, damaged, example()) == (damaged != whole), place


def test_a_digest_of_another_file_is_refused(path, whole):
    checkpoint.save(path, {**example(), "step": 8})
    other = path.read_bytes()
    assert len(other) == len(whole)
    assert is_refused(path, whole[:-64] + other[-64:], example())


def test_a_file_whose_digest_was_cut_off_is_refused(path, whole):
    """It would pass for one without, of which no more than the CRCs are known."""
    comment = len(whole) - whole.index(b"megaopt: SHA-256")
    assert is_refused(path, whole[:-comment], example())


# --- files without a digest: refused, or the same bits


@one_in(7)
def test_flipped_bits_of_a_directory_without_digest_never_lie(path, without_digest, every):
    places = range(8 * directory_of(without_digest), 8 * len(without_digest), every)
    refused = [
        is_refused(path, flipped(without_digest, *divmod(place, 8)), example()) for place in places
    ]
    assert sum(refused) > len(refused) // 2


def test_a_record_marked_as_a_folder_is_refused(path, without_digest):
    """torch's reader would give memory that nobody has written; zipfile reads its bytes."""
    place = without_digest.index(b"PK\1\2")
    while place >= 0:
        assert is_refused(path, flipped(without_digest, place + 38, 4), example())
        place = without_digest.find(b"PK\1\2", place + 4)


def test_a_file_behind_another_of_its_size_is_refused(path, without_digest):
    """zipfile reads the second, torch the first, whose CRCs nobody has looked at."""
    torch.save({**example(), "step": 8}, path)
    other = path.read_bytes()
    assert len(other) == len(without_digest)
    assert is_refused(path, other + without_digest, example())


@tries(300, 10_000)
def test_damage_to_a_file_without_digest_never_lies(path, without_digest, tries):
    generator, content, refused = random.Random(4), without_digest, 0
    for _ in range(tries):
        place, size = generator.randrange(len(content)), generator.choice([1, 2, 64])
        bit = generator.randrange(8)
        damaged = generator.choice(
            [
                flipped(content, place, bit),
                content[:place],
                content[:place] + content[place + size :],
                content + generator.randbytes(size),
            ]
        )
        refused += is_refused(path, damaged, example())
    assert refused > tries // 2
