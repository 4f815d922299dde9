"""Planted faults: each has the right blame and the right first tensor; equal runs have none."""

import json
import math
import random

import numpy as np
import pytest
import torch
from faulty_runs import AT, Faults, run
from safetensors.torch import load_file

from megaopt.recording.compare import Elements, compare
from megaopt.recording.files import Recording, RecordingError, places_of_samples
from megaopt.recording.recorder import Recorder

ENOUGH = 1e-3


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The run without a fault, recorded once for each level."""
    made = {}

    def recorded(level):
        if level not in made:
            made[level] = run(tmp_path_factory.mktemp("runs") / level, level=level)
        return made[level]

    return recorded


class OneElement(Faults):
    def batch(self, step, x, y):
        x[0, 0] += ENOUGH * (step == AT)
        return x, y


class OtherTarget(Faults):
    """Of the loss alone: the model does not see it."""

    def batch(self, step, x, y):
        return x, y + (step == AT)


class OtherOrder(Faults):
    def batch(self, step, x, y):
        return (x.flip(1), y) if step == AT else (x, y)


class TwoCalls(Faults):
    def calls(self, step):
        return 1 + (step == AT)


class Smaller(Faults):
    def batch(self, step, x, y):
        return (x[:-1], y[:-1]) if step == AT else (x, y)


class TorchDrew(Faults):
    def before_forward(self, step, model):
        if step == AT:
            torch.rand(1)


class PythonDrew(Faults):
    def before_forward(self, step, model):
        if step == AT:
            random.random()


class NumpyDrew(Faults):
    def before_forward(self, step, model):
        if step == AT:
            np.random.rand()


class OtherScale(Faults):
    def before_forward(self, step, model):
        model.blocks[1].scale = 0.9 if step == AT else 1.0


class OtherDropout(Faults):
    def before_forward(self, step, model):
        model.dropout.p = 0.2 if step == AT else 0.1


class ScaledLoss(Faults):
    def loss(self, step, loss):
        return loss * 1.5 if step == AT else loss


class OtherBackward(Faults):
    def before_forward(self, step, model):
        model.blocks[1].backward_scale = 0.9 if step == AT else 1.0


class OneGradient(Faults):
    def before_step(self, step, model, optimizer):
        if step == AT:
            model.blocks[1].linear.weight.grad[0, 0] += ENOUGH


class AfterClipping(Faults):
    def after_clipping(self, step, model):
        if step == AT:
            model.blocks[1].linear.weight.grad.view(-1)[5] += ENOUGH


class NoGradient(Faults):
    def after_clipping(self, step, model):
        if step == AT:
            model.blocks[2].norm.bias.grad = None


class OtherClip(Faults):
    def clip(self, step):
        return 0.9 if step == AT else 1.0


class NotClipped(Faults):
    def clip(self, step):
        return 1e9 if step == AT else 1.0


class Option(Faults):
    name, value = "lr", 9e-3

    def before_step(self, step, model, optimizer):
        if step == AT:
            optimizer.param_groups[0][self.name] = self.value


class Betas(Option):
    name, value = "betas", (0.9, 0.99)


class Eps(Option):
    name, value = "eps", 1e-6


class Decay(Option):
    name, value = "weight_decay", 0.2


class Maximize(Option):
    name, value = "maximize", True


class OneBit(Faults):
    """The optimizer computes another bit in one moment."""

    def within_step(self, step, params, state):
        if step == AT:
            state[params[7]]["exp_avg_sq"].view(torch.int32).view(-1)[3] ^= 1


class NotWritten(Faults):
    """The optimizer leaves out the update of one weight."""

    def within_step(self, step, params, state):
        if step == AT:
            params[5].data.copy_(self.before)
        self.before = params[5].detach().clone()


class WrittenAfter(Faults):
    def after_step(self, step, model, optimizer):
        if step == AT - 1:
            model.blocks[0].linear.weight.data[0].mul_(1.01)


class WrittenBeforeStep(Faults):
    """Between the backward and the step: the loss is equal still."""

    def before_step(self, step, model, optimizer):
        if step == AT:
            with torch.no_grad():
                model.head.weight.mul_(1.01)


class OtherSeed(Faults):
    seed = 1


class OneWeight(Faults):
    def start(self, model):
        model.blocks[2].linear.bias.data[0] += ENOUGH


class Shorter(Faults):
    steps = AT


class DrawnData(Faults):
    """Batches come from torch's generator, and nothing else draws from it."""

    def start(self, model):
        model.dropout.p = 0.0

    def batch(self, step, x, y):
        return torch.randn(6, 4), torch.randn(6, 1)


class DrewAfterBatch(DrawnData):
    def batch(self, step, x, y):
        found = super().batch(step, x, y)
        if step == AT:
            torch.randn(1)
        return found


class DrewAfterStep(DrawnData):
    def after_step(self, step, model, optimizer):
        if step == AT - 1:
            torch.randn(1)


class OtherDrawnBatch(DrawnData):
    """Other data, of which nothing was drawn."""

    def batch(self, step, x, y):
        x, y = super().batch(step, x, y)
        return x + (step == AT), y


LOSS, STEP = "loss", "step"
PLANTED = {
    OneElement: ("data", "batch"),
    OtherOrder: ("data", "batch"),
    Smaller: ("data", "batch"),
    TwoCalls: ("data", "batch"),
    TorchDrew: ("random state", "torch"),
    PythonDrew: ("random state", "python"),
    NumpyDrew: ("random state", "numpy"),
    OtherTarget: ("forward", "loss"),
    OtherScale: ("forward", "loss"),
    OtherDropout: ("forward", "loss"),
    ScaledLoss: ("forward", "loss"),
    OtherBackward: ("gradient", "head.bias"),
    OneGradient: ("gradient", "head.bias"),
    AfterClipping: ("gradient", "blocks.1.linear.weight"),
    NoGradient: ("gradient", "blocks.2.norm.bias"),
    OtherClip: ("gradient", "head.bias"),
    NotClipped: ("gradient", "head.bias"),
    Option: ("optimizer", "embed.weight"),
    Betas: ("optimizer", "embed.weight"),
    Eps: ("optimizer", "embed.weight"),
    Decay: ("optimizer", "embed.weight"),
    Maximize: ("optimizer", "embed.weight"),
    OneBit: ("optimizer", "blocks.1.norm.bias"),
    NotWritten: ("optimizer", "blocks.0.linear.bias"),
    WrittenAfter: ("outside write", "blocks.0.linear.weight"),
    WrittenBeforeStep: ("outside write", "head.weight"),
    OtherSeed: ("start", "embed.weight"),
    OneWeight: ("start", "blocks.2.linear.bias"),
    Shorter: ("length", ""),
}
"""Faults of a run, and their blame as a recording of level "step" shows it."""


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_each_fault_has_its_blame(fault, right, tmp_path):
    wrong = run(tmp_path / "b", fault())
    found = compare(right(STEP), wrong)
    kind, where = PLANTED[fault]
    assert (found.blame.kind, found.blame.where) == (kind, where), found.report()
    at = 1 if kind == "start" else AT
    assert found.blame.step == at
    assert found.verdict == "differ"


DRAWN = {
    DrewAfterBatch: ("random state", "; the batch differs at step 4"),
    DrewAfterStep: ("random state", "; the batch differs too: one may have made the other differ"),
    OtherDrawnBatch: ("data", "the batch differs"),
}


@pytest.mark.parametrize("fault", DRAWN, ids=lambda fault: fault.__name__)
def test_a_generator_that_batches_are_drawn_from_is_to_blame_where_it_parts(fault, tmp_path):
    found = compare(run(tmp_path / "a", DrawnData()), run(tmp_path / "b", fault()))
    kind, words = DRAWN[fault]
    assert (found.blame.step, found.blame.kind) == (AT, kind), found.line
    assert found.line.endswith(words)


def test_equal_runs_are_the_same(right, tmp_path):
    for level in (LOSS, STEP, BLOCKS, MODULES):
        again = run(tmp_path / level, level=level)
        found = compare(right(level), again)
        assert (found.verdict, found.blame, found.growth) == ("same", None, [])
        assert found.steps == (1, 5, 5)
        assert compare(again, Recording(again.folder)).verdict == "same"


class NotANumber(Faults):
    def loss(self, step, loss):
        return loss * torch.nan if step == AT else loss


def test_losses_that_are_no_numbers_are_equal(tmp_path):
    """Other levels, so that the two are not seen to be alike at a look."""
    a, b = (run(tmp_path / level, NotANumber(), level=level) for level in (LOSS, STEP))
    assert compare(a, b).verdict == "same"


# ---- what is said beside the blame


def environment(found):
    """What differs, but for the source, which may change under the tests."""
    rows = {each.name: (each.a, each.b) for each in found.environment}
    return {name: row for name, row in rows.items() if name not in ("git commit", "diff hash")}


def told(right, fault, tmp_path, level=STEP):
    return compare(right(level), run(tmp_path / "b", fault(), level=level))


def test_options_that_differ_are_named(right, tmp_path):
    found = told(right, Option, tmp_path)
    assert "lr of group 0: 0.01, and 0.009" in found.line
    assert "equal: gradient, old weight, exp_avg and exp_avg_sq as step 2 left them" in found.line
    assert found.options == []  # at the first step they are the same


class LittleMoreLr(Option):
    value = math.nextafter(1e-2, 1)


def test_options_that_show_in_no_tensor_are_told_of(right, tmp_path):
    found = told(right, LittleMoreLr, tmp_path)
    more = "lr of group 0: 0.01, and 0.010000000000000002"
    assert found.verdict == "same"
    assert f"step 3 has other options, which show in no tensor: {more}" in found.notes


class Scheduled(Faults):
    def optimizer(self, model):
        optimizer = super().optimizer(model)
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return optimizer


@pytest.mark.parametrize("level", [LOSS, STEP])
def test_what_a_scheduler_notes_in_groups_is_no_option(right, tmp_path, level):
    found = told(right, Scheduled, tmp_path, level)
    assert (found.verdict, found.blame, found.options) == ("same", None, [])


def test_an_equal_norm_does_not_clear_the_backward(right, tmp_path):
    """One rank records nothing else between the two."""
    found = told(right, AfterClipping, tmp_path)
    assert "differs, seen first in it; the norm before clipping is equal" in found.line
    assert any(each.endswith("; --level blocks records blocks") for each in found.remarks())


def test_the_tensor_that_lies_farthest_apart_is_named(right, tmp_path):
    """Clipping moves all gradients: the one that was written stands out."""
    found = told(right, OneGradient, tmp_path)
    assert "farthest apart is that of blocks.1.linear.weight" in found.line
    assert len(found.blame.tensors) == 16
    assert found.blame.tensors[0] == ("head.bias", "grad")


class WrittenUnseen(Faults):
    """An element that is not sampled, by way of .data, between the backward and the step."""

    def start(self, model):
        model.head = torch.nn.Linear(8, 100)

    def batch(self, step, x, y):
        return x, y.repeat(1, 100)

    def before_step(self, step, model, optimizer):
        if step == AT and self.writes:
            sampled = places_of_samples("head.weight", 800, 4)
            place = next(i for i in range(800) if i not in sampled)
            model.head.weight.data.view(-1)[place] += ENOUGH

    def __init__(self, writes):
        self.writes = writes


@pytest.mark.parametrize("level", ["step", "blocks"])
def test_what_was_not_looked_at_before_a_step_is_said(tmp_path, level):
    both = [run(tmp_path / str(w), WrittenUnseen(w), level=level) for w in (False, True)]
    found = compare(*both)
    if level == "blocks":
        assert (found.blame.kind, found.blame.where) == ("outside write", "head.weight")
        return
    assert found.blame.tensors == (("head.weight", "weight"),)
    assert found.line == (
        "differ: step 3: weight of head.weight differs; equal: gradient, weight and exp_avg and "
        "exp_avg_sq as step 2 left them (looked at since: 64 sampled elements of weight; a write "
        "to .data elsewhere is not seen)"
    )


def test_of_blocks_the_weight_was_looked_at(right, tmp_path):
    words = "exp_avg and exp_avg_sq as step 2 left them (not looked at since; a write to .data "
    found = told(right, OneBit, tmp_path, BLOCKS)
    assert f"equal: gradient, old weight, {words}is not seen)" in found.line


# ---- tolerances


class Unsampled(Faults):
    """Two gradients differ, in elements that are not sampled, from the last step on."""

    steps = AT

    def start(self, model):
        model.head = torch.nn.Linear(8, 100)

    def batch(self, step, x, y):
        return x, y.repeat(1, 100)

    def clip(self, step):
        return 1e9

    def after_clipping(self, step, model):
        if step != AT or not self.writes:
            return
        for name, size in (("head.weight", 800), ("head.bias", 100)):
            sampled = places_of_samples(name, size, 4)
            place = next(i for i in range(size) if i not in sampled)
            model.get_parameter(name).grad.view(-1)[place] += ENOUGH

    def __init__(self, writes):
        self.writes = writes


def test_what_no_sample_shows_is_said_and_passes_by_no_tolerance(tmp_path):
    both = [run(tmp_path / str(writes), Unsampled(writes)) for writes in (False, True)]
    found = compare(*both, tolerance=1.0)
    assert (found.verdict, found.blame.kind) == ("differ", "gradient")
    assert found.line.endswith("; all sampled elements are equal")
    words = "what was sampled is equal: no tolerance excuses the rest; the tolerance is 1"
    assert words in found.remarks()


class LittleGradient(Faults):
    def after_clipping(self, step, model):
        if step == AT:
            model.head.weight.grad.mul_(1 + 2.0**-20)


def test_what_lies_within_a_tolerance_passes(right, tmp_path):
    wrong = run(tmp_path / "b", LittleGradient())
    found = compare(right(STEP), wrong, tolerance=0.0)
    far = found.farthest
    assert (found.verdict, found.blame.kind) == ("differ", "gradient")
    assert 0 < far.relative < 1e-4
    assert compare(right(STEP), wrong, tolerance=far.relative).verdict == "within tolerance"
    less = np.nextafter(far.relative, 0)
    assert compare(right(STEP), wrong, tolerance=less).verdict == "differ"
    assert f"farthest apart is {far.quantity} of step {far.step}, by " in " ".join(found.remarks())


def test_the_farthest_is_the_farthest_of_all_steps(right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", Option()), tolerance=1.0)
    grown = max((g.relative, g.quantity, g.step) for g in found.growth if g.relative is not None)
    assert found.farthest.relative >= grown[0]
    assert found.verdict == "within tolerance"
    assert compare(right(STEP), right(STEP), tolerance=0.0).verdict == "same"


@pytest.mark.parametrize("fault", [OneElement, TorchDrew, WrittenAfter, OneWeight, NotANumber])
def test_no_tolerance_excuses_other_inputs(fault, right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", fault()), tolerance=1e9)
    assert found.verdict == "differ"


def test_what_is_no_number_is_inf_in_json(right, tmp_path):
    """JSON has no NaN either, and most readers stop there."""
    found = compare(right(STEP), run(tmp_path / "b", NotANumber()))
    assert {each.relative for each in found.growth if each.quantity == "loss"} >= {math.inf}
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["verdict"] == "differ"


def test_a_tolerance_is_a_number(right):
    with pytest.raises(RecordingError, match=r"tolerance must be a number >= 0, got -1\.0"):
        compare(right(STEP), right(STEP), tolerance=-1.0)


# ---- elements of tensors that both kept


class Element(Faults):
    """Another bit of one element of a matrix, and of two elements of the one after it."""

    def within_step(self, step, params, state):
        if step == AT:
            bits = params[4].data.view(torch.int32)
            bits[2, 3] ^= 4
            bits[5, 1] ^= 1


def test_the_first_element_that_differs_is_named(tmp_path):
    a, b = (
        run(tmp_path / name, fault(), keep=[AT]) for name, fault in (("a", Faults), ("b", Element))
    )
    found = compare(a, b)
    values = [
        load_file(each.folder / f"rank-0/kept/step-{AT}.safetensors")[f"{PLACE}|weight"]
        for each in (a, b)
    ]
    pairs = [[each[i, j].item() for each in values] for i, j in ((2, 3), (5, 1))]
    apart = max(abs(y - x) for x, y in pairs)
    first = Elements(PLACE, "weight", (2, 3), *map(float.hex, pairs[0]), 2, 64, apart, 4)
    assert found.elements == first
    assert found.remarks()[0] == (
        f"weight of {PLACE}: 2 of 64 elements differ, first [2, 3]: {pairs[0][0].hex()}, and "
        f"{pairs[0][1].hex()}; largest distance {apart:.3g}, or 4 units in the last place"
    )


PLACE = "blocks.0.linear.weight"


@pytest.mark.parametrize("fault", [OneWeight, WrittenAfter, AfterClipping, OneBit])
def test_elements_are_those_of_what_is_blamed(fault, tmp_path):
    at = 1 if fault is OneWeight else AT
    a, b = (run(tmp_path / kind.__name__, kind(), keep=[at]) for kind in (Faults, fault))
    blame, found = compare(a, b).blame, compare(a, b).elements
    quantity = f"old {blame.quantity}" if blame.kind in ("start", "outside write") else None
    assert (found.name, found.quantity) == (blame.where, quantity or blame.quantity)
    named = {f"theirs.{name}": name for name, _ in a.values}
    other = run(tmp_path / "c", fault(), keep=[at], names={n: t for t, n in named.items()})
    assert compare(a, other, named).elements == found


def test_without_kept_tensors_of_both_no_element_is_named(right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", Option(), keep=[AT]))
    assert found.elements is None
    a, b = (run(tmp_path / n, f(), keep=[AT]) for n, f in (("c", Faults), ("d", Half)))
    assert compare(a, b).elements is None


def test_what_is_not_recorded_cannot_be_blamed(right, tmp_path):
    found = told(right, OtherScale, tmp_path)
    assert found.blame.unrecorded == ("outputs of blocks",)
    found = told(right, OneGradient, tmp_path / "loss", level=LOSS)
    assert (found.blame.kind, found.blame.where) == ("gradient", "grad_norm")
    assert found.blame.unrecorded[0] == "weights before the step"
    found = told(right, Option, tmp_path / "option", level=LOSS)
    assert (found.blame.kind, found.blame.where) == ("optimizer", "lr of group 0")
    assert "the gradient" in found.blame.unrecorded


def test_two_levels_are_compared_in_what_both_have(right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", level=LOSS))
    assert found.verdict == "same"
    assert environment(found) == {"level": (STEP, LOSS)}
    assert found.notes == ["only A has recorded: grad, weight, exp_avg, exp_avg_sq"]
    found = compare(right(STEP), run(tmp_path / "c", ScaledLoss(), level=LOSS))
    assert found.blame.kind == "forward"


def test_steps_between_recorded_ones_are_named(tmp_path):
    a, b = run(tmp_path / "a", every=2), run(tmp_path / "b", Option(), every=2)
    found = compare(a, b)
    assert (found.blame.step, found.blame.kind) == (4, "between")
    assert found.blame.unrecorded == ("steps 3 to 3",)


def test_growth_begins_where_runs_part(right, tmp_path):
    found = told(right, Option, tmp_path)
    weights = [each for each in found.growth if each.quantity == "weight"]
    assert [each.step for each in weights] == [2, 3, 4, 5]
    assert [each.differ for each in weights] == [0, 16, 16, 16]
    assert weights[0].relative == 0
    assert 0 < weights[1].relative < weights[3].relative
    grads = [each.differ for each in found.growth if each.quantity == "grad"]
    assert grads == [0, 0, 16, 16]


def test_one_unit_in_the_last_place_is_measured(right, tmp_path):
    found = told(right, OneBit, tmp_path)
    (at,) = (e for e in found.growth if (e.step, e.quantity) == (AT, "exp_avg_sq"))
    assert (at.differ, at.of, at.ulp) == (1, 16, 1)


BLOCKS, MODULES = "blocks", "modules"
WITH_BLOCKS = {
    (OtherScale, BLOCKS): ("forward", "blocks.1"),
    (OtherScale, MODULES): ("forward", "blocks.1"),
    (OtherDropout, MODULES): ("forward", "dropout"),
    (OtherDropout, BLOCKS): ("forward", "loss"),
    (OtherTarget, BLOCKS): ("forward", "loss"),
    (ScaledLoss, BLOCKS): ("forward", "loss"),
    (OtherBackward, BLOCKS): ("backward", "blocks.1"),
    (OneGradient, BLOCKS): ("gradient", "head.bias"),
    (Option, BLOCKS): ("optimizer", "embed.weight"),
}


@pytest.mark.parametrize(
    ("fault", "level"), WITH_BLOCKS, ids=lambda each: getattr(each, "__name__", each)
)
def test_blocks_say_where_forward_and_backward_part(fault, level, right, tmp_path):
    found = told(right, fault, tmp_path, level)
    expected = WITH_BLOCKS[fault, level]
    assert (found.blame.step, found.blame.kind, found.blame.where) == (AT, *expected), found.line
    assert found.blame.unrecorded == ()


# ---- environment, names, layouts


def test_the_environment_comes_first(right, tmp_path, monkeypatch):
    before = right(STEP)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    found = compare(before, run(tmp_path / "b"))
    assert found.verdict == "same"
    assert environment(found) == {"NCCL_ALGO": (None, "Ring")}


class SGD(Faults):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)


def test_another_optimizer_is_named(right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", SGD()))
    assert environment(found) == {"optimizer": ("torch.optim.adamw.AdamW", "torch.optim.sgd.SGD")}
    assert (found.blame.step, found.blame.kind) == (1, "optimizer")


def of_two_optimizers(folder, added):
    """Records two optimizers of the same parameters, one after the other.

    added: to the batch of the third step.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    with Recorder(model, [], folder) as recorder:
        for step in range(1, 6):
            if step in (1, 4):
                optimizer = torch.optim.AdamW(model.parameters())
                recorder.add_optimizer(optimizer)
            optimizer.zero_grad()
            model(torch.ones(3, 4) + added * (step == 3)).square().mean().backward()
            optimizer.step()
    return Recording(folder)


def test_optimizers_of_the_same_parameters_count_their_steps_together(tmp_path):
    """Else what the second leaves would stand where the first one's first step has it."""
    a, b = (of_two_optimizers(tmp_path / str(added), added) for added in (0, ENOUGH))
    assert a.steps == [1, 2, 3, 4, 5]
    found = compare(a, b).blame
    assert (found.step, found.kind) == (3, "data")


def test_names_of_the_other_run_are_mapped(right, tmp_path):
    names = {"theirs.*": "*"}
    model = {f"{name}": f"theirs.{name}" for name, _ in right(STEP).values}
    other = run(tmp_path / "b", names=model)
    found = compare(right(STEP), other)
    assert found.verdict == "not comparable"
    assert "embed.weight" in found.missing["B lacks"]
    assert "theirs.embed.weight" in found.missing["A lacks"]
    assert "--map FILE says what those in B are in A" in found.remarks()[-1]
    assert compare(right(STEP), other, names).verdict == "same"


def without_a_forward(folder, model, **given):
    """One step of gradients that no forward made."""
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder([], optimizer, folder, **given):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return Recording(folder)


def test_a_parameter_without_a_name_has_a_hint_of_a_map(tmp_path):
    unnamed = without_a_forward(tmp_path / "a", torch.nn.Linear(2, 2))
    hint = (
        "param_groups.0.0 is parameter 0 of group 0, of no module whose forward ran: --map FILE, "
        "also of megaopt record, gives it a name"
    )
    names = {"param_groups.0.0": "weight", "param_groups.0.1": "bias"}
    named = without_a_forward(tmp_path / "b", torch.nn.Linear(2, 2), names=names)
    found = compare(named, unnamed)
    assert found.verdict == "not comparable"
    assert found.remarks()[-1] == hint
    assert compare(named, unnamed, names).blame.where == "weight"
    other = without_a_forward(tmp_path / "c", torch.nn.Linear(2, 2))
    assert compare(unnamed, other).remarks()[-1] == hint


class Half(Faults):
    def start(self, model):
        model.bfloat16()

    def batch(self, step, x, y):
        return x.bfloat16(), y.bfloat16()


def test_other_dtypes_are_told_of(right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", Half()))
    assert found.blame.kind == "start"
    words = "dtype of grad of embed.weight: float32, and bfloat16; and of 63 more"
    assert found.reasons == [words]
    (first,) = (each for each in found.growth if (each.step, each.quantity) == (1, "weight"))
    assert first.ulp == 0  # not counted between dtypes; norms are
    assert 0 < first.relative < 1


class Wider(Faults):
    def start(self, model):
        model.head = torch.nn.Linear(8, 2)

    def batch(self, step, x, y):
        return x, y.repeat(1, 2)


def test_other_shapes_are_not_compared(right, tmp_path):
    found = compare(right(STEP), run(tmp_path / "b", Wider()))
    assert found.verdict == "not comparable"
    assert found.missing == {
        "other shapes:": ["head.weight (1, 8) and (2, 8)", "head.bias (1,) and (2,)"]
    }
