"""megaopt diff, golden, bisect and replay: what they print, write, and end with."""

import csv
import json
import os
import sys
from html.parser import HTMLParser

import faulty_runs
import pytest
import torch
from faulty_runs import AT, Faults, run
from recorded import recorded
from safetensors.torch import load_file, save_file
from written_runs import undated

from megaopt import FusedAdam, Recorder
from megaopt.lab.compared import growth_rows
from megaopt.recording.compare import Growth
from megaopt.recording.files import Recording


class Rate(Faults):
    def before_step(self, step, model, optimizer):
        optimizer.param_groups[0]["lr"] = 9e-3 if step == AT else 1e-2


class Plain(Faults):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)


class Wider(Faults):
    def start(self, model):
        model.extra = torch.nn.Linear(2, 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # what git says of the checkout is not what the tests are about
        run(folder / "a")
        run(folder / "b", Rate())
        run(folder / "wider", Wider())
    return folder


SAME = "same: 5 steps from 1 to 5, 16 tensors (grad, weight, exp_avg, exp_avg_sq), bit for bit\n"


# ---- diff


def test_the_verdict_stands_in_the_first_line(megaopt, runs):
    status, out, err = megaopt("diff", runs / "a", runs / "b")
    lines = out.splitlines()
    assert (status, err) == (1, "")
    assert lines[0].startswith("differ: step 3: weight of embed.weight differs; equal: gradient, ")
    assert lines[0].endswith("lr of group 0: 0.01, and 0.009")
    assert "step 3: 16 differ: embed.weight, embed.bias, " in out
    assert "how it grows" in out


def test_equal_runs_are_one_line(megaopt, runs):
    assert megaopt("diff", runs / "a", runs / "a") == (0, SAME, "")


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("loss", "0 tensors (no digests)"),
        ("blocks", "16 tensors (grad, weight, forward, backward)"),
    ],
)
def test_what_was_compared_is_told(level, words, megaopt, tmp_path):
    run(tmp_path / "a", Plain(), level)
    line = f"same: 5 steps from 1 to 5, {words}, bit for bit\n"
    assert megaopt("diff", tmp_path / "a", tmp_path / "a")[1] == line


def test_words_of_a_command_are_told_one_by_one(megaopt, tmp_path, monkeypatch):
    for name, words in (("a", "a --lr 3 --x"), ("b", "b --lr=-3 --x --y")):
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        run(tmp_path / name)
    out = megaopt("diff", tmp_path / "a", tmp_path / "b")[1]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert [row for row in rows if row and row[0].startswith("argv")] == [
        ["argv", "train.py a", "train.py b"],
        ["argv --lr", "3", "-3"],
        ["argv --y", "unset", ""],
    ]


def test_what_cannot_be_compared_ends_with_2(megaopt, runs):
    status, out, _ = megaopt("diff", runs / "a", runs / "wider")
    assert status == 2
    assert out.startswith("not comparable: A lacks extra.bias, extra.weight")
    status, _, err = megaopt("diff", runs / "a", runs / "nothing")
    assert status == 2
    assert err.startswith("megaopt: recording must be a folder with rank-0, got ")


def test_a_map_of_names(megaopt, runs, tmp_path):
    file = tmp_path / "map.json"
    file.write_text('{"other.*": "*"}')
    assert megaopt("diff", runs / "a", runs / "a", "--map", file)[0] == 0
    file.write_text("[]")
    status, _, err = megaopt("diff", runs / "a", runs / "a", "--map", file)
    assert status == 2
    assert err.startswith("megaopt: map must be a dict of texts, as ")


def test_annotations_of_a_pull_request(megaopt, runs, tmp_path):
    out = megaopt("diff", runs / "a", runs / "b", "--github")[1]
    assert out.splitlines()[-1].startswith("::error title=megaopt diff::differ: step 3: weight of ")
    megaopt("golden", "make", tmp_path / "golden.json", runs / "a")
    out = megaopt("golden", "check", tmp_path / "golden.json", runs / "b", "--github")[1]
    assert out.splitlines()[-1].startswith("::error title=megaopt golden::differ: step 3: ")
    out = megaopt("diff", runs / "a", runs / "a", "--github")[1]
    assert out.splitlines()[-1].startswith("::notice title=megaopt diff::same: ")


def test_json_has_the_blame(megaopt, runs, tmp_path):
    megaopt("diff", runs / "a", runs / "b", "--json", tmp_path / "diff.json")
    found = json.loads((tmp_path / "diff.json").read_text(), parse_constant=pytest.fail)
    blame = found["blame"]
    assert (found["schema"], found["verdict"], found["tier"]) == (1, "differ", "bits")
    assert [blame[name] for name in ("step", "kind", "where")] == [3, "optimizer", "embed.weight"]
    assert {"step": 2, "quantity": "weight", "differ": 0, "of": 16, "relative": 0.0, "ulp": 0} in (
        found["growth"]
    )
    assert found["line"] == megaopt("diff", runs / "a", runs / "b")[1].splitlines()[0]


def test_what_lies_within_a_tolerance_ends_with_0(megaopt, runs):
    status, out, _ = megaopt("diff", runs / "a", runs / "b", "--tolerance", "0.5")
    assert status == 0
    assert out.startswith("within tolerance: step 3: weight of embed.weight differs; ")
    assert "; the tolerance is 0.5" in out
    assert megaopt("diff", runs / "a", runs / "b", "--tolerance", "1e-9")[0] == 1
    status, _, err = megaopt("diff", runs / "a", runs / "b", "--tolerance", "nan")
    assert (status, err) == (2, "megaopt: tolerance must be a number >= 0, got nan\n")


def test_kept_tensors_have_the_first_element(megaopt, tmp_path):
    for name, faults in (("a", Faults()), ("b", Rate())):
        run(tmp_path / name, faults, keep=(AT,))
    a, b = (
        load_file(tmp_path / name / "rank-0/kept/step-3.safetensors")["embed.weight|weight"]
        for name in ("a", "b")
    )
    files = "--json", tmp_path / "diff.json", "--html", tmp_path / "diff.html"
    out = megaopt("diff", tmp_path / "a", tmp_path / "b", *files)[1]
    line = f"weight of embed.weight: 32 of 32 elements differ, first [0, 0]: {a[0, 0].item().hex()}"
    assert line in out
    assert line in (tmp_path / "diff.html").read_text()
    found = json.loads((tmp_path / "diff.json").read_text())["elements"]
    assert [found[n] for n in ("first", "b", "of")] == [[0, 0], b[0, 0].item().hex(), 32]
    assert found["apart"] == (b.double() - a.double()).abs().max().item()


class Page(HTMLParser):
    """What a page holds, and what it would ask others for."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.asked, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)
        links = {"src", "href", "xlink:href"}
        self.asked += [v for n, v in attributes if n in links and not v.startswith("#")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_asks_nobody(megaopt, runs, tmp_path):
    megaopt("diff", runs / "a", runs / "b", "--html", tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text()
    page = Page(text)
    assert page.asked == []
    assert page.open == []
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    assert "lr of group 0: 0.01, and 0.009" in text


def test_what_runs_say_is_no_html(tmp_path, megaopt, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "<script>alert(1)</script>")
    run(tmp_path / "a")
    monkeypatch.delenv("NCCL_ALGO")
    run(tmp_path / "b")
    megaopt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "diff.html")
    assert "&lt;script&gt;" in (tmp_path / "diff.html").read_text()
    assert "script" not in Page((tmp_path / "diff.html").read_text()).tags


# ---- export


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_recording_is_a_table(megaopt, runs, tmp_path, ending):
    file = tmp_path / f"a.{ending}"
    assert megaopt("export", runs / "a", file) == (0, "", "")
    with open(file, newline="") as text:
        found = list(csv.DictReader(text) if ending == "csv" else map(json.loads, text))
    rows = [{name: str(value) for name, value in row.items() if value != ""} for row in found]
    recording = Recording(runs / "a")
    losses = [r["value"] for r in rows if r["quantity"] == "loss"]
    lines = [recording.scalars(step)[0][0] for step in recording.steps]
    assert losses == [repr(float.fromhex(line["losses"][0])) for line in lines]
    rate = {"step": "2", "rank": "0", "optimizer": "0", "name": "group 0", "quantity": "lr"}
    assert {**rate, "value": "0.01"} in rows
    weight = recording.digests(4)["head.bias", "weight"].digest
    tensor = {"step": "4", "name": "head.bias", "quantity": "weight", "digest": str(weight)}
    assert tensor in rows
    several = [str(row) for row in rows if "value" not in row]
    assert len(several) == len(set(several)) == 5 * (64 + 1 + 3) + 16


def test_a_table_is_csv_or_json_lines(megaopt, runs, tmp_path):
    status, _, err = megaopt("export", runs / "a", tmp_path / "a.txt")
    assert status == 2
    assert err.startswith("megaopt: to must be a file named .csv or .jsonl, got ")
    assert megaopt("export", tmp_path / "none", tmp_path / "a.csv")[0] == 2
    assert not (tmp_path / "a.csv").exists()


# ---- golden


def test_golden_values_are_made_checked_and_renewed(megaopt, runs, tmp_path):
    file = tmp_path / "golden.json"
    assert megaopt("golden", "make", file, runs / "a") == (0, f"written: {file}\n", "")
    assert megaopt("golden", "check", file, runs / "a")[:2] == (0, SAME)
    status, out, _ = megaopt("golden", "check", file, runs / "b")
    assert status == 1
    assert out.startswith("differ: step 3: lr of group 0: 0.01, and 0.009\n")
    status, _, err = megaopt("golden", "update", file, runs / "b")
    assert (status, err) == (2, "megaopt: because must be the reason of the change, got ''\n")
    assert megaopt("golden", "update", file, runs / "b", "--because", "a smaller lr")[0] == 0
    assert megaopt("golden", "check", file, runs / "b")[0] == 0


def test_without_an_entry_of_the_environment_nothing_passes(megaopt, runs, tmp_path):
    file = tmp_path / "golden.json"
    megaopt("golden", "make", file, runs / "a")
    content = json.loads(file.read_text())
    entry = content["entries"][0]
    entry["family"]["torch"] = entry["run"]["environment"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    assert megaopt("golden", "check", file, runs / "a")[0] == 0  # the same bits all the same
    status, out, _ = megaopt("golden", "check", file, runs / "b")
    assert status == 2
    assert out.startswith("no entry for torch: ")
    assert "beside another environment" in out


def test_megatrons_golden_values(megaopt, runs, tmp_path):
    file = tmp_path / "golden.json"
    megaopt("golden", "make", file, runs / "a", "--megatron")
    assert megaopt("golden", "check", file, runs / "a", "--megatron")[0] == 0
    status, out, _ = megaopt("golden", "check", file, runs / "b", "--megatron")
    assert status == 1
    assert "different: learning-rate: step 3: 0.01, and 0.009; 1 of 5 steps\n" in out


# ---- bisect

SCRIPT = """
import sys

sys.path.insert(0, {support!r})
from faulty_runs import AT, Faults, trained


class Rate(Faults):
    steps = int(sys.argv[2])

    def before_step(self, step, model, optimizer):
        optimizer.param_groups[0]["lr"] = float(sys.argv[1]) if step == AT else 1e-2


trained(Rate())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(support=os.path.dirname(faulty_runs.__file__)))
    return path


@pytest.mark.parametrize(
    ("lr", "steps", "status", "words"),
    [
        # ended when the step is there, long before its last one
        ("1e-2", "100000000", 0, "good: the same up to step 3"),
        pytest.param("9e-3", "5", 1, "bad: step 3: weight of", marks=pytest.mark.slow),
        pytest.param("8e-3", "5", 1, "(otherwise than bad)", marks=pytest.mark.slow),
        pytest.param("1e-2", "1", 125, "skip: the command ended before", marks=pytest.mark.slow),
        pytest.param(
            "1e-2", "x", 125, "skip: the command recorded nothing", marks=pytest.mark.slow
        ),
    ],
)
def test_bisect_says_which_commit_is_good(lr, steps, status, words, runs, script, megaopt):
    both = runs / "a", runs / "b"
    found = megaopt("bisect", *both, "--", sys.executable, script, lr, steps)
    assert found[0] == status
    assert words in found[1]


def test_the_table_says_what_the_last_step_has():
    growth = [
        Growth(1, "loss", 1, 1, 0.5, None),
        Growth(1, "forward", 2, 3, None, None),
        Growth(2, "loss", 0, 1, 0.0, None),
        Growth(2, "forward", 3, 3, None, None),
    ]
    assert growth_rows(growth) == [
        ("loss", "1", "1 of 1", "0 of 1", "0.5 to 0", "-"),
        ("forward", "1", "2 of 3", "3 of 3", "-", "-"),
    ]


def test_runs_that_do_not_part_cannot_be_bisected(runs, megaopt):
    status, _, err = megaopt("bisect", runs / "a", runs / "a", "--", "true")
    assert status == 128  # ends the bisect: git takes 2 for a bad commit
    assert err.startswith("megaopt: good and bad must differ in a step of both, got same")
    status, _, err = megaopt("bisect", runs / "a", runs / "b", "python", "-c", "pass")
    words = f"got {runs / 'a'} {runs / 'b'} python -c pass"
    message = f"megaopt: command must stand behind --, as in -- python train.py, {words}\n"
    assert (status, err) == (128, message)


# ---- replay


class SGD(Faults):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)


class Complex(SGD):
    """A parameter of complex128, which safetensors has not."""

    def start(self, model):
        self.phase = model.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def loss(self, step, loss):
        return loss + (self.phase * (1 + 2j)).abs().square().sum()


class Ours(Faults):
    def optimizer(self, model):
        return FusedAdam(model.parameters(), lr=self.lr, weight_decay=0.1, backend="reference")


class Masters(Ours):
    def start(self, model):
        model.bfloat16()

    def batch(self, step, x, y):
        return x.bfloat16(), y.bfloat16()

    def optimizer(self, model):
        return FusedAdam(
            model.parameters(),
            lr=self.lr,
            dtype=torch.float32,
            store_param_remainders=True,
            exp_avg_sq_dtype=torch.bfloat16,
            backend="reference",
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Faults, SGD, Complex, Ours, Masters])
@pytest.mark.parametrize("step", [1, 4])
def test_a_kept_step_is_taken_again(kind, step, megaopt, tmp_path):
    run(tmp_path / "a", kind(), keep=(step,))
    same = f"same: step {step} of rank 0, bit for bit\n"
    backends = ("torch", "cpu", "triton") if issubclass(kind, Ours) else ("torch",)
    for backend in backends:
        found = megaopt("replay", tmp_path / "a", "--step", step, "--backend", backend)
        assert found == (0, same, "")


def test_a_bit_that_was_written_otherwise_is_named(megaopt, tmp_path):
    run(tmp_path / "a", keep=(2,))
    path = tmp_path / "a" / "rank-0" / "kept" / "step-2.safetensors"
    tensors = load_file(path)
    tensors["blocks.1.linear.weight|exp_avg"].view(torch.int32).view(-1)[9] ^= 1
    save_file(tensors, path)
    status, out, _ = megaopt("replay", tmp_path / "a", "--step", 2)
    assert status == 1
    assert out.startswith("different: exp_avg of blocks.1.linear.weight: 1 differ; element 9: ")
    assert out.count("\n") == 1


@pytest.mark.parametrize("name", ["step-2", "step-2-1"])
def test_each_optimizer_takes_its_step_again(name, megaopt, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    first = torch.optim.AdamW(model[0].parameters())
    second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    with Recorder(model, [first, second], tmp_path / "a", keep=(2,)):
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            first.step()
            second.step()
    same = megaopt("replay", tmp_path / "a", "--step", 2)
    assert same == (0, "same: step 2 of rank 0, bit for bit\n", "")
    path = tmp_path / "a" / "rank-0" / "kept" / f"{name}.safetensors"
    tensors = load_file(path)
    weight = next(each for each in tensors if each.endswith(".weight|weight"))
    tensors[weight].view(torch.int32).view(-1)[3] ^= 1
    save_file(tensors, path)
    status, out, _ = megaopt("replay", tmp_path / "a", "--step", 2)
    assert status == 1
    assert out.startswith(f"different: weight of {weight.partition('|')[0]}: 1 differ; element 3: ")


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, FusedAdam])
def test_steps_before_and_behind_a_new_group(kind, step, megaopt, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = kind(model[0].parameters())
    with Recorder(model, optimizer, tmp_path / "a", keep=(step,)):
        for number in (1, 2, 3, 4):
            if number == 3:
                optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.5})
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    found = megaopt("replay", tmp_path / "a", "--step", step)
    assert found == (0, f"same: step {step} of rank 0, bit for bit\n", "")
    path = tmp_path / "a" / "rank-0" / "kept" / f"step-{step}.safetensors"
    tensors = load_file(path)
    name = "1.weight" if step >= 3 else "0.weight"
    tensors[f"{name}|weight"].view(torch.int32).view(-1)[3] ^= 1
    save_file(tensors, path)
    status, out, _ = megaopt("replay", tmp_path / "a", "--step", step)
    assert status == 1
    assert out.startswith(f"different: weight of {name}: 1 differ; element 3: ")


def test_a_step_of_a_parameter_that_has_gone(megaopt, tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", keep=(1,)):
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            del optimizer.param_groups[0]["params"][1:]
    same = "same: step 1 of rank 0, bit for bit\n"
    assert megaopt("replay", tmp_path / "a", "--step", 1) == (0, same, "")
    undated(tmp_path / "a")
    message = "megaopt: groups must have all parameters of the step, got no bias\n"
    assert megaopt("replay", tmp_path / "a", "--step", 1) == (2, "", message)


def test_a_step_that_wants_a_closure_is_refused(megaopt, tmp_path):
    recorded("lbfgs", tmp_path / "a", keep=(2,))
    status, out, err = megaopt("replay", tmp_path / "a", "--step", 2)
    assert (status, out) == (2, "")
    assert err.startswith(
        "megaopt: optimizer must be one that steps without a closure, got torch.optim.lbfgs.LBFGS"
    )
    assert err.count("\n") == 1


def test_what_cannot_be_taken_again_is_refused(megaopt, tmp_path):
    run(tmp_path / "a", keep=(2,))
    status, _, err = megaopt("replay", tmp_path / "a", "--step", 3)
    assert status == 2
    assert err.startswith("megaopt: step must be one that was kept (--keep), got 3: no ")
    status, _, err = megaopt("replay", tmp_path / "a", "--step", 2, "--backend", "cpu")
    assert status == 2
    assert err.startswith(
        "megaopt: backend must be torch for torch.optim.adamw.AdamW, got 'reference'"
    )
