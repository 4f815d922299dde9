"""Files of golden values: kept, held to, renewed; Megatron-LM's own."""

import json
import subprocess

import pytest
import torch
from faulty_runs import AT, Faults, run
from written_runs import Run

from megaopt.lab.compared import golden as command
from megaopt.recording import golden
from megaopt.recording.files import RecordingError


class Rate(Faults):
    """Another lr from one step on."""

    def before_step(self, step, model, optimizer):
        optimizer.param_groups[0]["lr"] = 9e-3 if step >= AT else 1e-2


class Bit(Faults):
    """One bit of one moment at step 4, where the file has digests."""

    def within_step(self, step, params, state):
        if step == 4:
            state[params[7]]["exp_avg"].view(torch.int32)[3] ^= 1


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return run(tmp_path_factory.mktemp("golden") / "a")


@pytest.fixture
def file(right, tmp_path):
    golden.make(tmp_path / "golden.json", right)
    return tmp_path / "golden.json"


def test_the_same_run_is_the_same(file, tmp_path):
    found = golden.check(file, run(tmp_path / "b"))
    assert (found.comparison.verdict, found.is_own, found.drift) == ("same", True, [])


@pytest.mark.parametrize(
    ("fault", "step", "kind", "where"),
    [(Rate, AT, "optimizer", "lr of group 0"), (Bit, 4, "optimizer", "blocks.1.norm.bias")],
)
def test_a_fault_has_its_blame(fault, step, kind, where, file, tmp_path):
    blame = golden.check(file, run(tmp_path / "b", fault())).comparison.blame
    assert (blame.step, blame.kind, blame.where) == (step, kind, where)


def test_numbers_of_each_step_come_back(right):
    entry = json.loads(json.dumps(golden.entry_of(right)))
    kept = golden.Golden(entry)
    assert kept.steps == right.steps
    for step in right.steps:
        (mine,), (theirs,) = kept.scalars(step)[0].values(), right.scalars(step)[0].values()
        left_out = ("step", "source", "has_all_old")
        assert {n: v for n, v in theirs.items() if n not in left_out} == mine
    assert sorted(entry["digests"]) == ["1", "2", "4", "5"]


def test_an_option_that_ends_is_not_carried_on(tmp_path):
    write = Run(world=1)
    for step in (2, 3):
        write.saying(step, 0, groups=[{"momentum": 0.9}], losses=[])
    recording = write.write(tmp_path / "a")
    kept = golden.Golden(json.loads(json.dumps(golden.entry_of(recording))))
    for step in recording.steps:
        groups = [rank[0]["groups"] for rank in (*kept.scalars(step), *recording.scalars(step))]
        said = [{n: v for n, v in group.items() if v is not None} for (group,) in groups]
        assert said[0] == said[1]


def test_many_tensors_have_one_digest(right, tmp_path, monkeypatch):
    path, found = tmp_path / "small.json", []
    for largest in range(20_000, 0, -500):
        monkeypatch.setattr(golden, "LARGEST", largest)
        path.unlink(missing_ok=True)
        try:
            golden.make(path, right)
        except RecordingError:
            break
        assert path.stat().st_size <= largest
        (entry,) = golden.read(path)
        found.append((len(entry["tensors"]), list(entry["digests"])))
    # fewer steps first, then one digest for all tensors
    steps = ["1", "2", "4", "5"]
    assert list(dict.fromkeys(map(str, found))) == [
        str(each) for each in ((16, steps), (16, ["1", "5"]), (1, steps))
    ]
    monkeypatch.setattr(golden, "LARGEST", largest + 500)
    golden.make(path, right)
    assert golden.check(path, run(tmp_path / "b")).comparison.verdict == "same"
    blame = golden.check(path, run(tmp_path / "c", Bit())).comparison.blame
    assert (blame.step, blame.kind, blame.where) == (4, "optimizer", "all tensors")


def test_too_many_steps_are_refused(right, tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "LARGEST", 1000)
    with pytest.raises(RecordingError, match="golden values must be at most 1000 bytes, got"):
        golden.make(tmp_path / "golden.json", right)
    assert not (tmp_path / "golden.json").exists()


def test_a_file_is_not_made_twice(file, right):
    with pytest.raises(RecordingError, match="file must be new"):
        golden.make(file, right)


@pytest.mark.parametrize("text", ["{", "[]", '{"is": "other"}'])
def test_other_files_are_refused(text, right, tmp_path):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(RecordingError, match=r"golden values .*must be"):
        golden.check(tmp_path / "other.json", right)


# ---- environments


@pytest.fixture
def of_two_cards(tmp_path):
    path, cards = tmp_path / "cards.json", {}
    for card in ("H100", "H200"):
        cards[card] = Run(card=card).write(tmp_path / card)
    golden.make(path, cards["H100"])
    golden.update(path, cards["H200"], "a second card")
    return path


def test_each_environment_has_its_entry(of_two_cards, tmp_path):
    assert [each["family"]["card"] for each in golden.read(of_two_cards)] == ["H100", "H200"]
    fault = (2, None, "embed.weight", "weight", 0), (3, None, None, None, None)
    other = Run(*fault, card="H200").write(tmp_path / "b")
    assert golden.check(of_two_cards, other).comparison.blame.kind == "optimizer"
    assert golden.check(of_two_cards, other).is_own


def test_an_environment_without_an_entry_says_so(of_two_cards, tmp_path):
    fault = (1, None, None, "grad", 0)
    other = Run(fault, card="H200", torch="2.11").moved((1, "grad", 8)).write(tmp_path / "b")
    found = golden.check(of_two_cards, other)
    assert not found.is_own
    assert found.comparison.tier == "close"
    assert found.line.startswith("no entry for torch: 2.11")
    assert "beside that of torch: 2.10" in found.line
    assert "card: H200: differ, as may be by nature" in found.line
    norms = {(what, step): (mine, theirs) for what, step, mine, theirs in found.drift}
    assert norms["loss", 1][0] == norms["loss", 1][1]
    assert norms["grad", 1][0] < norms["grad", 1][1]
    assert norms["weight", 1][0] == norms["weight", 1][1]


def test_update_keeps_the_others_and_the_reasons(of_two_cards, tmp_path):
    before = golden.read(of_two_cards)
    other = Run((2, None, None, "weight", 0), card="H100").write(tmp_path / "b")
    golden.update(of_two_cards, other, "a better kernel")
    golden.update(of_two_cards, other, "another reason")
    kept, renewed = golden.read(of_two_cards)
    assert kept == before[1]
    assert [line["because"] for line in renewed["because"]] == ["a better kernel", "another reason"]
    assert golden.check(of_two_cards, other).comparison.verdict == "same"


def test_update_wants_a_reason(file, right):
    with pytest.raises(RecordingError, match="because must be the reason of the change, got ' '"):
        golden.update(file, right, " ")


def test_a_tree_with_changes_is_refused(tmp_path, monkeypatch):
    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True)

    file, source = tmp_path / "golden.json", tmp_path / "train.py"
    golden.refuse_changes(file)  # no tree at all
    git("init", "-q")
    file.write_text("{}")
    source.write_text("")
    git("add", ".")
    git("commit", "-qm", "first")
    golden.refuse_changes(file)
    file.write_text("[]")
    golden.refuse_changes(file)  # the file itself is to change
    source.write_text("lr = 2")
    with pytest.raises(RecordingError, match=r"tree must be clean, got changes:  M train\.py"):
        golden.refuse_changes(file)
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a")
    source.write_text("")
    with pytest.raises(RecordingError, match="run must be recorded where git has no changes"):
        command("update", file, tmp_path / "a", because="a reason")


# ---- Megatron-LM's files


def test_megatrons_files_are_in_full_precision(right, tmp_path):
    values = golden.megatron_values(right)
    assert set(values) == {"lm loss", "grad-norm", "learning-rate"}
    loss = values["lm loss"]
    assert {name: loss[name] for name in loss if name != "values"} == {
        "start_step": 1,
        "end_step": 5,
        "step_interval": 1,
        "value_precision": "full",
    }
    path = tmp_path / "megatron.json"
    path.write_text(json.dumps(values))
    assert golden.check_megatron(path, run(tmp_path / "b")) == []
    (lr, *others) = sorted(golden.check_megatron(path, run(tmp_path / "c", Rate())))
    assert lr.startswith("grad-norm: step 4: ")
    assert others[0] == "learning-rate: step 3: 0.01, and 0.009; 3 of 5 steps"


def test_one_unit_in_the_last_place_is_seen_in_full_precision_alone(right, tmp_path):
    """A file without the mark has five decimals."""
    values = golden.megatron_values(right)
    loss = values["lm loss"]["values"]
    loss["2"] = float(numpy_next(loss["2"]))
    path = tmp_path / "megatron.json"
    path.write_text(json.dumps(values))
    (line,) = golden.check_megatron(path, right)
    assert line.startswith("lm loss: step 2: ")
    del values["lm loss"]["value_precision"]
    values["lm loss"]["values"] = {step: round(each, 5) for step, each in loss.items()}
    path.write_text(json.dumps(values))
    assert golden.check_megatron(path, right) == []
    values["lm loss"]["values"]["2"] += 1e-5
    path.write_text(json.dumps(values))
    assert len(golden.check_megatron(path, right)) == 1


def numpy_next(number):
    return torch.nextafter(torch.tensor(number), torch.tensor(torch.inf))


def test_metrics_that_are_missing_are_not_compared(right, tmp_path):
    steps = {"start_step": 1, "end_step": 5, "step_interval": 1, "values": {"1": 5.0, "2": "nan"}}
    path = tmp_path / "megatron.json"
    path.write_text(json.dumps({"iteration-time": steps}))
    with pytest.raises(RecordingError, match="file must have lm loss, grad-norm, learning-rate"):
        golden.check_megatron(path, right)
