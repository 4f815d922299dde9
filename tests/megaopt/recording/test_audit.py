"""Right optimizers are never accused, and what an audit says of runs as a whole."""

import sys
import warnings

import numpy
import pytest
import torch
from wrong_steps import SGD, AdamW, Model, audited

from megaopt import FusedAdam, FusedMuon
from megaopt.lab.cli import main
from megaopt.recording.audit import audit, law
from megaopt.recording.files import SAMPLE, Rank, Recording, Writer
from megaopt.recording.laws import LAWS, PARAM, adam

ADAM = {"weight_decay": 0.1, "betas": (0.8, 0.99)}
TORCHS = {
    "Adam": {**ADAM, "amsgrad": True},
    "AdamW": ADAM,
    "NAdam": {**ADAM, "decoupled_weight_decay": True},
    "Adafactor": {"weight_decay": 0.1},
    "SGD": {"weight_decay": 0.1},
}
MOMENTUM = [
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
]
KINDS = [*TORCHS.items(), *(("SGD", options) for options in MOMENTUM)]
WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REGIMES = [(1e-8, 1.0), (1e-3, 1e-30), (1e-3, 1.0), (1.0, 1e18)]
"""The rate, and the gradients' size."""


def ways(name, dtype):
    """The implementations of torch's that work, on a CPU."""
    if name in ("NAdam", "Adafactor"):
        return WAYS[:2]
    # torch 2.13's fused SGD leaves 16-bit weights as they are, but for a vector's rest
    is_broken = name == "SGD" and dtype in (torch.bfloat16, torch.float16)
    return WAYS[:2] if is_broken else WAYS


def odd(step, param, grad):
    """Gradients with zeros, infinities and NaN; none at times."""
    if (step + param.dim()) % 5 == 0:
        return None
    grad = torch.zeros_like(grad) if step % 7 == 0 else grad.clone()
    if step % 6 == 0:
        grad.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    return grad.to(param.dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.sample(4)
def test_torchs_optimizers_obey(tmp_path, name, options, dtype):
    for way in ways(name, dtype):
        for lr, scale in REGIMES:
            model = Model(dtype=dtype)
            made = getattr(torch.optim, name)(model.parameters(), lr=lr, **options, **way)
            folder = tmp_path / f"{way} {lr} {scale}"
            report = audited(folder, model, made, 4, scale)
            assert report.obeys is True, (way, lr, scale, str(report.findings[0]))
            assert report.checked == 12


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam"])
def test_capturable_steps_obey(tmp_path, monkeypatch, name):
    """Their operations, on a CPU, for which torch refuses them."""
    module = sys.modules[f"torch.optim.{name.lower().removesuffix('w')}"]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    for dtype in DTYPES:
        for way in WAYS[:2]:
            model = Model(dtype=dtype)
            options = {**TORCHS[name], "lr": 1e-3, "capturable": True, **way}
            made = getattr(torch.optim, name)(model.parameters(), **options)
            report = audited(tmp_path / f"{dtype} {way}", model, made, 4)
            assert report.obeys is True, (dtype, way, str(report.findings[0]))


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.sample(2)
def test_options_that_are_tensors_accuse_nobody(tmp_path, name):
    """They make fp32 of what is computed with them, beside fp64 weights too."""
    betas = tuple(map(torch.tensor, ADAM["betas"]))
    tensors = [{"lr": torch.tensor(1e-3)}]
    if "betas" in TORCHS[name]:
        tensors += [{"lr": 1e-3, "betas": betas}, {"lr": torch.tensor(1e-3), "betas": betas}]
    for dtype in DTYPES:
        for i, given in enumerate(tensors):
            for way in ways(name, dtype)[::2]:  # foreach takes none
                model = Model(dtype=dtype)
                made = getattr(torch.optim, name)(model.parameters(), **TORCHS[name] | given | way)
                report = audited(tmp_path / f"{dtype} {i} {way}", model, made, 4)
                assert report.obeys is True, (dtype, given, way, str(report.findings[0]))


def test_numbers_of_fp64_are_held_to_fp64(tmp_path, own_laws):
    LAWS["wrong_steps.SGD"] = LAWS["torch.optim.sgd.SGD"]
    model = Model(dtype=torch.float64)
    optimizer = SGD(model.parameters(), {"lr": 0.1 * (1 + 1e-9)}, lr=0.1)
    assert audited(tmp_path, model, optimizer, 3).obeys is False


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.sample(2)
def test_odd_gradients_accuse_nobody(tmp_path, name):
    for dtype in DTYPES:
        model = Model(dtype=dtype)
        made = getattr(torch.optim, name)(model.parameters(), lr=0.01, **TORCHS[name])
        report = audited(tmp_path / str(dtype), model, made, 20, grads=odd)
        assert report.obeys is True, (dtype, str(report.findings[0]))


@pytest.mark.parametrize("kind", [FusedAdam, FusedMuon])
def test_steps_that_our_optimizers_leave_out_accuse_nobody(tmp_path, kind):
    """By nonfinite="skip", which counts none of them."""
    model = Model()
    made = kind(model.parameters(), nonfinite="skip")
    report = audited(tmp_path, model, made, 20, grads=odd)
    assert made.param_groups[0]["step"] == 17
    assert report.obeys is True, str(report.findings[0])

    def write(*_):
        model.parts[0].detach().add_(1.0)

    made.register_step_post_hook(write)
    report = audited(tmp_path / "wrong", model, made, 6, grads=odd)
    assert "not skipped" in {each.explanation for each in report.findings if each.step == 6}


@pytest.mark.parametrize("kind", [FusedAdam, FusedMuon])
def test_masters_that_are_given_accuse_nobody(tmp_path, kind):
    """Their values before the first step are no casts of the weights, and are not recorded."""
    model = Model()
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    made = kind(model.parameters(), lr=1e-3, master_weights=masters)
    report = audited(tmp_path, model, made, 4)
    assert report.obeys is True, str(report.findings[0])
    assert any("masters that an optimizer is given" in reason for reason in report.not_checked)


@pytest.mark.slow
def test_a_thousand_steps_obey(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=1001)

    def follow(step):
        if step > 1:
            schedule.step()

    report = audited(tmp_path, model, optimizer, 1000, between=follow)
    # a hundred steps, and from then on each tenth
    assert (report.obeys, report.checked) == (True, 3 * 190)


def test_torchs_fused_sgd_of_16_bits_is_judged_by_what_it_does(tmp_path):
    model = Model(dtype=torch.bfloat16)
    expected = model.parts[0].detach() - 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    report = audited(tmp_path, model, optimizer, 1, grads=lambda step, param, grad: param * 0 + 1)
    assert report.obeys is torch.equal(model.parts[0].detach(), expected)


# --- counts of steps


def make_states(optimizer):
    """A step without gradients and with lr = 0, as libraries take one to make states."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_dummy_step_that_counts_is_found(tmp_path, is_recorded):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-12)
    first = 1
    if is_recorded:
        first = 2
        optimizer.param_groups[0]["lr"] = 0.0

        def between(step):
            optimizer.param_groups[0]["lr"] = 0.0 if step == 1 else 1e-3

        def grads(step, param, grad):
            return torch.zeros_like(grad) if step == 1 else grad

        report = audited(tmp_path, model, optimizer, 4, between=between, grads=grads)
    else:
        make_states(optimizer)
        report = audited(tmp_path, model, optimizer, 3)
    found = report.findings[0]
    assert (found.step, found.explanation) == (first, "step count + 1")
    # sqrt(1 - 0.999**2) / (1 - 0.9**2) over sqrt(1 - 0.999) / (1 - 0.9)
    assert f"{found.ratio:.3f}" == "0.744"
    assert "the update is 0.744 of the law's" in str(found)


def test_a_state_that_is_loaded_after_a_dummy_step_is_no_fault(tmp_path):
    model, other = Model(), Model()
    saved = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    saved.step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = saved.state_dict()

    def between(step):
        optimizer.param_groups[0]["lr"] = 0.0 if step == 1 else 1e-3
        if step == 2:
            optimizer.load_state_dict(state)
            model.load_state_dict(other.state_dict())

    def grads(step, param, grad):
        return torch.zeros_like(grad) if step == 1 else grad

    assert audited(tmp_path, model, optimizer, 4, between=between, grads=grads).obeys is True


def test_a_run_that_is_recorded_from_its_middle_on(tmp_path):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    assert audited(tmp_path / "a", model, optimizer, 5).obeys is True
    assert audited(tmp_path / "b", model, optimizer, 5).checked == 15


def test_parameters_that_get_gradients_later_have_counts_of_their_own(tmp_path):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def grads(step, param, grad):
        return grad if param.dim() > 1 or step > 3 else None

    report = audited(tmp_path, model, optimizer, 8, grads=grads)
    assert (report.obeys, report.checked) == (True, 8 + 2 * 5)


def test_steps_between_which_others_are_not_recorded(tmp_path):
    model = Model()
    report = audited(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-3), 20, every=5)
    assert (report.obeys, report.checked) == (True, 3 * 5)


def split(folder, into):
    """Writes one rank's recording as two ranks', each with every other sampled element."""
    whole = Rank(folder / "rank-0")
    for number in range(2):
        writer = Writer(into, number, {**whole.run, "rank": number})
        writer.optimizer(whole.optimizers[0])
        for step, lines in sorted(whole.scalars.items()):
            rows = numpy.zeros(len(list(whole.samples(step))), SAMPLE)
            for row, (value, held, bits) in zip(rows, whole.samples(step), strict=True):
                mask = sum(1 << place for place in range(number, 64, 2))
                row["value"], row["width"] = writer.number(value), 4
                row["held"], row["words"] = held & mask, bits
            scalars = {key: own for key, own in lines[0].items() if key not in ("step", "source")}
            writer.step(step, 0, scalars, samples=rows)
        writer.close()


def test_ranks_of_shards_are_one_recording(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def write(step):
        if step == 3:
            model.parts[0].data.mul_(0.5)

    report = audited(tmp_path / "whole", model, optimizer, between=write)
    split(tmp_path / "whole", tmp_path / "parts")
    again = audit(Recording(tmp_path / "parts"))
    assert again.findings == report.findings
    assert (again.checked, again.findings[0].explanation) == (12, "outside write")


# --- who else writes


@pytest.mark.parametrize("quantity", ["weight", "exp_avg"])
def test_a_write_between_steps_is_found(tmp_path, quantity):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    param = model.parts[1]

    def write(step):
        if step == 3:
            own = param.data if quantity == "weight" else optimizer.state[param]["exp_avg"]
            own.mul_(0.5)

    report = audited(tmp_path, model, optimizer, 4, between=write)
    found = report.findings[0]
    assert found[:4] == (3, "parts.1", quantity, "outside write")
    assert len(report.findings) == 1


def test_a_scaler_that_leaves_out_a_step(tmp_path):
    for fused in (False, True):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

        class Scaled:
            """What `audited` steps."""

            def step(self, scaler=scaler, optimizer=optimizer):
                scaler.step(optimizer)
                scaler.update()

        def grads(step, param, grad, scaler=scaler):
            scaled = scaler.scale(grad)
            return scaled * torch.inf if step == 3 else scaled

        report = audited(
            tmp_path / str(fused), model, optimizer, 6, grads=grads, stepped=Scaled().step
        )
        assert report.obeys is True, (fused, str(report.findings[0]))
        assert report.checked >= 15


def test_a_dummy_step_is_found_in_an_unedited_script(tmp_path, capfd):
    """The model is not known yet when the script takes it."""
    pytest.importorskip("tyro", reason="the command's requirements (megaopt[cli]) are not there")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["record", "--out", str(tmp_path / "run"), "--audit", "--", sys.executable]
    assert main([*command, str(script)]) == 1
    assert "from step 2 on: step count + 1 (2 tensors: bias, weight)" in capfd.readouterr().out


SCRIPT = """
import torch
model = torch.nn.Linear(64, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
for param in model.parameters():
    param.grad = torch.zeros_like(param)
optimizer.step()
optimizer.param_groups[0]["lr"] = 1e-3
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
"""


# --- laws


@pytest.fixture
def own_laws():
    before = dict(LAWS)
    yield
    LAWS.clear()
    LAWS.update(before)


class Halving(torch.optim.Optimizer):
    """Takes lr times the gradient, and halves the weight before."""

    def __init__(self, params, keeps=0.5):
        super().__init__(params, {"lr": 0.1, "keeps": keeps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(group["keeps"]).sub_(param.grad, alpha=group["lr"])


def test_a_law_of_ones_own(tmp_path, own_laws):
    @law(Halving)
    def halving(sample):
        kept = sample.old[PARAM] * 0.5
        return {PARAM: kept - sample.grad * sample.number("lr")}

    right, wrong = Model(), Model()
    assert audited(tmp_path / "a", right, Halving(right.parameters())).obeys is True
    report = audited(tmp_path / "b", wrong, Halving(wrong.parameters(), keeps=0.75))
    assert report.findings[0].explanation == "unexplained"


class Milder(torch.optim.AdamW):
    """Has other numbers, and a method of its own."""

    def __init__(self, params):
        super().__init__(params, lr=1e-3, weight_decay=0.3)

    def rate(self):
        return self.param_groups[0]["lr"]


class Halved(Milder):
    """Makes another step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        return super().step(closure)


class Started(torch.optim.SGD):
    """Makes its step of other gradients."""

    def _init_group(self, group, params, grads, momenta):
        has_sparse = super()._init_group(group, params, grads, momenta)
        grads[:] = [grad.sign() for grad in grads]
        return has_sparse


@pytest.mark.parametrize("is_first", [True, False])
def test_an_inherited_step_has_the_law_of_its_class(tmp_path, is_first):
    """Whichever of the two torch has wrapped the step of first."""
    kind = type("Own", (Milder,), {}) if is_first else Milder
    if not is_first:
        torch.optim.AdamW([torch.ones(1)])
    model = Model()
    report = audited(tmp_path / "a", model, kind(model.parameters()))
    assert (report.obeys, report.checked) == (True, 12)
    wrong = Model()
    optimizer = kind(wrong.parameters())
    optimizer.register_step_post_hook(lambda *_: [p.data.add_(1) for p in wrong.parameters()])
    assert audited(tmp_path / "b", wrong, optimizer).obeys is False


@pytest.mark.parametrize("kind", [Halved, Started])
def test_another_step_is_another_law(tmp_path, kind):
    model = Model()
    report = audited(tmp_path, model, kind(model.parameters()))
    assert (report.obeys, report.checked) == (None, 0)
    (reason,) = report.not_checked
    assert reason.endswith(f"{kind.__name__} is not known")


def test_ours_that_is_inherited_is_held_to_the_bit(tmp_path):
    model = Model()
    kind = type("Own", (FusedAdam,), {})
    report = audited(tmp_path, model, kind(model.parameters(), lr=1e-3, backend="reference"))
    assert (report.obeys, report.equal_bits) == (True, 12)


def test_without_a_law_only_writes_of_others_are_found(tmp_path):
    model = Model()

    def write(step):
        if step == 2:
            model.parts[0].data.zero_()

    report = audited(tmp_path / "a", model, Halving(model.parameters()), between=write)
    assert [finding.explanation for finding in report.findings] == ["outside write"]
    again = Model()
    report = audited(tmp_path / "b", again, Halving(again.parameters()))
    assert report.obeys is None
    (reason,) = report.not_checked
    assert reason.endswith("Halving is not known")
    assert report.moved.keys() == {"parts.0", "parts.1", "parts.2"}


FAST = {
    "transformer_engine.pytorch.optimizers.fused_adam": {"adam_w_mode": False},
    "apex.optimizers.fused_adam": {"bias_correction": False},
}


@pytest.mark.parametrize("module", FAST)
def test_libraries_that_keep_masters_and_options_beside_groups(tmp_path, module):
    """Their law holds for an optimizer that computes as theirs do; and not for another."""
    options = FAST[module]
    made = type("FusedAdam", (Plain,), {"__module__": module, "__qualname__": "FusedAdam"})
    for dtype in (torch.float32, torch.bfloat16):
        model = Model(dtype=dtype)
        optimizer = made(model.parameters(), **options)
        assert audited(tmp_path / f"a {dtype}", model, optimizer, 20).obeys is True
        other = made(model.parameters(), **options)
        other.adam_w_mode = not other.adam_w_mode
        other.claims = optimizer.adam_w_mode
        report = audited(tmp_path / f"b {dtype}", model, other, 3)
        assert report.findings[0].explanation in (
            "L2 decay for decoupled",
            "decoupled decay for L2",
        )


class Plain(torch.optim.Optimizer):
    """Adam as TransformerEngine and apex keep it: fp32 masters, adam_w_mode beside the groups.

    Quotients and roots are off by an ulp either way, as fast math may have them.
    """

    def __init__(self, params, adam_w_mode=True, bias_correction=True):
        own = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        super().__init__(params, {**own, "bias_correction": bias_correction})
        self.adam_w_mode, self.claims = adam_w_mode, None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self.update(param, group)
        if self.claims is not None:
            self.adam_w_mode, self.claims = self.claims, self.adam_w_mode

    def update(self, param, group):
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            zeros = torch.zeros_like(param, dtype=torch.float32)
            state.update(exp_avg=zeros, exp_avg_sq=zeros.clone())
            if param.dtype != torch.float32:
                state["master_param"] = param.float()
        weight, grad = state.get("master_param", param), param.grad.float()
        over1, over2 = (1 - beta ** group["step"] for beta in (beta1, beta2))
        if not group["bias_correction"]:
            over1 = over2 = 1.0
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * weight
        state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
        state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad)
        below = off((state["exp_avg_sq"] / over2).sqrt()) + group["eps"]
        update = off(state["exp_avg"] / over1 / below)
        if self.adam_w_mode:
            update = update + group["weight_decay"] * weight
        weight.sub_(group["lr"] * update)
        if weight is not param:
            param.copy_(weight)


def off(value):
    """Every other element an ulp larger, the rest an ulp smaller."""
    toward = torch.where(torch.arange(value.numel()).view(value.shape) % 2 == 0, torch.inf, 0.0)
    return torch.nextafter(value, toward * value.sign())


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Lion", "Lion8bit"])
def test_bitsandbytes_obeys_within_a_code(tmp_path, name):
    optim = pytest.importorskip("bitsandbytes.optim")
    for dtype in (torch.float32, torch.bfloat16):
        model = Model(((64, 128), (40,)), dtype)
        optimizer = getattr(optim, name)(model.parameters(), lr=1e-3, weight_decay=0.1)
        report = audited(tmp_path / f"a {dtype}", model, optimizer, 6)
        assert (report.obeys, report.checked) == (True, 12), str(report.findings[:1])


def test_clipping_in_the_step_is_no_fault_of_it(tmp_path):
    model = Model()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    report = audited(tmp_path, model, optimizer, stepped=lambda: optimizer.step(clip_norm=1.0))
    assert (report.obeys, report.equal_bits) == (True, 12)


def test_masters_of_another_ones_law_are_read(tmp_path, own_laws):
    law(AdamW, counts_groups=False)(adam)
    model = Model(dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = audited(tmp_path, model, AdamW(model.parameters()), 10)
    assert (report.obeys, report.checked) == (True, 30)
