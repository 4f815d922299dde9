"""Under a GradScaler, Lightning and Accelerate every optimizer does as torch.optim.AdamW does."""

import copy
import functools
import importlib.util
import pickle
import warnings

import pytest
import torch
from runs import FP16, FP32, assert_same, assert_same_run, parameters, params_of, snapshot, values

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW
from megaopt.integration import bitsandbytes, flashoptim, galore_torch, torchao

KINDS = {
    "adam": (FusedAdam, {}),
    "masters": (FusedAdam, {"dtype": FP32}),
    "capturable": (FusedAdam, {"capturable": True}),
    "lion": (FusedLion, {}),
    "sgd": (FusedSGD, {"momentum": 0.9}),
    "muon": (FusedMuon, {}),
    "galore": (GaLoreAdamW, {"rank": 2}),
    "torchao": (torchao.AdamW8bit, {}),
    "bitsandbytes": (bitsandbytes.AdamW8bit, {}),
    "bitsandbytes's lion": (bitsandbytes.Lion, {}),
    "flashoptim": (flashoptim.FlashAdamW, {"master_weight_bits": None}),
    "flashoptim's sgd": (flashoptim.FlashSGD, {"momentum": 0.9, "master_weight_bits": None}),
    "galore_torch": (galore_torch.GaLoreAdamW8bit, {}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
EACH_STEP = [1.0, torch.inf, 1.0, 1.0]
"""What the loss of each step is multiplied by: the second one's overflows."""


def made(kind, params):
    cls, options = KINDS[kind]
    return cls(params, lr=0.01, **options)


def torchs(params):
    return torch.optim.AdamW(params, lr=0.01)


def has(package):
    return importlib.util.find_spec(package) is not None


# --- the scaler alone


def calls_of(optimizer):
    """Whether the scaler called step in each of some steps; clipped between, as torch's guide."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    calls, scales = [], []
    step = optimizer.step
    for number, factor in enumerate(EACH_STEP):
        seen = []
        optimizer.step = lambda *given, seen=seen, **named: (seen.append(1), step(*given, **named))
        scaler.scale(torch.ones(()))
        for index, param in enumerate(params_of(optimizer)):
            grad = values(param.shape, 100 * number + index) * scaler.get_scale() * factor
            param.grad = grad.to(param.dtype)
        scaler.unscale_(optimizer) if number % 2 else None
        scaler.step(optimizer)
        scaler.update()
        calls.append(bool(seen))
        scales.append(scaler.get_scale())
    optimizer.step = step
    return calls, scales


@each_kind
def test_a_scaler_steps_when_it_steps_torchs(kind):
    shapes = [(8, 8), (8,)]
    found, expected = (made(kind, parameters(shapes, FP32)) for _ in range(2))
    assert calls_of(found) == calls_of(torchs(parameters(shapes, FP32)))
    for number, factor in enumerate(EACH_STEP):
        for index, param in enumerate(params_of(expected)):
            param.grad = values(param.shape, 100 * number + index)
        if factor == 1.0:
            expected.step()
    assert_same_run(found, expected)


def scaled_twice(optimizer):
    """Two steps under a scaler, of which the first overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for factor in (torch.inf, 1.0):
        scaler.scale(torch.ones(()))
        for index, param in enumerate(params_of(optimizer)):
            scaled = values(param.shape, index) * scaler.get_scale() * factor
            param.grad = scaled.to(param.dtype)
        scaler.step(optimizer)
        scaler.update()


def test_the_step_unscales_where_it_is_asked_to():
    """Also fp16 gradients, which a scaler itself refuses, with torch's optimizers too."""
    found, other, expected = (
        FusedAdam(parameters([(8, 8)], FP16), lr=0.01, dtype=FP32) for _ in range(3)
    )
    for refused in (other, torchs(parameters([(8, 8)], FP16))):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaled_twice(refused)
    found.step_unscales = True
    scaled_twice(found)
    for index, param in enumerate(params_of(expected)):
        param.grad = values(param.shape, index).to(FP16)
    expected.step()
    assert_same(snapshot(found), snapshot(expected))


def test_copies_unscale_as_the_optimizer_does():
    optimizer = FusedAdam(parameters([(8, 8)], FP16), dtype=FP32)
    optimizer.step_unscales = True
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.step_unscales
        scaled_twice(twin)
        assert twin.param_groups[0]["step"] == 1


# --- Lightning


@functools.cache
def trained(make, precision, clipping):
    """What a Lightning Trainer's run leaves: scale, lr, step counts and weights of each step."""
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
            self.left_out, self.lrs = [], []

        def configure_optimizers(self):
            optimizer = make(self.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            interval = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": interval}

        def training_step(self, batch, index):
            self.before = [param.detach().clone() for param in self.parameters()]
            factor = EACH_STEP[index] if precision == "16-mixed" else 1.0
            return self.layers(batch).float().square().mean() * factor

        def on_train_batch_end(self, *_):
            pairs = zip(self.before, self.parameters(), strict=True)
            self.left_out.append(all(torch.equal(old, new) for old, new in pairs))
            self.lrs.append(float(self.optimizers().param_groups[0]["lr"]))

    torch.manual_seed(1)
    data = torch.utils.data.DataLoader([torch.randn(8) for _ in range(16)], batch_size=4)
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    # with a name alone Lightning takes bf16 on a CPU
    plugin = MixedPrecision(precision, "cpu", scaler)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about this small run
        trainer = lightning.Trainer(
            accelerator="cpu",
            plugins=[plugin],
            max_epochs=1,
            gradient_clip_val=0.05,
            gradient_clip_algorithm=clipping,
            **dict.fromkeys(quiet, False),
        )
        trainer.fit(model, data)
    scale = None if scaler is None else scaler.get_scale()
    return model, (model.left_out, [lr / model.lrs[0] for lr in model.lrs], scale)


@pytest.mark.skipif(not has("lightning"), reason="needs lightning")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clipping", ["norm", "value"])
@each_kind
@pytest.mark.sample(13)
def test_lightning_clips_and_leaves_out_what_it_does_of_torchs(kind, clipping, precision):
    _, expected = trained(torchs, precision, clipping)
    _, found = trained(functools.partial(made, kind), precision, clipping)
    assert found == expected
    assert any(expected[0]) == (precision == "16-mixed")


def plain_loop(clipping):
    """Lightning's 16-mixed run by hand, with the scaler's own functions."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer, scaler = made("adam", layers.parameters()), torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(1)
    rows = [torch.randn(8) for _ in range(16)]
    for step, factor in enumerate(EACH_STEP):
        with torch.autocast("cpu", FP16, cache_enabled=False):
            batch = torch.stack(rows[4 * step : 4 * step + 4])
            loss = layers(batch).float().square().mean() * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clipping == "norm":
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.05)
        else:
            torch.nn.utils.clip_grad_value_(layers.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return layers


@pytest.mark.skipif(not has("lightning"), reason="needs lightning")
@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_lightning_has_the_bits_of_a_plain_loop_under_a_scaler(clipping):
    model, _ = trained(functools.partial(made, "adam"), "16-mixed", clipping)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule before a step, which the scaler left out
        expected = plain_loop(clipping)
    assert_same(dict(model.layers.state_dict()), dict(expected.state_dict()))


@pytest.mark.skipif(not has("lightning"), reason="needs lightning")
def test_fabric_clips_under_a_scaler():
    import lightning
    from lightning.fabric.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    layer = torch.nn.Linear(8, 4)
    model, optimizer = fabric.setup(layer, made("adam", layer.parameters()))
    fabric.backward(model(torch.ones(2, 8)).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=0.5) > 0.5
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


# --- Accelerate


def accelerated(make):
    """Whether Accelerate says of each step that it was skipped, and by what lr has changed."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # as with "fp16" on a GPU
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    seen = []
    for factor in EACH_STEP:
        accelerator.backward(model(torch.ones(2, 8)).square().mean() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append((optimizer.step_was_skipped, float(optimizer.param_groups[0]["lr"])))
    return [(skipped, lr / seen[0][1]) for skipped, lr in seen]


@pytest.mark.skipif(not has("accelerate"), reason="needs accelerate")
@each_kind
def test_accelerate_sees_a_skipped_step_and_stops_the_schedule(kind):
    expected = accelerated(torchs)
    assert [skipped for skipped, _ in expected] == [False, True, False, False]
    assert accelerated(functools.partial(made, kind)) == expected
