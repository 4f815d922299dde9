"""fp8 weights against TransformerEngine itself: its optimizer, its quantize_master_weights."""

import pytest
import torch
from bits import assert_same_bits
from one_rank import group_of_one

from megaopt import FusedAdam
from megaopt.integration.transformer_engine import FusedAdam as DropIn

pytestmark = pytest.mark.gpu

OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
LAYERS = ((256, 384), (384, 256), (256, 128))
STEPS = 100
BUFFERS = (
    "_data", "_scale_inv",
    "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv",
)  # fmt: skip


@pytest.fixture(scope="module")
def te(tmp_path_factory):
    """transformer_engine.pytorch, in a process group of one rank."""
    module = pytest.importorskip(
        "transformer_engine.pytorch", reason="needs TransformerEngine", exc_type=ImportError
    )
    with group_of_one("nccl", tmp_path_factory.mktemp("group")):
        yield module


def recipe_of(name):
    from transformer_engine.common import recipe

    return {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "blocks": recipe.Float8BlockScaling,
    }[name]()


def model_of(te, recipe):
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=recipe):
        layers = [te.Linear(*sizes, params_dtype=torch.bfloat16, device="cuda") for sizes in LAYERS]
    return torch.nn.Sequential(*layers)


def buffers_of(weight):
    """The codes and scales, without the padding of scales."""
    found = {}
    for name in BUFFERS:
        tensor = getattr(weight, name, None)
        if tensor is None:
            continue
        if name.endswith("scale_inv") and tensor.dim() == 2:
            rows, columns = weight.shape
            if weight._rowwise_scale_inv.dtype != torch.uint8:
                along = (-(-rows // 128), -(-columns // 128))
            elif name.startswith("_row"):
                along = (rows, -(-columns // 32))
            else:
                along = (-(-rows // 32), columns)
            tensor = tensor[: along[0], : along[1]]
        found[name] = tensor.clone()
    return found


def trained(te, name, make, after_step):
    """Losses, codes and masters of a model of te.Linear layers, of every tenth step."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    recipe = recipe_of(name)
    model = model_of(te, recipe)
    optimizer = make(model.parameters(), **OPTIONS, master_weights=True)
    generator = torch.Generator("cuda").manual_seed(1)
    result = []
    for step in range(STEPS):
        inputs = torch.randn(64, LAYERS[0][0], device="cuda", generator=generator).bfloat16()
        target = torch.randn(64, LAYERS[-1][1], device="cuda", generator=generator)
        with te.autocast(enabled=True, recipe=recipe):
            output = model(inputs)
        loss = (output.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        seen = {"loss": loss.detach()}
        if step % 10 == 9:
            for index, param in enumerate(model.parameters()):
                if hasattr(param, "_quantizer"):
                    kept = {k: v for k, v in buffers_of(param).items() if "column" not in k}
                    if name == "delayed":
                        kept["amax"] = param._quantizer.amax.clone()
                    seen |= {f"{index}{key}": value for key, value in kept.items()}
                seen[f"{index} master"] = optimizer.state[param]["master_param"].clone()
        result.append(seen)
    return result


def forget_transposes(model):
    """TransformerEngine's fused fp8 step leaves transposes of the old codes valid."""
    for param in model.parameters():
        if hasattr(param, "_reset_caches"):
            param._reset_caches()


@pytest.mark.parametrize("name", ["delayed", "current", "blocks"])
def test_training_is_that_of_transformer_engines_optimizer(te, name):
    """A hundred steps: every loss; codes, scale_inv, amaxes and masters at every tenth."""
    theirs = trained(te, name, te.optimizers.FusedAdam, forget_transposes)
    ours = trained(te, name, DropIn, lambda model: None)
    assert len({step["loss"].item() for step in ours}) > STEPS // 2
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.keys() == other.keys()
        for key, value in own.items():
            assert_same_bits(value, other[key], f"step {step}: {key}")


def test_transposes_are_not_left_stale(te):
    """After a step and a forward and backward pass, the transpose is that of the new codes."""
    recipe = recipe_of("delayed")
    model = model_of(te, recipe)
    optimizer = DropIn(model.parameters(), **OPTIONS, master_weights=True)
    inputs = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=recipe):
            output = model(inputs)
        output.float().square().sum().backward()
        for layer in model:
            weight = layer.weight
            assert_same_bits(weight._transpose, weight._data.t().contiguous())
        optimizer.step()


SHAPES = ((384, 256), (160, 416), (32, 32), (128, 1024))


def quantizers(te):
    import transformer_engine_torch as tex

    e4m3 = tex.DType.kFloat8E4M3

    def current(dtype, **options):
        return te.Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **options)

    def blocks(dtype, **options):
        options = {"rowwise": True, "columnwise": True, "block_scaling_dim": 2, **options}
        return te.Float8BlockQuantizer(dtype, **options)

    def delayed(dtype):
        scale = torch.full((1,), 900.0, device="cuda")
        return te.Float8Quantizer(scale, torch.zeros(1, device="cuda"), dtype)

    return {
        "delayed": lambda: delayed(e4m3),
        "current": lambda: current(e4m3),
        "current, powers of two": lambda: current(
            e4m3, force_pow_2_scales=True, amax_epsilon=2.0**-6
        ),
        "blocks": lambda: blocks(e4m3),
        "blocks, any scale": lambda: blocks(e4m3, force_pow_2_scales=False, amax_epsilon=2.0**-4),
        "mxfp8": lambda: te.MXFP8Quantizer(e4m3),
    }


NAMES = (
    "delayed", "current", "current, powers of two", "blocks", "blocks, any scale", "mxfp8",
)  # fmt: skip


def empty(quantizer, shape):
    """A tensor of TransformerEngine's, codes 0."""
    made = quantizer.make_empty(shape, dtype=torch.bfloat16, device="cuda")
    for name in BUFFERS:
        if getattr(made, name, None) is not None:
            getattr(made, name).zero_()
    return made


@pytest.mark.parametrize("contract", ["ieee", "te"])
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_are_those_of_quantize_master_weights(te, name, contract):
    """On the masters of our step, whatever its contract."""
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    make = quantizers(te)[name]
    theirs = [empty(make(), shape) for shape in SHAPES]
    weights = [torch.nn.Parameter(empty(make(), shape)) for shape in SHAPES]
    optimizer = FusedAdam(weights, **OPTIONS, dtype=torch.float32, contract=contract)
    generator = torch.Generator("cuda").manual_seed(2)
    for weight in weights:
        values = torch.randn(weight.shape, device="cuda", generator=generator) * 0.05
        values[0] *= 2.0**-20  # blocks of small numbers
        optimizer.set_scaled_state(weight, "master_param", values)
    for step in range(5):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, device="cuda", generator=generator).bfloat16()
        optimizer.step()
        masters = [optimizer.state[weight]["master_param"].view(-1) for weight in weights]
        offsets = [0] * len(weights)
        quantize_master_weights(theirs, masters, offsets, torch.distributed.group.WORLD)
        for index, (weight, other) in enumerate(zip(weights, theirs, strict=True)):
            expected = buffers_of(other)
            found = buffers_of(weight)
            assert found.keys() == expected.keys()
            for key, value in found.items():
                assert_same_bits(value, expected[key], f"step {step}, weight {index}, {key}")
            if "delayed" in name:
                assert_same_bits(weight._quantizer.amax, other._quantizer.amax)
