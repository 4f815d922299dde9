"""Audits of runs whose parameters, groups, optimizers, shapes and dtypes change on the way."""

import copy

import pytest
import torch
from written_runs import undated
from wrong_steps import Model, audited

from megaopt import FusedAdam, FusedSGD, Recorder, release_gradients
from megaopt.recording.audit import audit
from megaopt.recording.compare import compare
from megaopt.recording.files import Recording
from megaopt.recording.golden import entry_of

SHAPES = ((40, 70), (70,), (33, 3))
NOT_OWNED = "the recording does not say which group of which optimizer it was in"


def stepping(folder, params, step_of, steps=6, optimizers=()):
    """Records steps with random gradients; step_of(step) gives the optimizer that is stepped."""
    made = torch.Generator().manual_seed(1)
    recorder = Recorder([], list(optimizers), folder)
    with recorder:
        for step in range(1, steps + 1):
            optimizer = step_of(step)
            if optimizer not in optimizers:
                optimizers = [*optimizers, optimizer]
                recorder.add_optimizer(optimizer)
            for param in params():
                param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
            optimizer.step()
    return audit(Recording(folder))


def loose(shapes=SHAPES, dtype=torch.float32):
    made = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=made) * 0.1 for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


# --- parameters come and go


def leaves_its_group(optimizer):
    del optimizer.param_groups[0]["params"][0]


def its_group_is_deleted(optimizer):
    del optimizer.param_groups[0]


def another_takes_its_place(optimizer):
    old = optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones_like(old))
    optimizer.state.pop(old)


CHANGES = [leaves_its_group, its_group_is_deleted, another_takes_its_place]
KINDS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-3, backend="reference"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_what_leaves_later_is_checked_before(tmp_path, kind, change, is_faulty):
    first, *rest = loose()
    optimizer = KINDS[kind]([{"params": [first]}, {"params": rest, "lr": 3e-3}])

    def step_of(step):
        if step == 4:
            change(optimizer)
        if step == 2 and is_faulty:
            first.data.mul_(0.5)
        return optimizer

    def params():
        return [param for group in optimizer.param_groups for param in group["params"]]

    report = stepping(tmp_path, params, step_of)
    found = [(each.step, each.name, each.explanation) for each in report.findings]
    assert found == ([(2, "param_groups.0.0", "outside write")] if is_faulty else [])
    count = 3 * 6 if change is another_takes_its_place else 3 * 3 + 2 * 3
    assert (report.checked, dict(report.not_checked)) == (count, {})


def test_a_second_stage_is_held_to_its_own_law(tmp_path):
    """Each step to that of the optimizer that took it, whether it is made anew or steps in turn."""
    for name in ("stages", "turns"):
        for wrong in (False, True):
            params = loose()
            first = torch.optim.AdamW(params, lr=1e-3)
            second = torch.optim.SGD(params, lr=1e-2, momentum=0.9)

            def step_of(step, first=first, second=second, name=name):
                return (first, second)[step > 3 if name == "stages" else step % 2]

            def ruin(*_, params=params):
                params[0].data.mul_(1.5)

            if wrong:
                second.register_step_post_hook(ruin)
            report = stepping(tmp_path / f"{name} {wrong}", lambda params=params: params, step_of)
            assert (report.checked, dict(report.not_checked)) == (3 * 6, {})
            steps = [4, 5, 6] if name == "stages" else [1, 3, 5]
            found = [(each.step, each.name, each.quantity) for each in report.findings]
            assert found == [(s, "param_groups.0.0", "weight") for s in steps if wrong]


def test_counts_go_on_while_another_optimizer_steps_between(tmp_path):
    params = loose()
    first, second = torch.optim.Adam(params, eps=1e-12), torch.optim.SGD(params, lr=1e-5)

    def step_of(step):
        if step == 5:  # counts one update that nobody made
            for param in params:
                first.state[param]["step"] += 1
        return (second, first)[step % 2]

    report = stepping(tmp_path, lambda: params, step_of)
    assert {(each.step, each.explanation) for each in report.findings} == {(5, "step count + 1")}


def test_two_optimizers_of_loose_parameters(tmp_path):
    params = loose()
    optimizers = [torch.optim.AdamW(params[:1]), torch.optim.SGD(params[1:], lr=0.1)]
    with Recorder([], optimizers, tmp_path / "a"):
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape)
            for optimizer in optimizers:
                optimizer.step()
    report = audit(Recording(tmp_path / "a"))
    assert (report.obeys, report.checked, dict(report.not_checked)) == (True, 9, {})


# --- groups by step


def move(optimizer, step, to):
    if step == 4:
        param = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[to]["params"].append(param)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_moves_has_the_numbers_of_its_group(tmp_path, kind):
    first, second, third = loose()
    groups = [{"params": [first, second], "lr": 1e-2}, {"params": [third], "lr": 1e-4}]
    optimizer = KINDS[kind](groups)

    def step_of(step):
        move(optimizer, step, 1)
        return optimizer

    report = stepping(tmp_path, lambda: [first, second, third], step_of)
    assert (report.findings, report.checked) == ([], 18)


def test_groups_that_an_older_recording_does_not_tell_are_not_checked(tmp_path):
    first, second, third = loose()
    groups = [{"params": [first, second], "lr": 1e-2}, {"params": [third], "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups)

    def step_of(step):
        move(optimizer, step, 1)
        return optimizer

    stepping(tmp_path, lambda: [first, second, third], step_of)
    undated(tmp_path)
    report = audit(Recording(tmp_path))
    # the moved one, and the one whose number in the optimizer is another then
    assert report.findings == []
    moved = {"param_groups.0.1", "param_groups.1.0"}
    assert report.not_checked[NOT_OWNED] <= moved
    assert report.checked == 6 * (3 - len(report.not_checked[NOT_OWNED]))


def test_an_older_recording_is_audited_as_it_was(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = audited(tmp_path, model, optimizer, 5)
    undated(tmp_path)
    again = audit(Recording(tmp_path))
    assert (again.findings, again.checked) == (report.findings, report.checked) == ([], 15)


# --- states that begin anew

RESETS = {
    "clear": lambda optimizer, param: optimizer.state[param].clear(),
    "del": lambda optimizer, param: optimizer.state.pop(param),
    "all": lambda optimizer, param: optimizer.state.clear(),
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("how", RESETS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_state_that_is_reset_is_called_so(tmp_path, kind, how, is_old):
    model = Model()
    optimizer = KINDS[kind](list(model.parameters()))

    def between(step):
        if step == 4:
            RESETS[how](optimizer, model.parts[1])

    report = audited(tmp_path, model, optimizer, 7, between=between)
    if is_old:
        undated(tmp_path)
        report = audit(Recording(tmp_path))
    assert {(each.step, each.explanation) for each in report.findings} == {(4, "state reset")}
    names = {each.name for each in report.findings}
    assert names == ({f"parts.{i}" for i in range(3)} if how == "all" else {"parts.1"})
    assert report.checked == 21


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_a_reset_state_of_ours_keeps_the_groups_count(tmp_path, kind):
    model = Model()
    more = {"momentum": 0.9, "lr": 0.1} if kind is FusedSGD else {}
    optimizer = kind(model.parameters(), backend="reference", **more)

    def between(step):
        if step == 4:
            optimizer.state[model.parts[1]].clear()

    report = audited(tmp_path, model, optimizer, 7, between=between)
    assert {each[:2] + each[3:4] for each in report.findings} == {(4, "parts.1", "state reset")}
    assert report.equal_bits == 21


# --- shapes and dtypes that change


def pruned(optimizer, param, rows):
    """The parameter's first rows, and those of its state, in a new parameter in its place."""
    new = torch.nn.Parameter(param.detach()[:rows].clone())
    state = optimizer.state.pop(param)
    optimizer.state[new] = {k: v[:rows].clone() if v.dim() else v for k, v in state.items()}
    optimizer.param_groups[0]["params"] = [new]
    return new


@pytest.mark.parametrize("rows", [30, 20])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_parameter_that_is_pruned_begins_anew(tmp_path, rows, in_place):
    """Below 64 elements too, of which all are sampled."""
    params = [torch.nn.Parameter(torch.randn(40, 3))]
    optimizer = torch.optim.AdamW(params, lr=1e-3)

    def step_of(step):
        if step == 4 and in_place:
            own = optimizer.state[params[0]]
            params[0].data = params[0].data[:rows].clone()
            for key in ("exp_avg", "exp_avg_sq"):
                own[key] = own[key][:rows].clone()
        elif step == 4:
            params[0] = pruned(optimizer, params[0], rows)
        return optimizer

    report = stepping(tmp_path / "a", lambda: params, step_of)
    assert (report.findings, report.checked, dict(report.not_checked)) == ([], 6, {})
    undated(tmp_path / "a")
    assert audit(Recording(tmp_path / "a")).findings == []


@pytest.mark.parametrize("rows", [20, 30, 50])
def test_a_weight_without_a_state_gets_another_shape(tmp_path, rows):
    params = [torch.nn.Parameter(torch.randn(40, 3))]
    optimizer = torch.optim.SGD(params, lr=0.1)

    def step_of(step):
        if step == 4:
            params[0].data = torch.randn(rows, 3)
        return optimizer

    report = stepping(tmp_path, lambda: params, step_of)
    assert (report.findings, report.checked) == ([], 6)
    recording = Recording(tmp_path)
    digests = recording.digests(5)["param_groups.0.0", "weight"]
    assert (recording.values_at(5)["param_groups.0.0", "grad"].shape, digests.missing) == (
        (rows, 3),
        0,
    )


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_is_cast_is_read_by_each_steps_dtype(tmp_path, kind, to):
    folder = tmp_path / f"{kind} {to}"
    model = Model(SHAPES)
    optimizer = KINDS[kind](list(model.parameters()))
    made = torch.Generator().manual_seed(1)
    with Recorder(model, optimizer, folder):
        for step in range(1, 7):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
            if step == 4:
                optimizer.zero_grad()
                model.to(to)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # casts states
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=made).to(to)
            optimizer.step()
    report = audit(Recording(folder))
    assert (report.findings, report.checked) == ([], 18)


def cast_runs(folder, factor):
    for name, times in (("a", 1.0), ("b", factor)):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, folder / name, keep=(2,)):
            for step in range(1, 5):
                if step == 3:
                    model.bfloat16()
                optimizer.param_groups[0]["lr"] = 0.1 * (times if step > 1 else 1.0)
                optimizer.zero_grad()
                model(torch.ones(2, 64, dtype=model.weight.dtype)).square().mean().backward()
                optimizer.step()
    return Recording(folder / "a"), Recording(folder / "b")


def test_distances_and_norms_are_of_each_steps_dtype(tmp_path):
    a, b = cast_runs(tmp_path, 1 + 1e-4)
    assert a.values_at(2)["weight", "weight"].dtype == "float32"
    assert a.values_at(4)["weight", "weight"].dtype == "bfloat16"
    found = compare(a, b)
    assert found.blame.step == 2
    assert found.reasons == []
    apart = {each.step: each.relative for each in found.growth if each.quantity == "weight"}
    assert 0 < apart[2] < 1e-3
    assert (found.elements.name, found.elements.of) == ("weight", 64 * 64)
    entry = entry_of(a)
    norms = [float.fromhex(entry["norms"][step]["weight"]) for step in ("1", "2", "4")]
    assert max(norms) < 2 * min(norms)


def test_another_dtype_from_a_step_on_is_a_reason(tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, tmp_path / name):
            for step in range(1, 4):
                optimizer.zero_grad()
                if step == 2 and name == "b":
                    model.half()
                model(torch.ones(2, 8, dtype=model.weight.dtype)).sum().backward()
                optimizer.step()
    found = compare(Recording(tmp_path / "a"), Recording(tmp_path / "b"))
    assert found.blame.step == 2
    assert any("dtype of" in reason and "float16" in reason for reason in found.reasons)


# --- gradients that are released


@pytest.mark.parametrize("chosen", [slice(None), slice(2)])
def test_released_gradients_accuse_nobody(tmp_path, chosen):
    def train(folder, is_released, factor=1.0):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)]
        model = torch.nn.Sequential(*layers)
        optimizer = FusedAdam(model.parameters(), lr=1e-2, backend="reference")
        with Recorder(model, optimizer, tmp_path / folder):
            if is_released:
                release_gradients(list(model.parameters())[chosen], optimizer)
            for step in range(5):
                optimizer.zero_grad()
                model(torch.ones(4, 16) * (step + 1)).square().mean().backward()
                if step == 2 and factor != 1.0:
                    model[2].bias.data.mul_(factor)
                optimizer.step()
        return Recording(tmp_path / folder)

    run = train("released", True)
    report = audit(run)
    released = set(["0.weight", "0.bias", "2.weight", "2.bias"][chosen])
    assert report.findings == []
    (reason,) = report.not_checked
    assert reason.startswith("it was stepped without a gradient that is recorded")
    assert report.not_checked[reason] == released
    assert report.checked == 5 * (4 - len(released))
    found = compare(train("plain", False), run)
    if chosen == slice(None):
        assert found.verdict == "same"
    else:
        assert found.blame.text.startswith("the gradient of 0.bias differs (one run has none)")
        found = audit(train("written", True, 0.5)).findings
        assert [(each.step, each.name, each.explanation) for each in found] == [
            (3, "2.bias", "outside write")
        ]


# --- torch's loops over lists


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.999])
def test_a_factor_that_a_cpu_rounds_in_place_accuses_nobody(tmp_path, dtype, momentum):
    for number, more in enumerate([{}, {"nesterov": True}, {"dampening": 0.3}]):
        model = Model(dtype=dtype)
        options = {"lr": 1e-2, "momentum": momentum, "foreach": True, **more}
        optimizer = torch.optim.SGD(model.parameters(), **options)
        report = audited(tmp_path / str(number), model, optimizer, 30)
        assert (report.findings, report.checked) == ([], 90)
