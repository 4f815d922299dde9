"""Weights in fp8: training as with bf16 weights that are cast, and their scales."""

import copy
from contextlib import nullcontext

import pytest
import torch
from bits import assert_same_bits
from float8_models import BF16, FP32, model, parts
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megaopt
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight, scaled_matmul, update_scales
from megaopt.kernels.float8 import dequantize_reference, quantize_reference

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Rounded(torch.autograd.Function):
    """A bf16 weight cast to fp8 and back in the forward pass; its gradient goes past that."""

    @staticmethod
    def forward(ctx, weight, recipe, scale):
        made = quantize_reference(weight, recipe, weight.dtype, scale)
        return dequantize_reference(made.codes, made.scale_inv, recipe, weight.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class CastLinear(nn.Module):
    """A bf16 weight that is cast to fp8 at every use."""

    def __init__(self, linear, recipe, scale):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.recipe, self.scale = recipe, scale

    def forward(self, x):
        weight = Rounded.apply(self.weight, self.recipe, self.scale)
        return functional.linear(x, weight, self.bias)


def cast_model(plain, float8):
    """The bf16 twin of a model with fp8 weights, its scales with it."""
    layers = []
    for own, other in zip(plain, float8, strict=True):
        if isinstance(getattr(other, "weight", None), Float8Weight):
            own = CastLinear(own, other.weight.recipe, other.weight.scale)
        layers.append(own)
    return nn.Sequential(*layers)


def gradients(net, x, around=nullcontext):
    """The output, the input's gradient and those of all parameters; the forward pass `around`."""
    x = x.detach().requires_grad_()
    with around():
        out = net(x)
    out.float().square().sum().backward()
    found = {"out": out.detach(), "input": x.grad}
    for name, param in net.named_parameters():
        found[name], param.grad = param.grad, None
    return found


def assert_same_training(float8, cast, x, around=nullcontext):
    found, expected = gradients(float8, x, around), gradients(cast, x, around)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor
        assert_same_bits(found[name], tensor, name)
    return expected


INPUTS = {
    "rows": lambda dtype: torch.randn(7, 48).to(dtype),
    "one": lambda dtype: torch.randn(48).to(dtype),
    "batches": lambda dtype: torch.randn(2, 3, 48).to(dtype),
    "transposed": lambda dtype: torch.randn(48, 7).to(dtype).t(),
    "strided": lambda dtype: torch.randn(3, 2, 96).to(dtype)[..., ::2].transpose(0, 1),
    "none": lambda dtype: torch.randn(0, 48).to(dtype),
}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@every_recipe
@pytest.mark.sample(2)
def test_training_is_that_of_weights_cast_in_the_forward_pass(recipe, make, dtype):
    """Every bit of the output and of all gradients, over steps of plain SGD on masters."""
    plain = model(dtype)
    float8 = megaopt.to_float8(copy.deepcopy(plain), recipe)
    assert [type(m.weight) is Float8Weight for m in float8 if hasattr(m, "weight")] == [
        True, True, False,
    ]  # fmt: skip
    cast, x = cast_model(plain, float8), make(dtype)
    for _ in range(3):
        grads = assert_same_training(float8, cast, x)
        with torch.no_grad():
            for (name, own), weight in zip(
                cast.named_parameters(), float8.parameters(), strict=True
            ):
                own -= 0.01 * grads[name]
                weight.copy_(own)
                if recipe.scaling == "delayed" and type(weight) is Float8Weight:
                    update_scales(weight)
                    weight.quantize_(own)


@every_recipe
def test_a_step_changes_the_output(recipe):
    """The comparison above would not notice a weight that never moves in both."""
    net, x = megaopt.to_float8(model(), recipe), torch.randn(4, 48).bfloat16()
    before = net(x)
    net[0].weight.quantize_(net[0].weight.dequantize() * 1.5)
    assert not torch.equal(net(x), before)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_autocast(dtype):
    plain = model(dtype)
    float8 = megaopt.to_float8(copy.deepcopy(plain), "current")
    x = torch.randn(5, 48).to(dtype)
    cast = cast_model(plain, float8)
    assert_same_training(float8, cast, x, lambda: torch.autocast("cpu", dtype=BF16))


def test_checkpointed_activations():
    plain = model()
    float8 = megaopt.to_float8(copy.deepcopy(plain), "block_128x128")
    cast, x = cast_model(plain, float8), torch.randn(5, 48).bfloat16()
    expected = gradients(cast, x)
    own = x.detach().requires_grad_()
    checkpoint(float8, own, use_reentrant=False).float().square().sum().backward()
    assert_same_bits(own.grad, expected["input"])
    assert_same_bits(float8[0].weight.grad, expected["0.weight"])


def test_the_backward_pass_keeps_codes_and_not_values():
    """One byte a weight between the passes: what was saved is the parameter itself."""
    net, saved = megaopt.to_float8(model(), "current"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        net[0](torch.randn(3, 48).bfloat16())
    assert [type(tensor) for tensor in saved] == [torch.Tensor, Float8Weight]


def test_a_weight_changed_between_the_passes_is_an_error():
    weight = megaopt.to_float8(model(), "current")[0].weight
    out = functional.linear(torch.randn(3, 48).bfloat16(), weight)
    weight.quantize_(torch.zeros(160, 48))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_through_other_operations():
    """Not F.linear, but the transpose and a product: the dequantized values, a plain gradient."""
    weight = megaopt.to_float8(model(), "mxfp8")[0].weight
    dense = weight.dequantize().requires_grad_()
    x = torch.randn(3, 48).bfloat16()
    found, expected = (x @ w.t() * 2 + w.sum() for w in (weight, dense))
    assert_same_bits(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert_same_bits(weight.grad, dense.grad)


def test_a_compiled_model_has_the_same_bits():
    net, x = megaopt.to_float8(model(), "block_128x128"), torch.randn(5, 48).bfloat16()
    expected, found = gradients(net, x), gradients(torch.compile(net, backend="aot_eager"), x)
    for (name, tensor), other in zip(expected.items(), found.values(), strict=True):
        assert_same_bits(other, tensor, name)


# --- scaled products


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_scaled_products_quantize_the_input(scaling):
    net = megaopt.to_float8(model(), scaling)[0]
    x = torch.randn(2, 5, 48).bfloat16().requires_grad_()
    with scaled_matmul():
        found = net(x)
    made = quantize_reference(x.detach(), RECIPES["current"], BF16)
    near = dequantize_reference(made.codes, made.scale_inv, RECIPES["current"], BF16)
    near.requires_grad_()
    expected = net(near)
    assert_same_bits(found, expected)
    assert not torch.equal(found, net(x))
    grads = [torch.autograd.grad(out.sum(), [inp, net.weight, net.bias])
             for out, inp in ((found, x), (expected, near))]  # fmt: skip
    for own, other in zip(*grads, strict=True):
        assert_same_bits(own, other)


def test_block_scales_multiply_as_ever():
    net, x = megaopt.to_float8(model(), "mxfp8")[0], torch.randn(5, 48).bfloat16()
    with scaled_matmul():
        found = net(x)
        with scaled_matmul(False):
            assert_same_bits(found, net(x))


@pytest.mark.gpu
def test_scaled_products_on_the_gpu_are_near_their_emulation():
    """Products of codes are exact in fp32; a sum of k of them has at most k roundings each way.

    Hopper keeps 14 bits of a sum's aligned products, so 2**-13 of the largest for each of k.
    """
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 products here")
    net = megaopt.to_float8(model().cuda(), "current")[0]
    x = torch.randn(64, 48, device="cuda").bfloat16()
    with scaled_matmul():
        found = net(x).float()
    made = quantize_reference(x, RECIPES["current"], BF16)
    near = made.codes.double() * made.scale_inv.double()
    weight = net.weight.data8.double() * net.weight.scale_inv.double()
    exact = near @ weight.t() + net.bias.double()
    size = near.abs() @ weight.abs().t() + net.bias.double().abs()
    assert bool(((found - exact).abs() <= size * 48 * 2.0**-13 + exact.abs() * 2.0**-8).all())


# --- delayed scaling


def delayed(history, algo="max", margin=0):
    recipe = Float8Recipe(
        "delayed", amax_history_len=len(history), amax_compute_algo=algo, margin=margin
    )
    weight = Float8Weight.from_values(torch.ones(2, 2, dtype=BF16), recipe)
    weight.scale.fill_(3.0)
    weight.amax_history.copy_(torch.tensor(history))
    return weight


@pytest.mark.parametrize(
    ("history", "algo", "margin", "scale", "after"),
    [
        ([2.0, 7.0, 1.0], "max", 0, 64.0, [0.0, 1.0, 2.0]),
        ([2.0, 7.0, 1.0], "most_recent", 0, 224.0, [0.0, 1.0, 2.0]),
        ([2.0, 7.0, 1.0], "max", 2, 16.0, [0.0, 1.0, 2.0]),
        ([2.0, 7.0, 1.0], "max", -1, 128.0, [0.0, 1.0, 2.0]),
        ([0.0, 0.0], "max", 0, 3.0, [0.0, 0.0]),
        ([0.0, 7.0], "most_recent", 0, 3.0, [0.0, 0.0]),
        ([torch.inf, 7.0], "max", 0, 3.0, [0.0, torch.inf]),
        ([torch.nan, 7.0], "max", 0, 64.0, [0.0, torch.nan]),
        ([torch.nan, 7.0], "most_recent", 0, 3.0, [0.0, torch.nan]),
        ([7.0], "max", 0, 64.0, [0.0]),
        ([2.0**-140], "max", 0, 3.4028234663852886e38, [0.0]),
    ],
)
def test_update_scales(history, algo, margin, scale, after):
    """TransformerEngine's rules, by hand: the history rolls, its first is the amax since."""
    weight = delayed(history, algo, margin)
    before = parts(weight)
    update_scales(weight)
    assert_same_bits(weight.scale, torch.tensor([scale]))
    assert_same_bits(weight.amax_history, torch.tensor(after))
    assert_same_bits(weight.data8, before["data8"])
    assert_same_bits(weight.scale_inv, before["scale_inv"])


def test_update_scales_needs_delayed_scaling():
    weight = Float8Weight.from_values(torch.ones(2, 2), "current")
    with pytest.raises(ValueError, match="scaling must be 'delayed', got 'current'"):
        update_scales(weight)


def test_delayed_scaling_uses_the_scale_there_is():
    weight = delayed([0.0, 0.0])
    weight.quantize_(torch.tensor([[1.0, -2.0], [0.5, 0.0]]))
    assert weight.data8.float().tolist() == [[3.0, -6.0], [1.5, 0.0]]
    assert_same_bits(weight.scale_inv, torch.ones(1) / torch.full((1,), 3.0))
    weight.quantize_(torch.full((2, 2), 0.25))
    assert weight.amax_history.tolist() == [2.0, 0.0]  # of both since the update
    assert_same_bits(weight.latest_amax, torch.tensor([2.0]))
    update_scales(weight)
    assert weight.scale.item() == 224.0


def test_the_first_scale_of_delayed_scaling_is_that_of_the_values():
    values = torch.randn(16, 16).bfloat16()
    found = Float8Weight.from_values(values, Float8Recipe("delayed", margin=3))
    amax = values.float().abs().max()
    assert_same_bits(found.scale, (torch.full((), 56.0) / amax).reshape(1))
    assert_same_bits(found.latest_amax, amax.reshape(1))
    assert int(found.amax_history.count_nonzero()) == 1
