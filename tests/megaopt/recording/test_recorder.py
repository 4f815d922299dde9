"""A recorder learns what each step of any torch optimizer did, and changes nothing in it."""

import copy
import pickle
import weakref

import numpy
import pytest
import torch
from attacks import full_disk
from recorded import LOOPS, network, recorded, steps, trained
from safetensors.torch import load_file, save_file

from megaopt import Recorder, digest
from megaopt.recording.compare import compare
from megaopt.recording.files import LANES, Digest, Recording, RecordingError, Writer
from megaopt.recording.inputs import batch_digest, random_digests, random_states
from megaopt.recording.replay import replay


@pytest.mark.parametrize("name", LOOPS)
def test_training_has_the_same_bits(name, tmp_path):
    alone, beside = trained(name), recorded(name, tmp_path / "a", level="modules")
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_run_has_the_same_rows(name, tmp_path):
    recorded(name, tmp_path / "a"), recorded(name, tmp_path / "b")
    first, second = Recording(tmp_path / "a"), Recording(tmp_path / "b")
    assert first.steps == second.steps == [1, 2, 3]
    for step in first.steps:
        assert first.digests(step) == second.digests(step)
        assert first.scalars(step) == second.scalars(step)


def quantities(out, step):
    return {quantity for _, quantity in Recording(out).digests(step)}


def test_rows_are_the_digests_of_what_torch_has(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", keep=[2]):
        steps(model, optimizer, 2)
    found = Recording(tmp_path / "a").digests(2)
    kept = load_file(tmp_path / "a/rank-0/kept/step-2.safetensors")
    for name, param in model.named_parameters():
        own = {"weight": param, "grad": param.grad, **optimizer.state[param]}
        own = {key: value for key, value in own.items() if key != "step"}
        for quantity, tensor in own.items():
            low, high = (int(lane) % LANES for lane in digest(tensor.detach()))
            assert found[name, quantity].digest == Digest(low, high, 0)
            assert torch.equal(kept[f"{name}|{quantity}"], tensor)
    assert {key.partition("|")[2] for key in kept} == {
        *("grad", "weight", "exp_avg", "exp_avg_sq"),
        *("old weight", "old exp_avg", "old exp_avg_sq"),
    }


class Scaled(torch.nn.Module):
    """Has a parameter of no dimension, as CLIP's logit_scale is."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.weight = torch.nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return x @ self.weight * self.scale


KINDS = {
    torch.optim.AdamW: {"grad", "weight", "exp_avg", "exp_avg_sq"},
    torch.optim.NAdam: {"grad", "weight", "exp_avg", "exp_avg_sq", "mu_product"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_no_dimension_are_recorded(kind, tmp_path):
    """On the host too: the step's count alone is a number of the groups."""
    model = Scaled()
    optimizer = kind(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", keep=[2]):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    digests = Recording(tmp_path / "a").digests(2)
    assert {quantity for name, quantity in digests if name == "scale"} == KINDS[kind]
    assert {quantity for name, quantity in digests if name == "weight"} == KINDS[kind]
    assert replay(Recording(tmp_path / "a").ranks[0], 2) == []


def test_not_finite_elements_are_counted(tmp_path):
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    with Recorder([], optimizer, tmp_path / "a"):
        param.grad = torch.tensor([1.0, torch.nan, torch.inf, 0.0])
        optimizer.step()
    found = Recording(tmp_path / "a").digests(1)
    assert found["param_groups.0.0", "grad"].digest.nonfinite == 2
    assert found["param_groups.0.0", "old weight"].digest.nonfinite == 0


def test_old_values_are_there_where_something_was_written(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a"):
        steps(model, optimizer, 2)
        with torch.no_grad():
            model[4].bias.add_(1)
        steps(model, optimizer, 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(model, optimizer, 1)
        model[0].weight.data = model[0].weight.data.clone()
        steps(model, optimizer, 1)
    recording = Recording(tmp_path / "a")
    old = [
        {key for key in recording.digests(step) if key[1].startswith("old")}
        for step in recording.steps
    ]
    assert {quantity for _, quantity in old[0]} == {"old weight"}
    assert old[1] == set()
    assert old[2] == {("4.bias", "old weight")}
    assert {quantity for _, quantity in old[3]} == {"old weight", "old exp_avg", "old exp_avg_sq"}
    assert old[4] == {("0.weight", "old weight")}
    after, before = recording.digests(2), recording.digests(3)
    assert after["4.bias", "weight"] != before["4.bias", "old weight"]


def test_every_third_step(tmp_path):
    recorded("adam", tmp_path / "a", count=7, every=3)
    assert Recording(tmp_path / "a").steps == [1, 3, 6]
    assert quantities(tmp_path / "a", 6) > {"old weight", "old exp_avg"}
    whole = recorded_digests("adam", tmp_path / "b", 7)
    found = Recording(tmp_path / "a")
    for step in (3, 6):
        assert whole[step].items() <= found.digests(step).items()


def recorded_digests(name, out, count):
    recorded(name, out, count=count)
    found = Recording(out)
    return {step: found.digests(step) for step in found.steps}


def test_a_step_that_a_scaler_leaves_out(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Recorder(model, optimizer, tmp_path / "a"):
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 8)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    found = Recording(tmp_path / "a")
    lines = [found.scalars(step)[0][0] for step in found.steps]
    assert [line["skipped"] for line in lines] == [False, True, False]
    assert [float.fromhex(line["loss_scale"]) for line in lines] == [4.0, 4.0, 2.0]
    first, second, third = (found.digests(step)["0.weight", "weight"] for step in found.steps)
    assert first == second != third


def test_closures_leave_losses_and_the_last_gradient(tmp_path):
    recorded("lbfgs", tmp_path / "a")
    found = Recording(tmp_path / "a")
    assert len(found.scalars(1)[0][0]["losses"]) > 1
    assert "grad" in quantities(tmp_path / "a", 1)


def test_a_model_may_come_within_a_step(tmp_path):
    """As `megaopt record` hears of one whose first forward is in a closure."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder([], optimizer, tmp_path / "a") as recorder:

        def closure():
            if recorder is not None:
                recorder.add_model(model)
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        recorder = None
        optimizer.step(closure)
    assert Recording(tmp_path / "a").steps == [1, 2]
    names = {name for name, _ in model.named_parameters()}
    assert {
        name for name, quantity in Recording(tmp_path / "a").digests(1) if quantity == "grad"
    } == names


def test_what_a_step_began_with_must_have_been_kept(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a", keep=[2]):
        steps(model, optimizer, 2)
    path = tmp_path / "a/rank-0/kept/step-2.safetensors"
    kept = {key: each for key, each in load_file(path).items() if not key.endswith("|old weight")}
    save_file(kept, path)
    with pytest.raises(
        RecordingError, match=r"step must have been kept with the weights before it"
    ):
        replay(Recording(tmp_path / "a").ranks[0], 2)


def broken_off(model, optimizer):
    """A step that an error ends after its weights were read."""
    steps_of_group = optimizer.param_groups[0]
    rate, steps_of_group["lr"] = steps_of_group["lr"], "none"
    with pytest.raises(TypeError):
        steps(model, optimizer, 1)
    steps_of_group["lr"] = rate


def test_a_step_that_is_tried_again_is_one_step(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a", level="blocks", keep=[2]):
        steps(model, optimizer, 1)
        broken_off(model, optimizer)
        steps(model, optimizer, 1)
        after = {name: digest(param.detach()) for name, param in model.named_parameters()}
        steps(model, optimizer, 1)
    recording = Recording(tmp_path / "a")
    assert recording.steps == [1, 2, 3]
    rank, found = recording.ranks[0], recording.digests(2)
    values = [value for value, _ in rank.rows(2) if value.place is not None]
    assert len(values) == len(set(values)) == 3 * len(after)
    assert len(list(rank.samples(2))) == len(values)
    for name, lanes in after.items():
        assert found[name, "weight"].digest.low == int(lanes[0]) % LANES
    assert len(recording.scalars(2)[0][0]["losses"]) == 2  # of both backwards


def test_a_write_before_a_step_that_is_tried_again_is_seen(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        steps(model, optimizer, 1)
        with torch.no_grad():
            written = digest(model[4].bias.add_(1))
        broken_off(model, optimizer)
        steps(model, optimizer, 1)
    old = Recording(tmp_path / "a").digests(2)["4.bias", "old weight"]
    assert old.digest.low == int(written[0]) % LANES


def test_a_step_that_another_optimizer_takes_after_an_error(tmp_path):
    model = network()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 4)]
    with Recorder(model, optimizers, tmp_path / "a"):
        broken_off(model, optimizers[0])
        for optimizer in reversed(optimizers):
            steps(model, optimizer, 1)
    recording = Recording(tmp_path / "a")
    assert sorted(recording.scalars(1)[0]) == [0, 1]
    names = {value.name for value, _ in recording.ranks[0].rows(1)}
    assert len(list(recording.ranks[0].rows(1))) == 3 * len(names) == 3 * 4


def test_outputs_of_many_shapes_are_one_value(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a", level="modules"):
        for size in (1, 2, 3, 2):
            model(torch.ones(size, 8)).sum().backward()
            optimizer.step()
    recording = Recording(tmp_path / "a")
    own = [value for value in recording.ranks[0].values if value.place is None]
    assert len(own) == len({(value.name, value.quantity) for value in own})
    first = [recording.own(step)[0, "3", "forward"] for step in recording.steps]
    assert len(first) == 4
    assert len({tuple(each) for each in first}) == 4


def test_what_belongs_to_other_models_is_not_heard(tmp_path):
    model, other = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        for is_alone in (True, False):
            losses = [each(torch.ones(2, 8)).square().mean() for each in (model, other)]
            losses[0].backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not is_alone:
                losses[1].backward()
                other(model(torch.ones(2, 8)).detach().repeat(1, 2)).sum().backward()
                torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-9)
            optimizer.step()
    found = [Recording(tmp_path / "a").scalars(step)[0][0] for step in (1, 2)]
    assert [len(line["losses"]) for line in found] == [1, 1]
    assert float.fromhex(found[1]["grad_norm"]) == norm.item()
    assert float.fromhex(found[1]["losses"][0]) == losses[0].item()


def test_losses_that_are_computed_of_the_weights_are_heard(tmp_path):
    """Without a call of the model, and of an output that a part of it made."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        model[4].weight.sum().backward()
        model[0](torch.ones(2, 8)).mean().backward()
        optimizer.step()
    assert len(Recording(tmp_path / "a").scalars(1)[0][0]["losses"]) == 2


def test_an_output_is_what_the_last_hook_made_of_it(tmp_path):
    found = []
    for is_late in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, tmp_path / str(is_late), level="blocks"):
            if is_late:
                model[0].register_forward_hook(lambda _, __, output: output * 2)
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        found.append(Recording(tmp_path / str(is_late)))
    blame = compare(*found).blame
    assert (blame.step, blame.kind, blame.where) == (1, "forward", "0")


def test_several_optimizers_and_models(tmp_path):
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with Recorder(models, optimizers, tmp_path / "a"):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    (rank,) = Recording(tmp_path / "a").ranks
    names = [each["groups"] for each in rank.optimizers]
    assert names == [[["weight", "bias"]], [["model1.weight", "model1.bias"]]]
    assert sorted(rank.scalars[1]) == [0, 1]
    found = {name for name, _ in Recording(tmp_path / "a").digests(1)}
    assert found == {"weight", "bias", "model1.weight", "model1.bias"}


def test_groups_that_come_later_are_described(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model[0].parameters())
    with Recorder(model, optimizer, tmp_path / "a"):
        steps(model, optimizer, 2)
        optimizer.add_param_group({"params": model[4].parameters()})
        steps(model, optimizer, 2)
    (rank,) = Recording(tmp_path / "a").ranks
    assert rank.optimizers[-1]["groups"] == [["0.weight", "0.bias"], ["4.weight", "4.bias"]]


def test_arguments_that_cannot_be_read_are_passed_over(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_pre_hook(lambda _, args: args[:1])
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    others = torch.empty(3, device="meta"), nested, torch.ones(2).to_sparse()
    with Recorder(model, optimizer, tmp_path / "a"):
        for more in ((), others):
            torch.nn.Module.__call__(model, torch.ones(1, 2), *more).sum().backward()
            optimizer.step()
    first, second = (Recording(tmp_path / "a").scalars(step)[0][0]["batch"] for step in (1, 2))
    assert first == second


def test_nothing_is_written_behind_a_torn_step(tmp_path, monkeypatch):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        steps(model, optimizer, 1)
        with monkeypatch.context() as full:
            full.setattr(Writer, "step", lambda *_: 1 / 0)
            with pytest.warns(RuntimeWarning, match="nothing more is recorded in .*: division"):
                steps(model, optimizer, 1)
        steps(model, optimizer, 1)
    assert Recording(tmp_path / "a").steps == [1]


class Container(torch.optim.Optimizer):
    """Steps others, as torchtitan's container does."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for p in each.param_groups[0]["params"]], {})

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()


def test_a_container_stands_for_its_optimizers(tmp_path):
    model = network()
    halves = [[*model[0].parameters()], [*model[4].parameters()]]
    optimizer = Container([torch.optim.AdamW(half) for half in halves])
    with Recorder(model, optimizer, tmp_path / "a"):
        steps(model, optimizer, 2)
    (rank,) = Recording(tmp_path / "a").ranks
    assert [each["class"] for each in rank.optimizers] == ["torch.optim.adamw.AdamW"] * 2
    assert ("0.weight", "exp_avg") in Recording(tmp_path / "a").digests(2)


def test_members_of_a_dict_of_modules_are_blocks(tmp_path):
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(8, 4)})
    model.forward = lambda batch: model.layers["0"](batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a", level="blocks"):
        steps(model, optimizer, 1)
    assert [*Recording(tmp_path / "a").own(1)] == [
        (0, "layers.0", "forward"),
        (0, "layers.0", "backward"),
    ]


def test_sparse_gradients_are_as_dense_ones(tmp_path):
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Embedding(10, 4, sparse=sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, tmp_path / str(sparse)):
            model(torch.tensor([1, 1, 7])).sum().backward()
            optimizer.step()
        found.append(Recording(tmp_path / str(sparse)).digests(1)["weight", "grad"])
    assert found[0] == found[1]


def test_after_close_everything_is_as_it_was(tmp_path):
    backward, clip = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder(model, optimizer, tmp_path / "a", level="modules")
    assert torch.autograd.backward is not backward
    loss = model(torch.ones(2, 8)).sum()
    recorder.close()
    recorder.close()
    loss.backward()
    optimizer.step()
    assert torch.autograd.backward is backward
    assert torch.nn.utils.clip_grad_norm_ is clip
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert Recording(tmp_path / "a").steps == []


class Subclass(torch.optim.AdamW):
    """A user's: its step calls the one that it inherits, which torch has wrapped already."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_that_calls_the_one_it_inherits_is_one_step(tmp_path):
    torch.optim.AdamW([torch.ones(1)])
    for name, kind in (("a", torch.optim.AdamW), ("b", Subclass)):
        model = network()
        optimizer = kind(model.parameters())
        with Recorder(model, optimizer, tmp_path / name):
            steps(model, optimizer)
    first, second = Recording(tmp_path / "a"), Recording(tmp_path / "b")
    assert first.steps == second.steps
    assert all(list(first.ranks[0].rows(s)) == list(second.ranks[0].rows(s)) for s in first.steps)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_are_not_recorded(copied, tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", level="modules"):
        steps(copied(model), optimizer, 1)
        steps(model, optimizer, 1)
    found = Recording(tmp_path / "a")
    assert [len(found.scalars(step)[0][0]["batch"]) for step in (1, 2)] == [0, 1]
    assert not found.own(1)


def test_gradients_and_outputs_are_not_kept_alive(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", level="modules"):
        output = model(torch.ones(2, 8))
        alive = [weakref.ref(output)]
        output.sum().backward()
        optimizer.step()
        alive += [weakref.ref(param.grad) for param in model.parameters()]
        del output
        optimizer.zero_grad()
        assert [each() for each in alive] == [None] * len(alive)


def test_what_cannot_be_written_ends_the_recording_and_not_the_training(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", keep=[2]):
        steps(model, optimizer, 1)
        (tmp_path / "a/rank-0/kept").write_text("a file in the folder's place")
        with pytest.warns(RuntimeWarning, match="nothing more is recorded in .*: .*File exists"):
            steps(model, optimizer, 1)
        steps(model, optimizer, 1)
    assert Recording(tmp_path / "a").steps == [1]
    assert optimizer.state[next(model.parameters())]["step"] == 3


@pytest.mark.parametrize("room", [0, 300, 5000, 10_000])
def test_a_full_disk_ends_the_recording_at_any_write_and_not_the_training(tmp_path, room):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        with Recorder(model, optimizer, tmp_path / "a"):
            steps(model, optimizer, 4)

    with pytest.warns(RuntimeWarning) as told, full_disk(room):
        train()
    assert ["File too large" in str(each.message) for each in told] == [True]
    assert optimizer.state[next(model.parameters())]["step"] == 4


def test_names_with_lone_surrogates_are_recorded_and_kept(tmp_path):
    model = torch.nn.Module()
    model.add_module("a\ud800b", torch.nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "a", keep=[1]):
        for _ in range(2):
            model.get_submodule("a\ud800b")(torch.ones(2, 300)).sum().backward()
            optimizer.step()
    found = Recording(tmp_path / "a")
    assert found.steps == [1, 2]
    bits, held = found.kept(1, ("a\ud800b.weight", "weight"))
    assert len(bits) == 600
    assert held.all()
    assert replay(found.ranks[0], 1) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a whole number >= 1, got 0"),
        ({"samples": 2.0}, r"samples must be a whole number >= 1, got 2\.0"),
        ({"keep": [range(2)]}, "keep must be a whole number >= 1, got 0"),
        ({"keep": 5}, r"keep must be numbers of steps and ranges, as \(100, .* got 5"),
        ({"keep": "5"}, "keep must be numbers of steps and ranges, .* got '5'"),
        ({"names": 5}, "names must be a dict of texts, .* got 5"),
        ({"names": {"a": 1}}, "names must be a dict of texts, .* got {'a': 1}"),
        ({"vocabulary": 0}, "vocabulary must be a whole number >= 1, got 0"),
        ({"model": None}, r"model must be a torch\.nn\.Module or a list of them, got None"),
        ({"level": "all"}, "level must be one of loss, step, blocks, modules, got 'all'"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, options, message):
    model = network()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), **options}
    with pytest.raises(ValueError, match=message):
        Recorder(out=tmp_path / "a", **given)
    assert not (tmp_path / "a").exists()


def test_a_recording_is_not_written_over(tmp_path):
    recorded("sgd", tmp_path / "a")
    with pytest.raises(FileExistsError, match="out must be a folder without a recording of rank 0"):
        recorded("sgd", tmp_path / "a")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANK", "abc", "RANK in the environment must be a whole number >= 0, got 'abc'"),
        ("RANK", "-1", "RANK in the environment must be a whole number >= 0, got '-1'"),
        ("RANK", "", "RANK in the environment must be a whole number >= 0, got ''"),
        ("WORLD_SIZE", "0", "WORLD_SIZE in the environment must be a whole number >= 1, got '0'"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE in the environment must be .* >= 1, got '2.0'"),
    ],
)
def test_a_rank_that_is_no_number_is_refused(variable, value, message, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        recorded("sgd", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_recorder_that_is_refused_leaves_no_hooks(tmp_path):
    (tmp_path / "file").touch()
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(NotADirectoryError):
        Recorder(model, optimizer, tmp_path / "file")
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(module, each) for module in model.modules() for each in hooks)
    assert not optimizer._optimizer_step_pre_hooks


def test_batches_tell_samples_apart_and_add_over_them():
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    whole = batch_digest((batch, {"labels": torch.arange(6)}))
    halves = [
        batch_digest((batch[part], {"labels": torch.arange(6)[part]}))
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert torch.equal(whole, halves[0] + halves[1])
    order = torch.tensor([3, 1, 0, 2, 5, 4])
    assert torch.equal(whole, batch_digest((batch[order], {"labels": order})))
    exchanged = batch.clone()
    exchanged[[0, 1], 0] = batch[[1, 0], 0]
    assert not torch.equal(whole, batch_digest((exchanged, {"labels": torch.arange(6)})))
    assert not torch.equal(whole, batch_digest((batch, {"labels": order})))


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_each_generator_of_numpys_tells_of_a_number_drawn(name):
    def told():
        return random_digests(random_states(set()))["numpy"]

    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(getattr(numpy.random, name)(1))
    try:
        first = told()
        assert told() == first
        numpy.random.rand()
        assert told() != first
    finally:
        numpy.random.set_bit_generator(before)


def test_tensors_of_a_batch_may_not_be_exchanged():
    first, second = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
    assert not torch.equal(batch_digest((first, second)), batch_digest((second, first)))


def test_a_model_that_is_cast_between_steps(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        steps(model, optimizer, 1)
        optimizer.zero_grad()
        model.bfloat16()
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    recording = Recording(tmp_path / "a")
    assert recording.steps == [1, 2]
    dtypes = {value.dtype for value, _ in recording.ranks[0].rows(2)}
    assert dtypes == {"bfloat16"}
    weight = digest(model[0].weight.detach())
    assert recording.digests(2)["0.weight", "weight"].digest.low == int(weight[0]) % LANES
