"""Whatever ends a process leaves all whole steps readable; equal runs leave equal files."""

import json
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from ranks import PRELOADED
from recorded import recorded

from megaopt.recording.files import Recording, RecordingError

NAMES = ("samples.bin", "rows.bin", "scalars.jsonl")
"""In the order in which a step is written."""


def contents(folder):
    found = Recording(folder)
    return {
        step: (found.scalars(step), found.digests(step), found.own(step), samples(found, step))
        for step in found.steps
    }


def samples(recording, step):
    return {key: (held, bits.tolist()) for key, (held, bits) in recording.samples(step).items()}


def ends(folder):
    """The size of each file after each write, in the order of writes: how a kill may leave them."""
    sizes = dict.fromkeys(NAMES, 0)
    whole = {name: (folder / name).read_bytes() for name in NAMES}
    lines = whole["scalars.jsonl"].splitlines(keepends=True)
    rank = Recording(folder.parent).ranks[0]
    for line in lines:
        for name in NAMES:
            yield name, dict(sizes)
            if name == "scalars.jsonl":
                sizes[name] += len(line)
            else:
                sizes[name] += block(whole[name], sizes[name])
    assert sizes == {name: len(data) for name, data in whole.items()}
    assert len(rank.scalars) == len(lines)


def block(data, place):
    """The bytes of the block that begins there."""
    row = {b"ROWS": 24, b"SAMP": 272}[data[place : place + 4]]
    return 24 + row * int.from_bytes(data[place + 16 : place + 24], "little") + 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a"
    recorded("adamw foreach", out, level="modules", count=6)
    return out


def test_a_kill_at_any_byte_leaves_all_whole_steps(run, tmp_path):
    expected, writes = contents(run), list(ends(run / "rank-0"))
    draws = random.Random(0)
    for trial in range(200):
        out = shutil.copytree(run, tmp_path / str(trial))
        place = draws.randrange(len(writes))
        writing, sizes = writes[place]
        after = writes[place + 1][1] if place + 1 < len(writes) else None
        limit = after[writing] if after else (run / "rank-0" / writing).stat().st_size
        sizes = {**sizes, writing: draws.randint(sizes[writing], limit)}
        for name, size in sizes.items():
            with open(out / "rank-0" / name, "r+b") as file:
                file.truncate(size)
        done = place // len(NAMES) + (writing == "scalars.jsonl" and sizes[writing] == limit)
        found = contents(out)
        assert found == {step: expected[step] for step in range(1, done + 1)}


@pytest.mark.parametrize("name", ["rows.bin", "samples.bin"])
def test_a_changed_byte_of_a_block_is_refused_wherever_it_is(run, tmp_path, name):
    out = shutil.copytree(run, tmp_path / "a")
    path = out / "rank-0" / name
    whole = path.read_bytes()
    draws = random.Random(0)
    places = [*range(28), len(whole) - 1, *(draws.randrange(len(whole)) for _ in range(100))]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << draws.randrange(8)
        path.write_bytes(data)
        with pytest.raises(RecordingError, match=f"rank-0/{name}' must be "):
            Recording(out)


CUTS = {"rows.bin": -1, "samples.bin": -1, "scalars.jsonl": 2000, "manifest.jsonl": -1}


@pytest.mark.parametrize("name", CUTS)
def test_a_file_that_is_cut_where_no_kill_cuts_it_is_refused(run, tmp_path, name):
    """As a machine that stops may leave it: a file has its last bytes, another has not."""
    out = shutil.copytree(run, tmp_path / "a")
    path = out / "rank-0" / name
    path.write_bytes(path.read_bytes()[: CUTS[name]])
    with pytest.raises(RecordingError, match=r"(rows|samples)\.bin' must be .*(json|counts)"):
        Recording(out)


def test_a_line_that_is_lost_is_refused(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "a")
    path = out / "rank-0/scalars.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(RecordingError, match=r"rows\.bin' must be .* step 4, got .* step 3"):
        Recording(out)


@pytest.mark.parametrize("name", [*NAMES, "manifest.jsonl"])
@pytest.mark.parametrize("kind", ["none", "folder", "pipe"])
def test_what_is_no_regular_file_is_refused(run, tmp_path, name, kind):
    out = shutil.copytree(run, tmp_path / "a")
    path = out / "rank-0" / name
    path.unlink()
    if kind != "none":
        (os.mkdir if kind == "folder" else os.mkfifo)(path)
    with pytest.raises(RecordingError, match=name):
        Recording(out)


def test_a_recording_is_read_while_it_is_written(run, tmp_path, monkeypatch):
    """Each file grows by all that is left as soon as the reader has opened one."""
    out, expected = shutil.copytree(run, tmp_path / "a"), contents(run)
    for name, size in list(ends(run / "rank-0"))[6][1].items():
        os.truncate(out / "rank-0" / name, size)
    is_file = Path.is_file

    def grows(path):
        found = is_file(path)
        if path.name == "rows.bin":  # the lines have been read
            for name in NAMES:
                shutil.copy(run / "rank-0" / name, out / "rank-0" / name)
        return found

    monkeypatch.setattr(Path, "is_file", grows)
    assert contents(out) == {step: expected[step] for step in (1, 2)}


LINES = {
    "no text": b"\xff\n",
    "no JSON": b"{\n",
    "no object": b"[1]\n",
    "without its keys": b'{"is": "value", "name": "a"}\n',
    "of no kind": b'{"name": "a", "quantity": "grad", "dtype": "x", "shape": [1]}\n',
    "of a kind that is no text": b'{"is": ["value"], "name": "a"}\n',
    "of another kind": b'{"is": "valve", "name": "a"}\n',
    "ended otherwise": b'{"is": "value", "name": "a"}\r{}\n',
    "of other kinds": b'{"is": "value", "name": "a", "quantity": "grad", "place": 1, "shape": 1}\n',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_damaged_line_is_named(run, tmp_path, line):
    out = shutil.copytree(run, tmp_path / "a")
    path = out / "rank-0" / "manifest.jsonl"
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(RecordingError, match=r"lines? .*rank-0.* must (be|have) .*, got"):
        Recording(out)


@pytest.mark.slow
def test_killed_processes_leave_whole_steps(tmp_path):
    recorded("adamw foreach", tmp_path / "whole", level="modules", count=120)
    expected, draws, torn = contents(tmp_path / "whole"), random.Random(0), 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for trial in range(200):
        out = tmp_path / str(trial)
        process = context.Process(target=recorded, args=("adamw foreach", out, 10**9, "modules"))
        process.start()
        while not any(out.glob("*/manifest.jsonl")) or not lines(out / "rank-0/manifest.jsonl"):
            assert process.is_alive()
        time.sleep(draws.uniform(0, 0.05))
        grows = out / "rank-0" / NAMES[trial % 4] if trial % 4 < 3 else None
        size = grows and grows.stat().st_size
        while grows and grows.stat().st_size == size:  # then it is killed between two writes
            pass
        process.kill()
        process.join()
        steps = contents(out)
        assert steps == {step: expected[step] for step in range(1, len(steps) + 1)}
        assert len(steps) == lines(out / "rank-0/scalars.jsonl")
        torn += len(steps) < blocks(out / "rank-0/samples.bin")
    assert torn > 0  # some were killed within a step's writes


def lines(path):
    return path.read_bytes().count(b"\n")


def blocks(path):
    """How many blocks begin there."""
    return path.read_bytes().count(b"SAMP")


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_equal_steps_leave_equal_files(tmp_path, count):
    for name in ("a", "b"):
        recorded("adamw foreach", tmp_path / name, level="blocks", count=count)
    a, b = tmp_path / "a" / "rank-0", tmp_path / "b" / "rank-0"
    for name in ("rows.bin", "samples.bin"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    first, second = (json_lines(folder / "scalars.jsonl") for folder in (a, b))
    assert len(first) == count
    assert first == second


def json_lines(path):
    """Of the generators only torch's is used, and Python's is another in each process."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**line, "rng": line["rng"]["torch"]} for line in found]
