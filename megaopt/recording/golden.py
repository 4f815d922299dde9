"""Golden values: what a recorded run gave, in a small file that goes into a repository.

The file is JSON of at most 200 kB. It has an entry for each environment in which bits may differ by
nature (card, torch, CUDA ...), and each entry has the numbers of each step, digests of all tensors
after steps 1, 2, 4, 8 ... and the last, and the norms of what was sampled then. docs/diff.md has
the schema.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy

from megaopt.kernels.files import replacing
from megaopt.recording import checks
from megaopt.recording.checks import RecordingError, dict_of, is_float, list_of, read_json, require
from megaopt.recording.compare import Comparison, compare
from megaopt.recording.files import Digest, Key, Recording, Summed, Value, hexadecimal, without_none
from megaopt.recording.measure import Array, as_numbers
from megaopt.recording.pair import family, flat, shown

SCHEMA = 1
LARGEST = 200_000
"""Bytes of a file."""
RUN = ("world", "level", "every", "argv", "environment", "layout")
LEFT_OUT = ("step", "source", "has_all_old")
"""Keys of a step's line that entries lack: its place, and what is of samples."""
TOGETHER = "all tensors"
"""The name under which one digest stands for all tensors, where those of each are too many."""


METRIC = checks.ValueKind(
    "an object with values, an object of numbers by step",
    lambda metric: isinstance(metric, dict) and checks.OBJECT.holds(metric.get("values")),
)
ENTRY: checks.Kinds = {
    "family": checks.OBJECT,
    "because": list_of(checks.OBJECT),
    "run": checks.OBJECT,
    "optimizers": list_of(checks.TEXT),
    "tensors": dict_of(checks.SHAPE),
    "steps": dict_of(checks.OBJECT),
    "digests": dict_of(dict_of(list_of(checks.DIGEST.or_none()))),
    "norms": dict_of(dict_of(checks.FLOAT)),
}
"""Keys of an entry."""


class Checked(NamedTuple):
    """The result of `check`."""

    comparison: Comparison
    line: str
    """The verdict; it names the environments where the entry is of another one."""
    is_own: bool
    """True if the entry is of the run's environment."""
    drift: list[tuple[str, int, float, float]]
    """Quantity, step, golden number and the run's, where the entry is of another environment."""


class Summary:
    """The parts of a recording that a file of golden values leaves out."""

    sampled: Sequence[int] = ()
    absent: Sequence[int] = ()
    run: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, Any]]
    steps: Sequence[int]
    values: Mapping[Key, Value]
    scalars: Callable[[int], list[dict[int, dict[str, Any]]]]

    def digests(self, step: int) -> dict[Key, Summed]:
        """Returns each tensor's digest, of the steps that have them."""
        raise NotImplementedError

    def values_at(self, step: int) -> Mapping[Key, Value]:
        """Returns the same at each step: files have the first shapes alone, and no dtypes."""
        return self.values

    def own(self, step: int) -> dict[tuple[int, str, str], list[Any]]:
        """Returns nothing: files have no rows of one rank."""
        return {}

    def samples(self, step: int) -> dict[Key, tuple[int, Array]]:
        """Returns nothing: files have no elements."""
        return {}


class Golden(Summary):
    """An entry of a file, to be compared as a recording is.

    Args:
        entry: what `entry_of` made.
    """

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.run = {"environment": {}, **without_none(entry["run"])}
        self.optimizers = [{"class": name, "groups": []} for name in entry["optimizers"]]
        self.norms: dict[str, dict[str, str]] = entry["norms"]
        self.names = list(entry["tensors"])
        self._digests: dict[str, dict[str, list[str | None]]] = entry["digests"]
        scalars = dict(_unfolded(entry["steps"]))
        self.steps, self.scalars = sorted(scalars), scalars.__getitem__
        shapes = {name: tuple(shape) for name, shape in entry["tensors"].items()}
        quantities = dict.fromkeys(q for digests in self._digests.values() for q in digests)
        self.values = {(n, q): Value(n, q, "", shapes[n]) for q in quantities for n in shapes}

    def digests(self, step: int) -> dict[Key, Summed]:
        """Returns each tensor's digest, of the steps that have them."""
        return {
            (name, quantity): Summed(Digest(int(text[:16], 16), int(text[16:], 16), None), 0, ())
            for quantity, texts in self._digests.get(str(step), {}).items()
            for name, text in zip(self.names, texts, strict=True)
            if text is not None
        }


class _Together(Summary):
    """A recording in which one digest of a quantity stands for all tensors."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.run, self.steps = recording.run, recording.steps
        self.optimizers = [{**line, "groups": [], "order": []} for line in recording.optimizers]
        quantities = {quantity: None for _, quantity in recording.values}
        self.values = {(TOGETHER, q): Value(TOGETHER, q, "", ()) for q in quantities}
        self.scalars = recording.scalars

    def digests(self, step: int) -> dict[Key, Summed]:
        hashes: dict[str, Any] = {}
        for (name, quantity), summed in sorted(self._recording.digests(step).items()):
            hasher = hashes.setdefault(quantity, hashlib.blake2b(digest_size=16))
            hasher.update(f"{name} {summed.digest}\n".encode("utf-8", "surrogatepass"))
        numbers = {q: int(hasher.hexdigest(), 16) for q, hasher in hashes.items()}
        return {
            (TOGETHER, q): Summed(Digest(number % 2**64, number >> 64, None), 0, ())
            for q, number in numbers.items()
        }


def _whole_steps(recording: Recording) -> list[int]:
    """Returns a recording's steps; RecordingError where it has none."""
    if not recording.steps:
        words = "recording must have a step that is whole on all ranks"
        raise RecordingError(f"{words}, got {str(recording.folder)!r}")
    return recording.steps


def entry_of(recording: Recording) -> dict[str, Any]:
    """Makes the entry of a recording; raises RecordingError where it is too large."""
    steps = _whole_steps(recording)
    digest_steps = sorted({steps[0], steps[-1], *(s for s in steps if s & (s - 1) == 0)})
    ends, together = [steps[0], steps[-1]], _Together(recording)
    for run, chosen in ((recording, digest_steps), (recording, ends), (together, digest_steps)):
        entry = _entry(recording, run, chosen)
        if len(_text([entry])) <= LARGEST:
            return entry
    raise RecordingError(
        f"golden values must be at most {LARGEST} bytes, got {len(_text([entry]))}: "
        f"record fewer than {len(steps)} steps, or every 10th"
    )


def _entry(recording: Recording, run: Any, digest_steps: Sequence[int]) -> dict[str, Any]:
    shapes = {name: value.shape for (name, _), value in reversed(run.values.items())}
    order = [name for line in recording.optimizers for name in line.get("order") or ()]
    names = [name for name in dict.fromkeys([*order, *shapes]) if name in shapes]
    # by step and quantity the digests in the order of names
    digests = dict[str, dict[str, list[str | None]]]()
    for step in digest_steps:
        summed = run.digests(step)
        digests[str(step)] = {
            q: [str(summed[n, q].digest) if (n, q) in summed else None for n in names]
            for q in dict.fromkeys(quantity for _, quantity in summed)
        }
    return {
        "family": family(recording),
        "because": [],
        "run": _without_null({name: recording.run.get(name) for name in RUN}),
        "optimizers": list(dict.fromkeys(line["class"] for line in recording.optimizers)),
        "tensors": {name: shapes[name] for name in names},
        "steps": dict(_folded(recording)),
        "digests": digests,
        "norms": {str(step): _norms(recording, step) for step in digest_steps},
    }


def _without_null(content: Any) -> Any:
    """Removes None from nested dicts: a comparison takes it for the same as no key."""
    if not isinstance(content, Mapping):
        return content
    return {name: _without_null(value) for name, value in content.items() if value is not None}


def _norms(recording: Recording, step: int) -> dict[str, str]:
    squares, values = dict[str, float](), recording.values_at(step)
    for (name, quantity), (held, bits) in recording.samples(step).items():
        chosen = [i for i in range(held.bit_length()) if held >> i & 1]
        numbers = as_numbers(bits[chosen], values[name, quantity].dtype)
        squares[quantity] = squares.get(quantity, 0.0) + float(numpy.square(numbers).sum())
    return {quantity: hexadecimal(math.sqrt(square)) for quantity, square in squares.items()}


def _folded(recording: Recording) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the numbers of each step that the step before has not; None where a number ends."""
    before: dict[str, Any] = {}
    for step in recording.steps:
        # by rank and source the numbers of a line; groups by their number, so that leaves have
        # paths
        ranks: dict[int, dict[int, Any]] = defaultdict(dict)
        for number, rank in enumerate(recording.scalars(step)):
            for source, line in rank.items():
                numbers = {name: line[name] for name in line if name not in LEFT_OUT}
                if numbers.get("groups"):
                    numbers["groups"] = dict(enumerate(numbers["groups"]))
                ranks[number][source] = numbers
        now = flat(ranks)
        gone = {path: None for path in before if path not in now}
        yield str(step), gone | {k: v for k, v in now.items() if before.get(k, k) != v}
        before = now


def _unfolded(steps: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
    """Undoes `_folded`: yields for each step the numbers of each rank, by source."""
    now: dict[str, Any] = {}
    for step, changes in steps.items():
        now |= changes
        ranks: dict[str, Any] = {}
        for path, value in now.items():
            *parents, last = path.split(".")
            inner = ranks
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
        for line in (line for sources in ranks.values() for line in sources.values()):
            line["groups"] = list(line.get("groups", {}).values())
        yield int(step), [{int(s): line for s, line in r.items()} for r in ranks.values()]


def _text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns a file's text, a number a line: what changes is seen in a diff of the file."""
    content = {"is": "golden values", "schema": SCHEMA, "entries": entries}
    return json.dumps(content, indent=0) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the entries of a file; raises RecordingError for a file of something else."""
    content = read_json(path.read_bytes(), f"golden values {str(path)!r}")
    if not isinstance(content, dict) or content.get("is") != "golden values":
        raise RecordingError(f"golden values must be a file that make wrote, got {str(path)!r}")
    schema = content.get("schema")
    require(schema == SCHEMA, f"schema of {str(path)!r}", str(SCHEMA), schema)
    entries: Any = content.get("entries")
    is_list = isinstance(entries, list) and bool(entries)
    require(is_list, f"entries of {str(path)!r}", "a list of one at least", entries)
    where = str(path)
    for entry in entries:
        require(isinstance(entry, dict), f"each entry in {where}", "an object", entry)
        checks.check(entry, ENTRY, where)
        checks.check(entry["run"], {**checks.RUN, "rank": checks.ANYTHING}, where)
        for name in ("steps", "digests", "norms"):
            for step in entry[name]:
                is_step = step.isdecimal() and len(step) < 19 and int(step) >= 1
                require(is_step, f"{name} in {where}", "by step, from 1 on", step)
        # a digest, or null, for each tensor
        count = len(entry["tensors"])
        for step_digests in entry["digests"].values():
            for quantity, texts in step_digests.items():
                words = f"digests of {quantity!r} in {where}"
                require(len(texts) == count, words, f"of all {count} tensors", len(texts))
        try:
            steps = [ranks for _, ranks in _unfolded(entry["steps"])]
            lines = [line for ranks in steps for rank in ranks for line in rank.values()]
        except (AttributeError, TypeError, ValueError) as error:
            raise RecordingError(f"steps in {where} must be those of ranks: {error}") from None
        for line in lines:
            checks.check(line, checks.SCALARS, where)
    checked_entries: list[dict[str, Any]] = entries
    return checked_entries


def _write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    text = _text(entries)
    if len(text) > LARGEST:
        raise RecordingError(
            f"golden values must be at most {LARGEST} bytes, got {len(text)} for {len(entries)} "
            "environments: give some a file of their own"
        )
    with replacing(path) as file:
        file.write(text.encode())


def make(path: Path, recording: Recording) -> None:
    """Writes a new file; RecordingError where there is one."""
    if path.exists():
        raise RecordingError(f"file must be new, got {str(path)!r}: update renews its entries")
    _write(path, [entry_of(recording)])


def update(path: Path, recording: Recording, because: str) -> None:
    """Renews the entry of the run's environment, or adds one; the others stay.

    Args:
        path: of the file.
        recording: what counts from now on.
        because: the reason, which is kept in the file.

    Raises RecordingError without a reason.
    """
    if not because.strip():
        raise RecordingError(f"because must be the reason of the change, got {because!r}")
    entries, new_entry = read(path), entry_of(recording)
    old = [entry for entry in entries if entry["family"] == new_entry["family"]]
    commit = recording.run.get("environment", {}).get("git commit")
    reason = {"commit": commit, "because": because}
    new_entry["because"] = [*(line for entry in old for line in entry["because"]), reason]
    _write(path, [entry for entry in entries if entry not in old] + [new_entry])


def refuse_changes(path: Path, recording: Recording | None = None) -> None:
    """Raises RecordingError where git tells of changes beside the file's: what ran is no commit.

    Changes at the time of the recording count too.
    """
    if recording is not None and recording.run.get("environment", {}).get("diff hash"):
        raise RecordingError("run must be recorded where git has no changes, got one with some")
    # a monitor is a command that the repository's configuration names
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(path.resolve().parent)]
    command += ["status", "--porcelain", "-uno"]
    exclude = ["--", ":/", f":(exclude){path.name}"]
    done = subprocess.run([*command, *exclude], capture_output=True, text=True, check=False)
    changed = done.stdout.splitlines() if done.returncode == 0 else []
    if changed:
        raise RecordingError(f"the git tree must be clean, got changes: {'; '.join(changed[:5])}")


def check(path: Path, recording: Recording) -> Checked:
    """Holds a recording to the entry of its environment; without one to the nearest."""
    entries, environment = read(path), family(recording)
    alike = [sum(e["family"].get(k) == environment[k] for k in environment) for e in entries]
    nearest = entries[alike.index(max(alike))]
    is_own = nearest["family"] == environment
    golden = Golden(nearest)
    comparison = compare(golden, _Together(recording) if golden.names == [TOGETHER] else recording)
    if is_own:
        return Checked(comparison, comparison.line, True, [])
    words = [
        ", ".join(f"{name}: {shown(value)}" for name, value in one.items() if value is not None)
        for one in (environment, nearest["family"])
    ]
    line = f"no entry for {words[0]}; beside that of {words[1]}: {comparison.line}"
    # losses and norms of the golden run, each with the run's
    drift = list[tuple[str, int, float, float]]()
    for text, norms in golden.norms.items():
        step = int(text)
        if step not in recording.steps or step not in golden.steps:
            continue
        now = _norms(recording, step)
        both = {"loss": (_loss(golden.scalars(step)), _loss(recording.scalars(step)))}
        both |= {q: (norms[q], now[q]) for q in norms if q in now}
        for quantity, (a, b) in both.items():
            if a is not None and b is not None:
                drift.append((quantity, step, float.fromhex(a), float.fromhex(b)))
    return Checked(comparison, line, False, drift)


def _loss(ranks: Sequence[Mapping[int, Mapping[str, Any]]]) -> str | None:
    """Returns the mean of a step's losses, over calls and ranks, in hexadecimal."""
    lines = (line for rank in ranks for line in rank.values())
    losses = [float.fromhex(loss) for line in lines for loss in line.get("losses") or ()]
    return hexadecimal(fmean(losses)) if losses else None


# ---- Megatron-LM's own files

METRICS: dict[str, Callable[[Sequence[Mapping[int, Mapping[str, Any]]]], str | None]] = {
    "lm loss": _loss,
    "grad-norm": lambda ranks: ranks[0].get(0, {}).get("grad_norm"),
    "learning-rate": lambda ranks: (ranks[0].get(0, {}).get("groups") or [{}])[0].get("lr"),
}
"""Megatron's names of what a recording has, and where."""
DIGITS = 5
"""Decimals of a metric that is not in full precision."""


def megatron_values(recording: Recording) -> dict[str, dict[str, Any]]:
    """Returns a run's numbers as Megatron-LM's functional tests keep them, in full precision."""
    metrics, whole = {}, _whole_steps(recording)
    for metric, number in METRICS.items():
        texts = {step: number(recording.scalars(step)) for step in whole}
        float_texts = {step: text for step, text in texts.items() if text and is_float(text)}
        values = {str(step): float.fromhex(text) for step, text in float_texts.items()}
        if values:
            steps = [int(step) for step in values]
            metrics[metric] = {
                "start_step": steps[0],
                "end_step": steps[-1],
                "step_interval": steps[-1] - steps[-2] if len(steps) > 1 else 1,
                "value_precision": "full",
                "values": values,
            }
    return metrics


def check_megatron(path: Path, recording: Recording) -> list[str]:
    """Returns what differs from a file of Megatron-LM's, a line for each metric.

    A metric of "value_precision": "full" is compared in every bit, another one after rounding to
    five decimals, as its file is. Metrics of time and memory are not a recording's.

    Raises RecordingError where the file and the run have no metric and step in common.
    """
    golden = read_json(path.read_bytes(), f"golden values {str(path)!r}")
    words = "an object of metrics, each with its values"
    require(dict_of(METRIC).holds(golden), f"golden values {str(path)!r}", words, golden)
    now = megatron_values(recording)
    lines, compared = [], 0
    for metric in (name for name in golden if name in now):
        is_full = golden[metric].get("value_precision") == "full"
        golden_values, run_values = golden[metric]["values"], now[metric]["values"]
        steps = [step for step, value in golden_values.items() if isinstance(value, int | float)]
        both = {step: run_values[step] for step in steps if step in run_values}
        compared += len(both)
        unlike = [
            step
            for step, value in both.items()
            if golden_values[step] != (value if is_full else round(value, DIGITS))
        ]
        if unlike:
            pair = f"{golden_values[unlike[0]]!r}, and {both[unlike[0]]!r}"
            count = f"{len(unlike)} of {len(both)} steps"
            lines.append(f"{metric}: step {unlike[0]}: {pair}; {count}")
    if not compared:
        raise RecordingError(f"file must have {', '.join(METRICS)} of the run's steps, got none")
    return lines
