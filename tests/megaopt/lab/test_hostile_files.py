"""Files that came from somebody else run no code, move no cursor, and are refused in words."""

import json
import os
import pickle
import random
import shutil
import site
import subprocess
import sys
import unicodedata
import warnings
import zlib

import numpy
import pytest
import torch
from recorded import recorded
from safetensors.torch import load_file, save_file
from tiny_runs import UNFUSED, fused, tiny_run

from megaopt.lab import bisect, cli, exits
from megaopt.lab.export import cell
from megaopt.recording.files import CHECK, HEADER, MAGIC, ROW, SAMPLE
from megaopt.recording.replay import _is_ours_to_import

# Recordings and other files as somebody might write them who means harm, or a disk that fails.

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


STATUSES = {exits.DONE, exits.DIFFERENT, exits.REFUSED, exits.STOP, bisect.SKIP}
"""Those that docs and exits name."""
RAW = {"Cc", "Cf", "Cs"}
"""Characters that control, that direct or hide, and halves of some."""
NO_FILES = "it reads no file that somebody else may have written"


def recordings(folder):
    """Two runs that part at step 2, and their file of golden values."""
    recorded("adamw foreach", folder / "a", level="blocks", keep=[1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "__init__", slower(torch.optim.AdamW.__init__))
        recorded("adamw foreach", folder / "b", level="blocks", keep=[1, 2])


def slower(init):
    def begin(self, params, **options):
        init(self, params, lr=2e-3, **options)

    return begin


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recordings(folder)
    assert cli.main(["golden", "make", str(folder / "golden.json"), str(folder / "a")]) == 0
    assert (
        cli.main(["golden", "make", str(folder / "megatron.json"), str(folder / "a"), "--megatron"])
        == 0
    )
    return folder


COMMANDS = {
    "regress": lambda folder: [["regress", folder / "config.toml", "--out", folder / "out"]],
    "train": lambda folder: [
        ["train", folder / "config.toml"],
        ["train", "gpt_tiny", "--steps", "1", "--resume", folder / "checkpoint.pt"],
    ],
    "bench": NO_FILES,
    "doctor": NO_FILES,
    "verify": NO_FILES,
    "audit": lambda folder: [
        ["audit", folder / "a", "--json", folder / "out.json"],
        ["audit", folder / "b"],
    ],
    "record": lambda folder: [
        ["record", "--out", folder / "out", "--map", folder / "map.json", "--", "true"]
    ],
    "diff": lambda folder: [
        ["diff", folder / "a", folder / "b", "--json", folder / "out.json", "--github"],
        ["diff", folder / "a", folder / "b", "--html", folder / "out.html"],
        ["diff", folder / "b", folder / "a", "--noise", folder / "a", "--tolerance", "1e-3"],
        ["diff", folder / "a", folder / "a", "--map", folder / "map.json"],
    ],
    "export": lambda folder: [
        ["export", folder / "a", folder / "out.csv"],
        ["export", folder / "b", folder / "out.jsonl"],
    ],
    "golden": lambda folder: [
        ["golden", "check", folder / "golden.json", folder / "a", "--github"],
        ["golden", "check", folder / "golden.json", folder / "b"],
        ["golden", "check", folder / "megatron.json", folder / "a", "--megatron"],
        ["golden", "make", folder / "out.json", folder / "a"],
        ["golden", "make", folder / "out.json", folder / "b", "--megatron"],
        ["golden", "update", folder / "golden.json", folder / "b", "--because", "x"],
    ],
    "bisect": lambda folder: [["bisect", folder / "a", folder / "b", "--", "true"]],
    "replay": lambda folder: [
        ["replay", folder / "a", "--step", "1"],
        ["replay", folder / "b", "--step", "2", "--backend", "cpu"],
        ["replay", folder / "b", "--step", "2"],
    ],
    "galore test": NO_FILES,
    "galore bench": NO_FILES,
    "muon test": NO_FILES,
    "muon bench": NO_FILES,
    "ranks bench": NO_FILES,
}
"""For each command what it is asked to do with the files of a folder, or why it reads none."""
ASKED_FOR = {"out", "out.json", "out.html", "out.csv", "out.jsonl", "golden.json"}
READERS = [name for name, asks in COMMANDS.items() if not isinstance(asks, str)]


def test_all_commands_are_attacked_here():
    assert COMMANDS.keys() == cli.COMMANDS.keys()


@pytest.fixture
def attacked(tmp_path, monkeypatch, capsys):
    """Gives a command the files of a folder: what is true of all commands, whatever files say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(bisect, "_record", lambda out, *_: shutil.copytree("files/b", out))
    marker = tmp_path / "marker"

    def attacked(name):
        folder, told = tmp_path / "files", []
        for arguments in COMMANDS[name](folder):
            before = files_in(tmp_path)
            status = cli.main([str(each) for each in arguments])
            out, err = capsys.readouterr()
            where = " ".join(map(str, arguments)), status, err
            assert status in STATUSES, where
            assert "internal error" not in err, where
            assert "Traceback" not in err, where
            assert not {unicodedata.category(c) for c in out + err if c != "\n"} & RAW, where
            assert not marker.exists(), where
            new = {path.parts[1] for path in files_in(tmp_path) - before}
            assert new <= ASKED_FOR, where
            told.append((status, out, err))
            for path in ("out.json", "out.html", "out.csv", "out.jsonl"):
                if (folder / path).exists():
                    text = (folder / path).read_bytes().decode("utf-8")
                    told.append((path, text, ""))
                    (folder / path).unlink()
            if (folder / "out").exists():
                shutil.rmtree(folder / "out")
        return told

    return attacked


def files_in(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


# --- code


def modules(tmp_path):
    """Where code that came with a recording may lie, and the classes that would run it."""
    code = CODE.format(marker=str(tmp_path / "marker"))
    places = {
        "evil.py": "evil.Evil",
        "files/evil.py": "files.evil.Evil",
        "files/a/evil.py": "files.a.evil.Evil",
        "files/a/rank-0/evil.py": "evil.Evil",
        "evil/__init__.py": "evil.Evil",
        "site-packages/evilpackage/__init__.py": "evilpackage.Evil",
        "site-packages/evilpackage-1.dist-info/RECORD": "evilpackage.Evil",
        "bitsandbytes.py": "bitsandbytes.Evil",
        "lion_pytorch.py": "lion_pytorch.lion_pytorch.Lion",
    }
    for place in places:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("evilpackage/__init__.py,,\n" if path.name == "RECORD" else code)
    words = ["this.Evil", "antigravity.Evil", "os.system", "builtins.exec", "__main__.main"]
    words += ["torch.load", "torch.hub.load", "torch.optim.AdamW.__init__", "megaopt.__main__.main"]
    words += ["megaopt.files.evil.Evil", "megaopt..evil.Evil", "../evil.Evil", "", ".", "Evil"]
    return [*dict.fromkeys(places.values()), *words]


def test_no_class_that_a_recording_names_is_run(runs, tmp_path, attacked, monkeypatch):
    for name in "ab":
        shutil.copytree(runs / name, tmp_path / "files" / name)
    for path in ("", "files", "files/a"):  # as -m, and PYTHONPATH, put folders there
        monkeypatch.syspath_prepend(tmp_path / path)
    hooks = set(sys.modules)
    for each in modules(tmp_path):
        for name in "ab":
            path = tmp_path / "files" / name / "rank-0" / "manifest.jsonl"
            lines = lines_of(path)
            for line in lines:
                if line["is"] == "optimizer":
                    line["class"] = each
            write_lines(path, lines)
        told = attacked("replay")
        assert [status for status, *_ in told] == [2, 2, 2], each
        assert all("optimizer must be" in err or "backend" in err for *_, err in told), told
        attacked("audit")
    assert not {"evil", "this", "antigravity", "evilpackage"} & (set(sys.modules) - hooks)


def test_a_class_that_the_user_names_is_run(runs, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(runs / "a", tmp_path / "a")
    lines = lines_of(folder / "rank-0/manifest.jsonl")
    for line in lines:
        if line["is"] == "optimizer":
            line["class"] = "__main__.OwnAdam"
    write_lines(folder / "rank-0/manifest.jsonl", lines)
    (tmp_path / "own_optimizers.py").write_text(
        "import torch\nclass OwnAdam(torch.optim.AdamW):\n    pass\nOther = int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    command = ["replay", str(folder), "--step", "2"]
    assert cli.main(command) == 2
    assert "or one that --optimizer names, as its code runs, got '__main__.OwnAdam'" in (
        capsys.readouterr().err
    )
    assert cli.main([*command, "--optimizer", "own_optimizers.OwnAdam"]) == 0
    assert capsys.readouterr().out == "same: step 2 of rank 0, bit for bit\n"
    assert cli.main([*command, "--optimizer", "own_optimizers.OwnAdamW"]) == 2


def test_an_installed_optimizer_is_taken_where_nothing_stands_before_it(
    runs, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(runs / "a", tmp_path / "a")
    code = "import torch\nclass Adam(torch.optim.AdamW):\n    pass\n"
    own, added, theirs = [], [], []
    for number in (1, 2, 3, 4, 5, 6):
        installed = tmp_path / str(number) / "site-packages"
        (own if number < 5 else added if number == 5 else theirs).append(str(installed))
        (installed / f"package{number}-1.dist-info").mkdir(parents=True)
        (installed / f"package{number}-1.dist-info/METADATA").write_text(f"Name: package{number}\n")
        record = f"package{number}/adam.py,sha256=x,1\n" if number != 3 else "package3/other.py,,\n"
        (installed / f"package{number}-1.dist-info/RECORD").write_text(record)
        (installed / f"package{number}").mkdir()
        (installed / f"package{number}/__init__.py").write_text("")
        (installed / f"package{number}/adam.py").write_text(code if number != 4 else "Adam = 1")
        monkeypatch.syspath_prepend(installed)
    (tmp_path / "1/site-packages/_added.pth").write_text(f"import os\n# x\n\n{added[0]}\n")
    monkeypatch.setattr(site, "getsitepackages", lambda: own)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(theirs))
    (tmp_path / "package2").mkdir()
    (tmp_path / "package2/__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    statuses = []
    for number in (1, 2, 3, 4, 5, 6):
        lines = lines_of(folder / "rank-0/manifest.jsonl")
        for line in lines:
            if line["is"] == "optimizer":
                line["class"] = f"package{number}.adam.Adam"
        write_lines(folder / "rank-0/manifest.jsonl", lines)
        statuses.append(cli.main(["replay", str(folder), "--step", "2"]))
    # as it should be; another stands in front; no distribution brought it; it has no such class;
    # in a folder that a .pth file names; in one that PYTHONPATH alone names
    assert statuses == [0, 2, 2, 2, 0, 2], capsys.readouterr().err


def test_a_folder_of_pythonpath_is_not_an_installed_one(tmp_path, monkeypatch):
    """Not by its name, not by a relative path, and not where a .pth file names it too."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own/x.pth").write_text("../site-packages\n")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "own")])
    (folder / "evil.py").write_text("class Evil:\n    pass\n")
    (folder / "evil-1.dist-info").mkdir()
    (folder / "evil-1.dist-info/RECORD").write_text("evil.py,,\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert _is_ours_to_import("evil.Evil", tmp_path / "x/a")
    for named in (str(folder), "site-packages", f"x{os.pathsep}./own/../site-packages"):
        monkeypatch.setenv("PYTHONPATH", named)
        assert not _is_ours_to_import("evil.Evil", tmp_path / "x/a")


def run_beside_modules(tmp_path, names, *arguments):
    """Runs `python -m megaopt` in a folder that has modules of these names; what it printed."""
    marker = tmp_path / "marker"
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")
    command = [sys.executable, "-m", "megaopt", *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not marker.exists(), marker.read_text()
    return done.stdout


def test_python_m_takes_nothing_from_the_working_directory(runs, tmp_path):
    names = ("safetensors", "rich", "tyro", "numpy", "json", "torch", "sitecustomize")
    names += ("typing", "_typing", "os", "posixpath")
    run_beside_modules(tmp_path, names, "diff", runs / "a", runs / "a")


@pytest.mark.parametrize("option", ["-m", "-Bm"])
def test_python_m_drops_the_working_directory_before_it_imports(tmp_path, option):
    (tmp_path / "_typing.py").write_text("open('ran', 'w'); raise ImportError\n")
    command = [sys.executable, *(["-m", "megaopt"] if option == "-m" else ["-Bmmegaopt"]), "audit"]
    done = subprocess.run(
        [*command, "x"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "must be a folder with rank-0" in done.stderr) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_an_import_leaves_the_paths_of_a_script(tmp_path):
    (tmp_path / "package").mkdir()
    code = "import sys; before = list(sys.path); import megaopt; assert sys.path == before"
    for path in ("package/__init__.py", "package/train.py", "script.py"):
        (tmp_path / path).write_text(code + "\n")
    commands = ("-m", "package.train"), ("script.py", "-m", "megaopt"), ("-c", code, "megaopt")
    for command in commands:
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no PYTHONSAFEPATH")
def test_ranks_of_a_regression_take_nothing_from_the_working_directory(tmp_path):
    """The configuration may have come with modules; a started Python looks there first."""
    (tmp_path / "run.toml").write_text(tiny_run() + UNFUSED + fused())
    names = ("multiprocessing", "pickle", "signal", "numpy", "torch", "megatron")
    out = run_beside_modules(tmp_path, names, "regress", "run.toml", "--out", tmp_path / "out")
    assert "identical: " in out


@pytest.mark.parametrize(
    "file", ["checkpoint.pt", "golden.json", "map.json", "megatron.json", "kept", "config.toml"]
)
def test_no_pickle_is_read(runs, tmp_path, attacked, file):
    folder = tmp_path / "files"
    shutil.copytree(runs, folder)
    whole = pickled(tmp_path / "marker")
    config(folder), (folder / "map.json").write_text("{}")
    if file == "checkpoint.pt":
        whole = checkpoint(tmp_path)
    for path in folder.rglob("*.safetensors") if file == "kept" else [folder / file]:
        path.write_bytes(whole)
    (folder / "checkpoint.pt").touch()
    for name in READERS:
        if name != "regress" or file == "config.toml":
            attacked(name)


def checkpoint(tmp_path):
    """A pickle behind which stands the digest that megaopt's checkpoints have."""
    from hashlib import sha256

    from megaopt.saving.checkpoint import MARK

    path = tmp_path / "pickle.pt"
    torch.save({"x": Runs(tmp_path / "marker")}, path)
    data = path.read_bytes()
    path.unlink()
    return data + MARK + sha256(data).hexdigest().encode()


def config(folder):
    (folder / "config.toml").write_text('name = "x"\n')


# --- names


def test_names_are_text_whatever_they_are(runs, tmp_path, attacked):
    folder = tmp_path / "files"
    shutil.copytree(runs, folder)
    for name, others in (("a", NAMES), ("b", NAMES[::-1])):
        rename(folder / name, NAMES, others)
    (folder / "golden.json").unlink()
    assert cli.main(["golden", "make", str(folder / "golden.json"), str(folder / "a")]) in (0, 2)
    texts = dict(zip(NAMES, reversed(NAMES), strict=True))
    (folder / "map.json").write_text(json.dumps(texts))
    texts = [json.dumps(name) for name in NAMES if name != "\ud800"]
    words = "".join(f"[[variant]]\nname = {text}\n" for text in texts)
    (folder / "config.toml").write_text(f'"\\u001b[2J" = 1\n{words}')
    (folder / "checkpoint.pt").write_bytes(b"\x1b[2J")
    found = {name: attacked(name) for name in READERS}
    (status, out, err), *_ = found["diff"]
    assert (status, err) == (1, "")
    assert "a[/b]" in out
    assert "experts[bold red]0" in out
    assert ":cat:" in out
    assert "\\x1b[2J" in out
    assert "\\u202egnp.exe" in out
    assert not any(line.startswith(("same", "::error::")) for line in out.splitlines())
    assert max(map(len, out.splitlines())) < 100_000
    page = next(text for path, text, _ in found["diff"] if path == "out.html")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "$\\frac$" in page
    table = next(text for path, text, _ in found["export"] if path == "out.csv")
    cells = [cell for line in table.splitlines() for cell in line.split(",")]
    assert not [cell for cell in cells if cell.strip('"').startswith(("=", "@"))]
    assert any("'=HYPERLINK" in cell for cell in cells)


def test_formulas_of_full_width_are_cells_of_text():
    assert [cell(f"{sign}SUM(1)")[0] for sign in "=+-@\uff1d\uff0b\uff0d\uff20"] == ["'"] * 8


@pytest.mark.filterwarnings("default")
def test_a_page_of_names_that_a_font_lacks_says_nothing(runs, tmp_path):
    for name in "ab":
        folder = shutil.copytree(runs / name, tmp_path / name)
        path = folder / "rank-0/manifest.jsonl"
        path.write_text(path.read_text().replace("exp_avg", "\\u4e00"))
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "x.html")]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert cli.main(command) == 1
    assert not [each for each in told if "Glyph" in str(each.message)]
    assert "\u4e00" in (tmp_path / "x.html").read_text("utf-8")


# --- damage


def test_shapes_that_memory_does_not_hold_are_named(runs, tmp_path, capsys):
    for name in "ab":
        folder = shutil.copytree(runs / name, tmp_path / name)
        lines = lines_of(folder / "rank-0/manifest.jsonl")
        for line in lines:
            if line["is"] == "value" and line["place"]:
                line["shape"] = [2**62]
        write_lines(folder / "rank-0/manifest.jsonl", lines)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert cli.main(["diff", a, b]) == 1
    out, err = capsys.readouterr()
    words = "must be that of a tensor for which memory suffices, got"
    assert f"shape of weight of 0.weight in '{a}/rank-0' {words}" in out
    table = str(tmp_path / "out.csv")
    for command in (["audit", a], ["replay", a, "--step", "2"], ["export", a, table]):
        assert cli.main(command) == 0
        err += capsys.readouterr().err
    assert not err


def test_a_map_that_makes_one_tensor_of_two_is_named(runs, tmp_path, capsys):
    path = tmp_path / "names.json"
    path.write_text('{"*": "all"}')
    assert cli.main(["diff", str(runs / "a"), str(runs / "b"), "--map", str(path)]) == 2
    told = capsys.readouterr().err
    assert "map must leave each tensor a name of its own" in told
    assert str(path) in told


def check_damaged(runs, tmp_path, attacked, seeds):
    folder = tmp_path / "files"
    for seed in seeds:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(runs, folder)
        (folder / "map.json").write_text("{}")
        for path in ("golden.json", "megatron.json"):
            damage_json(folder / path, random.Random(seed))
        damage(folder / "ab"[seed % 2], seed)
        for name in READERS:
            if name not in ("regress", "train", "record"):
                try:
                    attacked(name)
                except BaseException as error:
                    raise AssertionError(f"seed {seed}, {name}") from error


def test_damaged_files_are_refused_in_words(runs, tmp_path, attacked):
    check_damaged(runs, tmp_path, attacked, range(10))


@pytest.mark.exhaustive
def test_two_hundred_damaged_recordings_are_refused_in_words(runs, tmp_path, attacked):
    check_damaged(runs, tmp_path, attacked, range(1000, 1200))


def test_the_verdict_stands_before_what_is_said_of_a_damaged_file(runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "files")
    kept = tmp_path / "files/b/rank-0/kept/step-1.safetensors"
    kept.write_bytes(kept.read_bytes()[:-100])
    status = cli.main(["diff", str(tmp_path / "files/a"), str(tmp_path / "files/b")])
    out, err = capsys.readouterr()
    assert (status, err) == (1, "")
    assert out.startswith("differ: step 1: ")
    assert f"the file of kept tensors '{kept}' must be " in out
    assert cli.main(["replay", str(tmp_path / "files/b"), "--step", "1"]) == 2
    assert f"the file of kept tensors '{kept}' must be whole" in capsys.readouterr().err


def test_a_recording_without_a_whole_step_gives_no_golden_values(runs, tmp_path, capsys):
    shutil.copytree(runs / "a", tmp_path / "a")
    for name in ("samples.bin", "rows.bin", "scalars.jsonl"):
        (tmp_path / "a/rank-0" / name).write_bytes(b"")
    for more in ([], ["--megatron"]):
        status = cli.main(["golden", "make", str(tmp_path / "x.json"), str(tmp_path / "a"), *more])
        assert status == 2
        assert "must have a step that is whole on all ranks, got" in capsys.readouterr().err
        assert not (tmp_path / "x.json").exists()
