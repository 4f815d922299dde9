"""The files of a recording: a folder for each rank, written by appending, read with numpy alone.

docs/recording.md has every byte. A rank's folder holds

    manifest.jsonl  what was run, the optimizers, and the values that rows name by number
    samples.bin     sampled elements, a block a step
    rows.bin        digests, a block a step
    scalars.jsonl   numbers of the host, a line a step
    kept/           step-N.safetensors, whole tensors of steps that were asked for

A step is written in this order, its line in scalars.jsonl last, and is whole once that line is. So
whatever ends a process leaves all whole steps readable, and at most one block and a cut end behind
them in each file; a file in which something else is not as it was written is damaged. Ranks
write without asking each other: the reader sums the digests of shards and compares those of
replicas.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy

from megaopt.recording.checks import (
    LINE,
    OPTIMIZER,
    RUN,
    SCALARS,
    STEP,
    TENSOR,
    VALUE,
    RecordingError,
    check,
    read_json,
    require,
)

SCHEMA = 1
SAMPLES = 64
"""Words of 4 bytes in a row of samples: elements, or halves of elements of 8 bytes."""
NOT_COUNTED = 0xFFFFFFFF
"""Stands where nobody counted the elements that are not finite."""
LANES = 2**64

HEADER = numpy.dtype([("magic", "S4"), ("source", "<u4"), ("step", "<u8"), ("rows", "<u8")])
ROW = numpy.dtype([("value", "<u4"), ("nonfinite", "<u4"), ("low", "<u8"), ("high", "<u8")])
SAMPLE = numpy.dtype(
    [("value", "<u4"), ("width", "<u4"), ("held", "<u8"), ("words", "<u4", SAMPLES)]
)
MAGIC = {"rows": b"ROWS", "samples": b"SAMP"}
BLOCKS = ("rows.bin", "samples.bin")
"""A step's last file first."""
CHECK = numpy.dtype("<u4")
WIDTHS = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes of an element, by dtype; of others a row says it alone."""


class Value(NamedTuple):
    """The subject of a row: one quantity of one tensor, and the part of it that a rank holds."""

    name: str
    """Canonical: of the parameter, or of the module whose output it is."""
    quantity: str
    """One of "grad", "weight", "old weight", "master", "exp_avg", "forward", "backward" ..."""
    dtype: str
    """The name that torch prints, without "torch."."""
    shape: tuple[int, ...]
    """The whole tensor's shape, over all ranks."""
    place: tuple[int, int, int, int] | None = None
    """(first, run, stride, numel): element i < numel of the part is element
    first + i // run * stride + i % run of the whole; with a stride of 0 element first + i. None:
    the rank's own, which no other rank's belongs to (a block's output, an unreduced gradient)."""


class Writer:
    """Appends one rank's recording to its folder, which is made.

    Args:
        folder: of the run.
        rank: of this process.
        run: what is to be known of the run; JSON can hold it.
        raises: whether a write that fails, as on a full disk, raises OSError. Else a warning says
            so, once, and nothing more is written: a training goes on.

    Raises FileExistsError where the rank has a recording there already.
    """

    def __init__(
        self, folder: Path, rank: int, run: Mapping[str, Any], raises: bool = True
    ) -> None:
        self.folder = folder / f"rank-{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        # x: another recording of this rank stays; unbuffered, so that a killed process loses
        # no whole step
        try:
            self._files: dict[str, BinaryIO] = {
                name: open(self.folder / name, "xb", buffering=0)  # noqa: SIM115 closed by close
                for name in ("manifest.jsonl", "samples.bin", "rows.bin", "scalars.jsonl")
            }
        except FileExistsError:
            raise FileExistsError(
                f"out must be a folder without a recording of rank {rank}, got {str(folder)!r};"
                " a process without RANK and without a process group is rank 0; where several such"
                " processes train, start each by a `megaopt record` of its own, or make a Recorder"
                " with its own out in each instead"
            ) from None

        self._raises, self.is_stopped = raises, False
        """True once nothing more is written, as nothing behind a torn block could be read."""
        self._numbers: dict[Value, int] = {}
        self._append("manifest.jsonl", _line({"is": "run", "schema": SCHEMA, "rank": rank, **run}))

    def optimizer(self, description: Mapping[str, Any]) -> None:
        """Describes an optimizer; the first is source 0 of steps, the next source 1.

        A description with a "source" of that number replaces the one before, as where parameters
        get names.
        """
        self._append("manifest.jsonl", _line({"is": "optimizer", **description}))

    def number(self, value: Value) -> int:
        """Returns the number by which rows name a value; a new value is written to the manifest.

        A value of one rank alone is one value whatever its shape, which may change in each step.
        """
        key = value if value.place is not None else value._replace(shape=())
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._append("manifest.jsonl", _line({"is": "value", **value._asdict()}))
        return self._numbers[key]

    def step(
        self,
        step: int,
        source: int,
        scalars: Mapping[str, Any],
        rows: numpy.ndarray[Any, Any] | None = None,
        samples: numpy.ndarray[Any, Any] | None = None,
    ) -> None:
        """Writes one step of one optimizer.

        Args:
            step: from 1.
            source: the optimizer's number.
            scalars: JSON can hold them; floats as `hexadecimal` writes them.
            rows: of dtype ROW. A value may have several, in the order in which they came.
            samples: of dtype SAMPLE.
        """
        # samples before rows before the line of scalars: the line says that both are whole
        counts = {}
        for name, array, dtype in (("samples", samples, SAMPLE), ("rows", rows, ROW)):
            counts[name] = 0 if array is None else len(array)
            if array is not None and len(array):
                # header, rows, CRC-32 of both
                header = numpy.array((MAGIC[name], source, step, len(array)), HEADER).tobytes()
                data = header + numpy.ascontiguousarray(array, dtype).tobytes()
                checksum = numpy.array(zlib.crc32(data), CHECK).tobytes()
                self._append(f"{name}.bin", data + checksum)
        self._append("scalars.jsonl", _line({"step": step, "source": source, **scalars, **counts}))

    def close(self) -> None:
        """Closes the files; nothing was kept back before."""
        for file in self._files.values():
            file.close()

    def stop(self, error: BaseException) -> None:
        """Writes nothing more, and warns of it once; training goes on."""
        if not self.is_stopped:
            self.is_stopped = True
            why = str(error) or type(error).__name__
            words = f"nothing more is recorded in {str(self.folder)!r}: {why}"
            warnings.warn(words, RuntimeWarning, stacklevel=2)

    def _append(self, name: str, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self.is_stopped:  # a raw file may take a part
                view = view[self._files[name].write(view) :]
        except OSError as error:
            if self._raises:
                raise
            self.stop(error)


def hexadecimal(number: float) -> str:
    """Returns a float as a recording holds it: every bit, and readable."""
    return float(number).hex()


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


class Digest(NamedTuple):
    """The digest of a whole tensor, or of a rank's own."""

    low: int
    high: int
    nonfinite: int | None
    """The number of elements that are not finite; None where nobody counted."""

    def __str__(self) -> str:
        return f"{self.low:016x}{self.high:016x}"


class Summed(NamedTuple):
    """The digest of one tensor over all ranks."""

    digest: Digest
    """The whole tensor's digest; where a rank is missing the digest of what there is."""
    missing: int
    """Elements that no rank has recorded."""
    replicas: tuple[tuple[int, ...], ...]
    """Ranks that hold the same part and differ in it, each group alike; empty where all agree."""
    group_digests: tuple[Digest, ...] = ()
    """The digests of the groups in `replicas`, in their order."""


Key = tuple[str, str]
"""A tensor's name and a quantity."""
Blocks = dict[tuple[int, int], numpy.ndarray[Any, Any]]
"""Rows by step and source."""


class Rank:
    """One rank's recording, its whole steps.

    Raises RecordingError for a folder without one, or one of another schema, or damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest, scalars = folder / "manifest.jsonl", folder / "scalars.jsonl"
        if not manifest.exists():
            words = "recording must be a folder with manifest.jsonl"
            raise RecordingError(f"{words}, got {str(folder)!r}")
        # the run may go on meanwhile: what names something is read before what it names
        written, *blocks = (_content(folder / name) for name in ("scalars.jsonl", *BLOCKS))
        # manifest: a line for the run, one for each description of an optimizer, one for each value
        lines = list(_lines(_content(manifest), manifest))
        for line in lines:
            check(line, LINE, f"lines of {str(manifest)!r}")

        whole = bool(lines) and lines[0]["is"] == "run"
        require(whole, f"{str(manifest)!r}", "begun by the line of the run", lines[:1])
        self.run: dict[str, Any] = {"environment": {}, **without_none(lines[0])}
        """The first line of the manifest."""
        schema = self.run.get("schema")
        require(schema == SCHEMA, f"schema of {str(folder)!r}", str(SCHEMA), schema)
        check(self.run, RUN, f"lines of {str(manifest)!r}")

        # a later description of one source replaces the one before
        optimizer_lines = [without_none(line) for line in lines if line["is"] == "optimizer"]
        for line in optimizer_lines:
            check(line, OPTIMIZER, f"lines of {str(manifest)!r}")
        numbered = {line.get("source", index): line for index, line in enumerate(optimizer_lines)}
        self.optimizers = [{"options": {}, **numbered[source]} for source in sorted(numbered)]
        self.descriptions: dict[int, list[dict[str, Any]]] = defaultdict(list)
        """The descriptions of each optimizer, in the order of writing."""
        for index, line in enumerate(optimizer_lines):
            self.descriptions[line.get("source", index)].append(line)

        # rows name values by their place among these
        self.values = [_value(line, manifest) for line in lines if line["is"] == "value"]
        self.scalars: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        """Lines by step and source."""
        # a line for each step of each optimizer
        steps = [without_none(line) for line in _lines(written, scalars)]
        for line in steps:
            check(line, {**STEP, **SCALARS}, f"lines of {str(scalars)!r}")
            self.scalars[line["step"]][line["source"]] = line
        # lines may have been written since the first look at the file
        grows = scalars.stat().st_size != len(written)
        self._rows, self._samples = (
            self._blocks_of(steps, path, content, grows)
            for path, content in zip(map(folder.joinpath, BLOCKS), blocks, strict=True)
        )
        self._check_samples()

    def _blocks_of(
        self,
        steps: Sequence[dict[str, Any]],
        path: Path,
        content: numpy.ndarray[Any, Any],
        grows: bool,
    ) -> Blocks:
        """Returns the rows of steps' blocks in a file, by step and source; pops counts from lines.

        grows: whether the run has gone on since the lines were read.

        Raises RecordingError for blocks other than the lines count, but for those of one more step,
        whose line a kill may have prevented.
        """
        rows_by_key: Blocks = {}
        # blocks stand in the order of the lines: one for each count that is not 0
        blocks, where = _blocks(content, path), f"blocks of {str(path)!r}"
        for line in steps:
            count, key = line.pop(path.stem), (line["step"], line["source"])
            if count:
                # (step, source) of the block, and its rows: a view of the file
                *block_key, rows = next(blocks, (0, 0, numpy.empty(0, ROW)))
                allowed = f"those that scalars.jsonl counts: {count} rows of step {key[0]}"
                what = f"{len(rows)} of step {block_key[0]}" if len(rows) else "no whole block"
                require((*block_key, len(rows)) == (*key, count), where, allowed, what)
                names_known = rows["value"].max() < len(self.values)
                require(bool(names_known), where, "of values in manifest.jsonl", "others")
                rows_by_key[key] = rows
        # whole blocks behind the last line: at most that of a step whose line is missing
        left = [step for step, *_ in blocks]
        require(grows or len(left) < 2, where, "counted by lines of scalars.jsonl", left)
        return rows_by_key

    def _check_samples(self) -> None:
        """Raises RecordingError for samples that are not of the manifest's tensors."""
        # by value: bytes of an element (0: not known), elements, whether ranks share it
        widths = numpy.array([WIDTHS.get(value.dtype, 0) for value in self.values], "u4")
        numels = [min(math.prod(value.shape), SAMPLES) for value in self.values]
        elements = numpy.array(numels, "i8")
        shared = numpy.array([value.place is not None for value in self.values], bool)
        # rows: dtype SAMPLE [n]; held: a bit for each sampled element that this rank has
        for rows in self._samples.values():
            number, width = rows["value"], rows["width"]
            dtype_widths = widths[number]
            most = numpy.minimum(elements[number], numpy.where(width == 8, SAMPLES // 2, SAMPLES))
            # no bits behind the tensor's last element
            beyond = rows["held"] >> numpy.minimum(most, SAMPLES - 1).astype("u8")
            held_fits = (most == SAMPLES) | (beyond == 0)
            same_width = (dtype_widths == 0) | (dtype_widths == width)
            width_fits = numpy.isin(width, (1, 2, 4, 8)) & same_width
            if not (held_fits & width_fits & shared[number]).all():
                where = f"samples in {str(self.folder / 'samples.bin')!r}"
                raise RecordingError(f"{where} must be of the tensors that the manifest names")

    @property
    def number(self) -> int:
        """The rank."""
        return int(self.run["rank"])

    def described(self, source: int, step: int) -> list[dict[str, Any]]:
        """Returns the descriptions of an optimizer at a step, the last first.

        There are several where it was described anew within the step, and where older versions
        wrote several, which do not say from which step on they hold.
        """
        lines = [line for line in self.descriptions.get(source, ()) if line.get("step", 0) <= step]
        first = max((line.get("step", 0) for line in lines), default=0)
        return [line for line in reversed(lines) if line.get("step", 0) == first]

    def values_at(self, step: int) -> dict[Key, Value]:
        """Returns the values of a step's rows and samples, with their dtypes and shapes there."""
        # the first row of a value is the last to be written into the dict, and stays
        numbers = dict[int, None]()
        for blocks in (self._rows, self._samples):
            for source in sorted(self.scalars.get(step, ())):
                block = blocks.get((step, source))
                numbers |= dict.fromkeys([] if block is None else block["value"].tolist())
        values = (self.values[number] for number in reversed(numbers))
        return {(value.name, value.quantity): value for value in values}

    def rows(self, step: int) -> Iterator[tuple[Value, Digest]]:
        """Yields the digests of a step, in the order in which they were written."""
        for value, nonfinite, low, high in self._rows_of(self._rows, step):
            counted = None if nonfinite == NOT_COUNTED else int(nonfinite)
            yield self.values[value], Digest(int(low), int(high), counted)

    def samples(
        self, step: int, source: int | None = None
    ) -> Iterator[tuple[Value, int, numpy.ndarray[Any, Any]]]:
        """Yields each value's sampled elements: which the rank has (a bit each), and their bits.

        The bits are of the dtype's width, as unsigned integers; 64 elements, 32 of 8 bytes.
        source: samples of this optimizer's step alone; None: of all.
        """
        for value, width, held, words in self._rows_of(self._samples, step, source):
            yield self.values[value], int(held), words.view("<u8") if width == 8 else words

    def kept(self, step: int) -> dict[Key, numpy.ndarray[Any, Any]]:
        """Returns the bits of a step's whole tensors, flat as in the rank's memory: file views."""
        sources = self.scalars.get(step, ())
        files = (_tensors(path_of_kept(self.folder, step, source)) for source in sources)
        pairs = (pair for file in files for pair in file)
        return {(key.rpartition("|")[0], key.rpartition("|")[2]): bits for key, bits in pairs}

    def places(self, step: int, key: Key) -> list[tuple[int, int, int, int]]:
        """Returns the places of the rank's pieces of a tensor, in the order of its memory."""
        values = (value for value, _ in self.rows(step) if (value.name, value.quantity) == key)
        return list(dict.fromkeys(value.place for value in values if value.place is not None))

    def alike(self, peer: Rank, step: int) -> bool:
        """Returns whether a step has the same numbers, rows and values in the same order.

        It is quick, and where it is False the step may still be the same in another order. Samples
        and random states do not count.
        """
        lines, peer_lines = (
            {source: {**line, "rng": None} for source, line in rank.scalars.get(step, {}).items()}
            for rank in (self, peer)
        )
        if lines != peer_lines or self.values != peer.values:
            return False
        empty, keys = numpy.empty(0, ROW), [(step, source) for source in lines]
        pairs = ((blocks.get(key, empty) for blocks in (self._rows, peer._rows)) for key in keys)
        return all(numpy.array_equal(a, b) for a, b in pairs)

    def _rows_of(self, blocks: Blocks, step: int, only: int | None = None) -> Iterator[Any]:
        for source in sorted(self.scalars.get(step, ())):
            if only in (None, source):
                yield from blocks.get((step, source), ())


def path_of_kept(folder: Path, step: int, source: int) -> Path:
    """Returns the file of whole tensors that a rank keeps of a step of one optimizer."""
    name = f"step-{step}" + (f"-{source}" if source else "")
    return folder / "kept" / f"{name}.safetensors"


def encodable(name: str) -> str:
    """Returns a name for files of kept tensors: lone surrogates, which UTF-8 lacks, as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


DEFAULTED = ("environment", "options", "steps_as", "source", "losses", "groups", "rng", "batch")
"""Keys for which readers have something else where they are not there, as an empty list."""


def without_none(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line without the keys in `DEFAULTED` that are null."""
    nothing = {name for name in DEFAULTED if line.get(name) is None}
    return {name: value for name, value in line.items() if name not in nothing}


def _value(line: Mapping[str, Any], path: Path) -> Value:
    check(line, VALUE, f"lines of {str(path)!r}")
    place = line.get("place")
    texts = line["name"], line["quantity"], line["dtype"]
    value = Value(*texts, tuple(line["shape"]), None if place is None else (*place,))
    end = 0  # behind the last element at the place
    if value.place is not None and value.place[3]:
        first, run, stride, numel = value.place
        runs = (numel - 1) // run * stride + (numel - 1) % run + 1 if stride else numel
        end = first + runs
    fits = end <= math.prod(value.shape)
    require(fits, f"place in lines of {str(path)!r}", f"within the shape {value.shape}", place)
    return value


def _content(path: Path) -> numpy.ndarray[Any, Any]:
    """Returns the bytes of a file, a view; raises RecordingError where there is no regular file."""
    kind = "a file" if path.is_file() else "another kind of file" if path.exists() else "none"
    require(kind == "a file", f"{str(path)!r}", "a regular file", kind)
    return numpy.memmap(path, "u1", "r") if path.stat().st_size else numpy.empty(0, "u1")


def _lines(data: numpy.ndarray[Any, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a file's bytes, as JSON; RecordingError for a line that is none."""
    for number, line in enumerate(data.tobytes().split(b"\n")[:-1], 1):
        where = f"line {number} of {str(path)!r}"
        content = read_json(line, where)
        if not isinstance(content, dict):
            raise RecordingError(f"{where} must be a JSON object, got {line[:40]!r}")
        yield content


def _tensors(path: Path) -> Iterator[tuple[str, numpy.ndarray[Any, Any]]]:
    """Yields the name and bits of each tensor in a file of safetensors.

    The file has a length, JSON of that length, and bytes.
    """
    if not path.exists():
        return
    where, data = f"the file of kept tensors {str(path)!r}", _content(path)
    size = len(data)
    require(size >= 8, where, "whole", f"{size} bytes")
    # 8 bytes: the length of the JSON header behind them
    start = 8 + int(data[:8].view("<u8")[0])
    content = read_json(data[8:start].tobytes(), where)
    require(isinstance(content, dict), where, "an object for each tensor", content)
    for name, entry in content.items():
        if name == "__metadata__":
            continue
        check(entry if isinstance(entry, dict) else {}, TENSOR, where)
        # offsets count from the end of the header
        begin, end = entry["data_offsets"]
        require(begin <= end <= size - start, where, f"{start + end} bytes long", size)
        # bits as unsigned integers of the dtype's width; odd dtypes are left out
        width = (end - begin) // max(math.prod(entry["shape"]), 1)
        if width in (1, 2, 4, 8) and (end - begin) % width == 0:
            yield name, data[start + begin : start + end].view(f"<u{width}")


def _blocks(
    data: numpy.ndarray[Any, Any], path: Path
) -> Iterator[tuple[int, int, numpy.ndarray[Any, Any]]]:
    """Yields the step, source and rows of each whole block in a file's bytes: views of them.

    Raises RecordingError for bytes that are neither one nor, at the end, the beginning of one.
    """
    magic, dtype = MAGIC[path.stem], ROW if path.stem == "rows" else SAMPLE
    place = 0
    while place < len(data):
        where, begins = f"byte {place} of {str(path)!r}", data[place : place + 4].tobytes()
        require(magic.startswith(begins), where, f"the beginning of a block, {magic!r}", begins)
        # a header or a block that the file ends in was being written
        if place + HEADER.itemsize > len(data):
            return
        header = data[place : place + HEADER.itemsize].view(HEADER)[0]
        end = place + HEADER.itemsize + int(header["rows"]) * dtype.itemsize
        if end + CHECK.itemsize > len(data):
            return
        # the checksum is of header and rows
        checksum = int(data[end : end + CHECK.itemsize].view(CHECK)[0])
        where, actual = f"the block from {where}", zlib.crc32(data[place:end].data)
        require(actual == checksum, where, f"of the checksum {checksum:08x}", f"{actual:08x}")
        rows = data[place + HEADER.itemsize : end].view(dtype)
        yield int(header["step"]), int(header["source"]), rows
        place = end + CHECK.itemsize


@dataclass
class Recording:
    """The recording of a run, of all its ranks.

    Args:
        folder: with a folder rank-0, rank-1 ... for each rank.

    Raises RecordingError where there is none.
    """

    folder: Path
    ranks: list[Rank] = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        folders = self.folder.glob("rank-*")
        self.ranks = sorted((Rank(folder) for folder in folders), key=lambda rank: rank.number)
        if not self.ranks:
            words = "recording must be a folder with rank-0"
            raise RecordingError(f"{words}, got {str(self.folder)!r}")
        numbers = [rank.number for rank in self.ranks]
        once = len(set(numbers)) == len(numbers)
        require(once, f"ranks in {str(self.folder)!r}", "there once each", numbers)

    @property
    def run(self) -> dict[str, Any]:
        """The first rank's description of the run."""
        return self.ranks[0].run

    @cached_property
    def steps(self) -> list[int]:
        """The steps that are whole on all ranks, ascending."""
        return sorted(set.intersection(*(set(rank.scalars) for rank in self.ranks)))

    @property
    def absent(self) -> list[int]:
        """The ranks of the run that have no folder."""
        numbers = {rank.number for rank in self.ranks}
        return [number for number in range(self.run.get("world") or 1) if number not in numbers]

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """Each rank's descriptions of its optimizers, the first rank's first."""
        return [line for rank in self.ranks for line in rank.optimizers]

    @cached_property
    def sampled(self) -> list[int]:
        """The steps of which there are samples, ascending."""
        return sorted({step for rank in self.ranks for step, _ in rank._samples} & set(self.steps))

    def alike(self, recording: Recording, step: int) -> bool:
        """Returns whether all ranks have the same numbers and rows of a step; see `Rank.alike`."""
        pairs = zip(self.ranks, recording.ranks, strict=False)
        return len(self.ranks) == len(recording.ranks) and all(a.alike(b, step) for a, b in pairs)

    @cached_property
    def values(self) -> dict[Key, Value]:
        """The values that ranks hold together, by name and quantity, in the order of recording.

        A tensor whose dtype or shape changes has its first value here; `values_at` has a step's.
        """
        shared_values = dict[Key, Value]()
        for value in (value for rank in self.ranks for value in rank.values):
            if value.place is not None:
                shared_values.setdefault((value.name, value.quantity), value)
        return shared_values

    def values_at(self, step: int) -> dict[Key, Value]:
        """Returns the values of a step's rows that ranks hold together, by name and quantity."""
        shared_values = dict[Key, Value]()
        for rank in reversed(self.ranks):
            shared_values |= {k: v for k, v in rank.values_at(step).items() if v.place is not None}
        return shared_values

    def scalars(self, step: int) -> list[dict[int, dict[str, Any]]]:
        """Returns for each rank the lines of a step, by source."""
        return [rank.scalars[step] for rank in self.ranks]

    def digests(self, step: int) -> dict[Key, Summed]:
        """Sums the digests of each tensor after a step over all ranks.

        Several tensors of one name, as older versions recorded some, are summed too.
        """
        # by tensor, by place in it, by rank: one digest
        parts: dict[Key, dict[Any, dict[int, Digest]]] = defaultdict(lambda: defaultdict(dict))
        values = dict[Key, Value]()
        for rank in self.ranks:
            for value, digest in rank.rows(step):
                if value.place is not None:
                    key = value.name, value.quantity
                    rank_digests, values[key] = parts[key][value.place], value
                    # two tensors of one name on one rank are added up
                    before = rank_digests.get(rank.number)
                    rank_digests[rank.number] = _total([before, digest] if before else [digest])
        summed = dict[Key, Summed]()
        for key, places in parts.items():
            # one digest for each place: replicas of a place are compared, not added
            total = _total([next(iter(ranks.values())) for ranks in places.values()])
            missing = math.prod(values[key].shape) - sum(place[3] for place in places)
            # of the first place at which ranks differ: the digest of each group, and its ranks
            groups = dict[Digest, list[int]]()
            for ranks in places.values():
                # counts of elements that are not finite may lack on some
                alike = dict[tuple[int, int], list[int]]()
                for rank_number, digest in ranks.items():
                    alike.setdefault((digest.low, digest.high), []).append(rank_number)
                if len(alike) > 1:
                    groups = {ranks[numbers[0]]: numbers for numbers in alike.values()}
                    break
            replicas = tuple(map(tuple, groups.values()))
            summed[key] = Summed(total, missing, replicas, tuple(groups))
        return summed

    def own(self, step: int) -> dict[tuple[int, str, str], list[Digest]]:
        """Returns each rank's own digests, by rank, name and quantity: several of several calls."""
        digests: dict[tuple[int, str, str], list[Digest]] = defaultdict(list)
        for rank in self.ranks:
            for value, digest in rank.rows(step):
                if value.place is None:
                    digests[rank.number, value.name, value.quantity].append(digest)
        return digests

    def kept(
        self, step: int, key: Key
    ) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]] | None:
        """Returns the bits of a whole tensor that ranks kept of a step, flat, and which are there.

        It is None where no rank kept it. A quantity is as after the step, "old weight" as before.
        """
        # the tensor as it is after the step has the shape and places
        plain = key[0], key[1].removeprefix("old ")
        value = self.values_at(step).get(plain)
        numel = 0 if value is None else math.prod(value.shape)
        # (bits, mask): flat over the whole tensor, filled rank by rank
        tensor: tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]] | None = None
        for rank in self.ranks:
            # part: this rank's bits, flat; its pieces lie one behind another
            whole, places, begin = rank.kept(step), rank.places(step, plain), 0
            part = whole.get((encodable(key[0]), encodable(key[1])))
            if part is None or len(part) < sum(place[3] for place in places):
                continue
            # ranks that kept it in another dtype, or in part, add nothing
            width = part.itemsize if value is None else WIDTHS.get(value.dtype, part.itemsize)
            if part.itemsize != width or (tensor is not None and tensor[0].itemsize != width):
                continue
            if tensor is None:
                try:
                    tensor = numpy.zeros(numel, part.dtype), numpy.zeros(numel, bool)
                except (MemoryError, ValueError):  # the second of more bytes than there are numbers
                    where = f"shape of {key[1]} of {key[0]} in {str(rank.folder)!r}"
                    words = "must be that of a tensor for which memory suffices"
                    raise RecordingError(f"{where} {words}, got {numel} elements") from None
            bits, held = tensor
            for first, run, stride, count in places:
                # runs of `run` elements, `stride` apart: rows' pieces of a tensor split by columns
                at: Any = slice(first, first + count)
                if stride:
                    at = first + numpy.arange(count) // run * stride + numpy.arange(count) % run
                bits[at], held[at], begin = part[begin : begin + count], True, begin + count
        return tensor

    def samples(self, step: int) -> dict[Key, tuple[int, numpy.ndarray[Any, Any]]]:
        """Returns each tensor's sampled elements: which are there (a bit each), and their bits.

        Places of samples are those of `places_of_samples`.
        """
        samples_by_key: dict[Key, tuple[int, numpy.ndarray[Any, Any]]] = {}
        for rank in self.ranks:
            for value, held, bits in rank.samples(step):
                # held: a bit for each sampled element that the rank has; others have the rest
                key = value.name, value.quantity
                held_before, bits_before = samples_by_key.get(key, (0, numpy.zeros_like(bits)))
                where = f"samples of {value.quantity} of {value.name} on rank {rank.number}"
                allowed = f"{len(bits_before)} as on others"
                require(len(bits) == len(bits_before), where, allowed, len(bits))
                mask = numpy.array([held >> i & 1 for i in range(len(bits))], bool)
                samples_by_key[key] = held_before | held, numpy.where(mask, bits, bits_before)
        return samples_by_key


def _total(digests: Sequence[Digest]) -> Digest:
    counts = [digest.nonfinite for digest in digests]
    return Digest(
        sum(digest.low for digest in digests) % LANES,
        sum(digest.high for digest in digests) % LANES,
        None if None in counts else sum(count or 0 for count in counts),
    )


def places_of_samples(name: str, numel: int, width: int) -> Sequence[int]:
    """Returns the flat indices of a tensor's sampled elements, ascending; the same in every run.

    Args:
        name: the parameter's canonical name.
        numel: of the whole tensor.
        width: bytes of an element. 64 elements are sampled, 32 of 8 bytes, all of small tensors.
    """
    count = SAMPLES // 2 if width == 8 else SAMPLES
    if numel <= count:
        return range(numel)
    # the name in the draw: tensors of one shape are sampled at other places
    # one of each of `count` equal stretches
    texts = (f"{name} {numel} {i}".encode("utf-8", "surrogatepass") for i in range(count))
    bounds = pairwise(numel * i // count for i in range(count + 1))
    drawn = zip(bounds, map(zlib.crc32, texts), strict=True)
    return [low + draw * (high - low) // 2**32 for (low, high), draw in drawn]
