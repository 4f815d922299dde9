"""Each tensor of a run has one name, and no two have the same."""

import json

import pytest
import torch
from written_runs import undated

from megaopt import Recorder
from megaopt.recording.audit import audit
from megaopt.recording.compare import compare
from megaopt.recording.files import Recording, RecordingError
from megaopt.recording.places import canonical


def renamed(folder, names):
    """Gives tensors other names, as versions did that took two for one."""
    for rank in folder.glob("rank-*"):
        path = rank / "manifest.jsonl"
        lines = list(map(json.loads, path.read_text().splitlines()))
        for line in lines:
            if "name" in line:
                line["name"] = names.get(line["name"], line["name"])
            if "groups" in line:
                line["groups"] = [[names.get(n, n) for n in group] for group in line["groups"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["module._orig_mod.a.weight"], ["a.weight"]),
        (["a._checkpoint_wrapped_module.module.weight", "b.weight"], ["a.weight", "b.weight"]),
        (["weight", "module.weight"], ["weight", "module.weight"]),
        # in DistributedDataParallel they are called as they are without it
        (["module.weight", "module.module.weight"], ["weight", "module.weight"]),
        (
            ["_orig_mod.module.weight", "_orig_mod.module.module.weight"],
            ["weight", "module.weight"],
        ),
        (
            ["module.a._orig_mod.weight", "module.a._orig_mod.module.weight", "module.b.weight"],
            ["a.weight", "a.module.weight", "b.weight"],
        ),
        (["a.weight", "a._orig_mod.weight"], ["a.weight", "a._orig_mod.weight"]),
    ],
)
def test_wrappers_do_not_count_where_names_stay_apart(names, short):
    assert list(canonical(names).values()) == short


class Gated(torch.nn.Module):
    """Has a weight of its own beside that of what it wraps."""

    def __init__(self, dim=16):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim, dim))
        self.module = torch.nn.Linear(dim, dim, bias=False)

    def forward(self, batch):
        return self.module(batch) @ self.weight


class Wrapped(torch.nn.Module):
    """A model in a wrapper, as DistributedDataParallel is one."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, batch):
        return self.module(batch)


@pytest.mark.parametrize("kind", [Gated, lambda: torch.nn.Linear(16, 16)])
def test_a_wrapped_run_is_the_same(kind, tmp_path):
    for name in ("plain", "wrapped"):
        torch.manual_seed(0)
        model = kind()
        model = model if name == "plain" else Wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, tmp_path / name):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
    found = compare(Recording(tmp_path / "plain"), Recording(tmp_path / "wrapped"))
    assert (found.verdict, found.missing) == ("same", {})


class Nasty(torch.nn.Module):
    """Names that end alike, that tensors of optimizers have, and tied ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gated, self.module = Gated(), Gated()
        self.param_groups = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16))])
        self.first = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.register_parameter("a|grad", torch.nn.Parameter(torch.ones(16)))

    def forward(self, batch):
        batch = self.module(self.gated(batch * self.param_groups[0] * getattr(self, "a|grad")))
        return self.last(self.first(batch))


class Keyed(torch.optim.SGD):
    """Keeps tensors by names that a recording has for its own."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                for key in ("weight", "grad", "old weight"):
                    self.state[param][key] = torch.full_like(param, len(key))


def nasty(folder, write=None, options=None):
    """Four optimizers, two of them of loose parameters; write(tensors): before the third step."""
    model, loose = Nasty(), [torch.nn.Parameter(torch.ones(8, 8) * i) for i in range(1, 4)]
    named = dict(model.named_parameters())
    twin = torch.nn.Linear(16, 16)
    chosen = [named.pop("first.bias"), named.pop("last.bias")]
    optimizers = [
        torch.optim.AdamW(named.values()),
        torch.optim.AdamW([{"params": loose[:1]}, {"params": loose[1:2], "lr": 0.1}]),
        torch.optim.SGD([loose[2]], lr=0.1, momentum=0.9),
        Keyed([*twin.parameters(), *chosen], lr=0.1),
    ]
    tensors = {**named, **{f"loose {i}": each for i, each in enumerate(loose)}}
    with Recorder([model, twin], optimizers, folder, level="modules", **(options or {})):
        for step in range(1, 5):
            output = twin(model(torch.ones(2, 16)))
            (output.square().mean() + sum(each.square().sum() for each in loose)).backward()
            if step == 3 and write:
                write(tensors)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return tensors


def test_each_tensor_is_seen_by_a_name_of_its_own(tmp_path):
    tensors = nasty(tmp_path / "a")
    recording = Recording(tmp_path / "a")
    (rank,) = recording.ranks
    count = len(tensors) + 4  # and what Keyed has
    for step in recording.steps:
        rows = [(value.name, value.quantity) for value, _ in rank.rows(step) if value.place]
        assert len(rows) == len(set(rows))
        assert len({name for name, quantity in rows if quantity == "grad"}) == count
        kept = {quantity for name, quantity in rows if name == "weight" and "state." in quantity}
        assert kept == {"state.weight", "state.grad", "state.old weight"}
        own = [key for key, calls in recording.own(step).items() if len(calls) > 1]
        assert own == []
    assert audit(recording).obeys is True


NAMES = {"loose 0": "optimizer1.param_groups.0.0", "loose 1": "optimizer1.param_groups.1.0"}
NAMES |= {"loose 2": "optimizer2.param_groups.0.0"}


@pytest.mark.parametrize("which", ["gated.weight", "gated.module.weight", "module.weight", *NAMES])
def test_a_write_to_any_tensor_is_found_by_its_name(which, tmp_path):
    def write(tensors):
        tensors[which].data.mul_(0.5)

    nasty(tmp_path / "a"), nasty(tmp_path / "b", write)
    name = NAMES.get(which, which)
    assert compare(Recording(tmp_path / "a"), Recording(tmp_path / "b")).blame.where == name
    found = audit(Recording(tmp_path / "b")).findings
    assert [each[:4] for each in found] == [(3, name, "weight", "outside write")]


def test_tensors_that_older_versions_took_for_one(tmp_path):
    """No run is the same that has other bits, and what cannot be known is not checked."""

    def write(tensors):
        tensors["gated.module.weight"].data.mul_(0.5)

    for folder, written in (("a", None), ("b", write), ("c", None)):
        nasty(tmp_path / folder, written)
        renamed(tmp_path / folder, {"gated.module.weight": "gated.weight"})
        undated(tmp_path / folder)
    a, b, c = (Recording(tmp_path / folder) for folder in "abc")
    assert compare(a, c).verdict == "same"
    assert compare(a, b).verdict == "differ"
    report = audit(b)
    assert report.not_checked["two tensors are recorded by one name"] == {"gated.weight"}


class Loose(torch.nn.Module):
    """One layer, and what is called as a loose parameter would be."""

    def __init__(self):
        super().__init__()
        self.param_groups = torch.nn.ModuleList([torch.nn.ParameterList([torch.ones(4)])])

    def forward(self, batch):
        return batch * self.param_groups[0][0]


def test_loose_parameters_have_no_name_of_a_models(tmp_path):
    model, loose = Loose(), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([loose, *model.parameters()], lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        (model(loose).sum() + loose.square().sum()).backward()
        optimizer.step()
    (optimizer,) = Recording(tmp_path / "a").optimizers
    assert optimizer["groups"] == [["param_groups.0.0.1", "param_groups.0.0"]]


def test_a_loose_parameter_keeps_its_name_in_another_group(tmp_path):
    first, second, third = (torch.nn.Parameter(torch.ones(4) * i) for i in range(3))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    with Recorder([], optimizer, tmp_path / "a"):
        for step in range(2):
            if step:
                del optimizer.param_groups[0]
                optimizer.add_param_group({"params": [third]})
            for each in (first, second, third):
                each.grad = torch.ones(4)
            optimizer.step()
    (rank,) = Recording(tmp_path / "a").ranks
    assert rank.described(0, 1)[0]["groups"] == [["param_groups.0.0"], ["param_groups.1.0"]]
    assert rank.described(0, 2)[0]["groups"] == [["param_groups.1.0"], ["param_groups.1.0.1"]]


def linear(folder, names=None):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, folder, names=names):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_a_map_leaves_each_tensor_a_name_of_its_own(tmp_path):
    message = "names must leave each tensor a name of its own, got 'bias' for weight and bias"
    with pytest.raises(ValueError, match=message):
        linear(tmp_path / "a", {"weight": "bias"})
    assert not (tmp_path / "a").exists()
    loose = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(loose, lr=0.1)
    names = {"param_groups.0.0": "w", "param_groups.0.1": "w"}
    message = "got 'w' for param_groups.0.1 and another parameter"
    with (
        Recorder([], optimizer, tmp_path / "b", names=names),
        pytest.raises(ValueError, match=message),
    ):
        optimizer.step()
    linear(tmp_path / "c"), linear(tmp_path / "d")
    a, b = (Recording(tmp_path / each) for each in "cd")
    with pytest.raises(RecordingError, match="map must leave each tensor a name of its own, got"):
        compare(a, b, {"weight": "bias"})
    with pytest.raises(RecordingError, match="got 'all' for weight and bias"):
        compare(a, b, {"*": "all", "unknown": "x"})


def test_one_loose_parameter_needs_no_number_of_its_optimizer(tmp_path):
    """Names of recordings of one optimizer are those of older versions."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    param.grad = torch.ones(4)
    with Recorder([], optimizer, tmp_path / "a"):
        optimizer.step()
    lines = (tmp_path / "a/rank-0/manifest.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][1]["groups"] == [["param_groups.0.0"]]
