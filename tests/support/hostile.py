"""Recordings and other files as somebody might write them who means harm, or a disk that fails."""

import json
import pickle
import random
import zlib

import numpy
from safetensors.torch import load_file, save_file

from megaopt.recording.files import CHECK, HEADER, MAGIC, ROW, SAMPLE

NAMES = (
    "a[/b]",
    "experts[bold red]0",
    "[link=https://example.com]w[/link]",
    ":cat:",
    "\x1b[2J\x1b]0;title\x07",
    "weight\nsame: 3 steps from 1 to 3, 4 tensors, bit for bit",
    "a\rb",
    "\u202egnp.exe",
    "\u200b\u2066x\u2069",
    "\ud800",
    '=HYPERLINK("https://example.com")',
    "@SUM(1)",
    "../../up",
    "/etc/passwd",
    "C:\\windows",
    "nul\x00l",
    "$\\frac$",
    "$",
    "_hidden",
    "<script>alert(1)</script>",
    "::error::x%0A",
    "{0.__class__}",
    "%s%n",
    "x" * 10_000,
)

CODE = """
from pathlib import Path
import torch
Path({marker!r}).write_text("ran")
class Evil(torch.optim.AdamW):
    def __init__(self, *args, **options):
        Path({marker!r}).write_text("ran")
        super().__init__(*args)
"""


class Runs:
    """Runs code where somebody unpickles it."""

    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return open, (self._marker, "w")


def pickled(marker):
    return pickle.dumps(Runs(marker))


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_lines(path, lines):
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def rename(folder, names, others):
    """Gives a recording's tensors, quantities, options and words hostile names, in turn.

    others: the same names in another order, of what the recording says of its environment.
    """
    for rank in folder.glob("rank-*"):
        lines = lines_of(rank / "manifest.jsonl")
        known = dict.fromkeys(line["name"] for line in lines if line["is"] == "value")
        several = -(-len(names) // len(known))
        parts = [names[i * several : (i + 1) * several] for i in range(len(known))]
        new = {
            name: ".".join([*own, str(i)])
            for i, (name, own) in enumerate(zip(known, parts, strict=True))
        }
        for line in lines:
            if line["is"] == "value":
                line["name"] = new[line["name"]]
                if line["quantity"] not in ("grad", "weight", "old weight"):
                    line["quantity"] += names[len(line["name"]) % (len(names) - 1)]
            elif line["is"] == "optimizer":
                line["groups"] = [[new[name] for name in group] for group in line["groups"]]
                line["order"] = [new[name] for name in line["order"]]
                line["class"] = names[len(names) // 2]
                line["options"] |= dict(zip(names, names, strict=True))
            else:
                line["argv"] = ["train.py", *others, *(f"--a{name}={name}" for name in others)]
                line["environment"] |= dict(zip(names, others, strict=True))
                line["layout"] = {"meshes": list(names)}
        write_lines(rank / "manifest.jsonl", lines)
        lines = lines_of(rank / "scalars.jsonl")
        for number, line in enumerate(lines):
            line["rng"] |= {name: f"{name}{number}" for name in names}
            for group in line["groups"]:
                group |= {name: f"{name}{number}" for name in names}
        write_lines(rank / "scalars.jsonl", lines)
        for path in (rank / "kept").glob("*.safetensors"):
            kept = {key.rpartition("|"): each for key, each in load_file(path).items()}
            written = {f"{new[name]}|{quantity}": t for (name, _, quantity), t in kept.items()}
            save_file({k.encode("utf-8", "replace").decode(): t for k, t in written.items()}, path)


# --- damage, drawn by a seed

OTHERS = (
    *(None, True, 0, -1, 1, 7, 64, 2**31, 2**53, 2**63, 2**64, 10**40, 1.5, float("nan")),
    *("", "x", "0x", "0x1p99999", "nan", "-inf", "../../x", "\x1b[2J", "\ud800", "1" * 5000),
    *(
        [],
        [[]],
        [None],
        [1, 2, 3, 4],
        ["x"],
        [0, 0, 0, 1],
        [0, 1, 5, 2**62],
        {},
        {"x": 1},
        {"": {}},
    ),
    *("float64", "float32", "bfloat16", "int8", "Tensor", "optim", "old weight", "grad", "master"),
)


def leaves(content, path=()):
    """The paths of all values in nested lists and dicts."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(pairs):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from leaves(value, (*path, key))


def change_a_value(content, rng):
    """Another value somewhere in JSON, or one less, or one more."""
    paths = list(leaves(content))
    *parents, last = rng.choice(paths)
    inner = content
    for key in parents:
        inner = inner[key]
    kind = rng.random()
    if kind < 0.15 and isinstance(inner, dict):
        del inner[last]
    elif kind < 0.2 and isinstance(inner, dict):
        inner[rng.choice(("step", "x", "a.b", "0", "\ud800"))] = inner[last]
    else:
        inner[last] = rng.choice(OTHERS)


def deep(rng):
    depth = rng.choice((9, 900, 100_000))
    return rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)).encode()


def damage_lines(path, rng):
    """Other values in a file of JSON lines; or a line less, twice, or nested deeply."""
    lines = path.read_bytes().splitlines()
    number, kind = rng.randrange(len(lines)), rng.random()
    if kind < 0.8:
        content = json.loads(lines[number])
        change_a_value(content, rng)
        lines[number] = json.dumps(content).encode()
    elif kind < 0.9:
        lines[number : number + 1] = [lines[number]] * rng.choice((0, 2))
    else:
        lines[number] = deep(rng)
    path.write_bytes(b"\n".join(lines) + b"\n")


def damage_json(path, rng):
    """Other values in a file of JSON."""
    content = json.loads(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2))):
        change_a_value(content, rng)
    path.write_text(json.dumps(content))


def damage_bytes(path, rng):
    """A file cut off, or with some bytes changed, or with more behind it."""
    data = bytearray(path.read_bytes())
    kind = rng.random()
    if kind < 0.4:
        del data[rng.randrange(len(data) + 1) :]
    elif kind < 0.9 and data:
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(min(len(data), rng.choice((40, 10**9))))] = rng.randrange(256)
    else:
        data += rng.randbytes(rng.randrange(100))
    path.write_bytes(data)


def damage_blocks(path, rng):
    """Other numbers in the rows of a file of blocks, with the checks that fit them."""
    name = path.stem
    dtype = ROW if name == "rows" else SAMPLE
    data = bytearray(path.read_bytes())
    places, place = [], 0
    while place < len(data):
        header = numpy.frombuffer(data, HEADER, 1, place)[0]
        places.append((place, int(header["rows"])))
        assert header["magic"] == MAGIC[name]
        place += HEADER.itemsize + int(header["rows"]) * dtype.itemsize + CHECK.itemsize
    place, rows = rng.choice(places)
    end = place + HEADER.itemsize + rows * dtype.itemsize
    found = numpy.frombuffer(data, dtype, rows, place + HEADER.itemsize).copy()
    row, field = rng.randrange(rows), rng.choice([f for f in dtype.names if f != "words"])
    found[field][row] = rng.choice((0, 1, 2, 4, 8, 31, 32, 2**31, 2**32 - 1))
    if rng.random() < 0.3:
        found["value"] = rng.randrange(8)
    data[place + HEADER.itemsize : end] = found.tobytes()
    if rng.random() < 0.2:
        header = numpy.frombuffer(data, HEADER, 1, place).copy()
        header[rng.choice(("source", "step"))] = rng.choice((0, 1, 2, 3, 2**32 - 1))
        data[place : place + HEADER.itemsize] = header.tobytes()
    data[end : end + CHECK.itemsize] = numpy.array(zlib.crc32(data[place:end]), CHECK).tobytes()
    path.write_bytes(data)


def damage(folder, seed):
    """Damages a recording's files in one to three places."""
    rng = random.Random(seed)
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
        try:
            if path.suffix == ".jsonl" and rng.random() < 0.8:
                damage_lines(path, rng)
            elif path.suffix == ".bin" and rng.random() < 0.7:
                damage_blocks(path, rng)
            else:
                damage_bytes(path, rng)
        except (ValueError, AssertionError, IndexError, TypeError, KeyError, RecursionError):
            pass  # of a file that was damaged before
