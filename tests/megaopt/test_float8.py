"""Weights in fp8: training as with bf16 weights that are cast; saved, copied, refused."""

import copy
import dataclasses
import gc
import io
import pickle
import re
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from bits import assert_same_bits
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megaopt
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight, scaled_matmul, update_scales
from megaopt.kernels.float8 import dequantize_reference, quantize_reference

BF16, FP32 = torch.bfloat16, torch.float32
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def model(dtype=BF16, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 64, bias=False), nn.Linear(64, 10)]
    return nn.Sequential(*layers).to(dtype)


def parts(weight):
    return {name: tensor.clone() for name, tensor in weight.tensors().items()}


def assert_same_parts(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)


def assert_same_weight(found, expected):
    """Codes and all that goes with them, in tensors of their own or not."""
    assert type(found) is type(expected) is Float8Weight
    for name in ("recipe", "dtype", "shape", "requires_grad", "device"):
        assert getattr(found, name) == getattr(expected, name), name
    assert isinstance(found, nn.Parameter) == isinstance(expected, nn.Parameter)
    assert_same_parts(parts(found), parts(expected))


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
    float8 = megaopt.to_float8(copy.deepcopy(plain), "block_1x128")
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
    with pytest.raises(ValueError, match="scaling='current' is not allowed: only 'delayed'"):
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


# --- saved, loaded, copied


def awkward(recipe):
    """A model whose scales are not those that its values would give now."""
    net = megaopt.to_float8(model(), recipe)
    weight = net[0].weight
    if recipe.scaling == "delayed":
        weight.scale.fill_(0.3)
        weight.amax_history.copy_(torch.rand(1024))
    elif recipe.scaling == "mxfp8":
        weight.scale_inv += 1
    else:
        weight.scale_inv *= 1.7
    weight.data8.view(torch.uint8)[0, 0] = 0xFF  # a NaN that no encoder writes
    net[2].weight.requires_grad_(False)
    return net


@every_recipe
def test_a_state_dict_keeps_every_bit(recipe):
    net = awkward(recipe)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for assign in (False, True):
        other = megaopt.to_float8(model(seed=1), recipe)
        other.load_state_dict(saved, strict=True, assign=assign)
        for index in (0, 2):
            assert_same_parts(parts(other[index].weight), parts(net[index].weight))
        assert isinstance(other[0].weight, nn.Parameter)
        assert other[0].weight.requires_grad
    x = torch.randn(3, 48).bfloat16()
    assert_same_bits(other(x), net(x))


@every_recipe
def test_copies_keep_every_bit_and_share_nothing(recipe):
    net = awkward(recipe)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(net),
        "pickle": pickle.loads(pickle.dumps(net)),
        "torch.save": torch.load(file, weights_only=False),
    }
    for other in copies.values():
        for index in (0, 2):
            own, theirs = net[index].weight, other[index].weight
            assert_same_weight(theirs, own)
            before = parts(own)
            theirs.quantize_(torch.randn(own.shape))
            assert_same_parts(parts(own), before)


def test_a_checkpoint_of_megaopt_takes_it(tmp_path):
    from megaopt import checkpoint as checkpoints

    net = awkward(RECIPES["delayed"])
    checkpoints.save(tmp_path / "c.pt", {"model": net.state_dict()})
    found = checkpoints.load(tmp_path / "c.pt")["model"]["0.weight"]
    assert_same_parts(parts(found), parts(net[0].weight))


def test_a_file_is_read_in_a_process_that_has_only_imported_the_package(tmp_path):
    net = awkward(RECIPES["mxfp8"])
    torch.save(net.state_dict(), tmp_path / "s.pt")
    code = (
        "import sys, torch, megaopt.float8\n"
        "weight = torch.load(sys.argv[1], weights_only=True)['0.weight']\n"
        "print(int(weight.data8.view(torch.uint8).int().sum()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == int(net[0].weight.data8.view(torch.uint8).int().sum())


def test_a_plain_model_loads_the_dequantized_values():
    net, plain = megaopt.to_float8(model(), "current"), model(seed=1)
    plain.load_state_dict(net.state_dict(), strict=True)
    assert type(plain[0].weight) is nn.Parameter
    assert_same_bits(plain[0].weight.detach(), net[0].weight.dequantize())


def test_a_float8_model_quantizes_plain_values():
    net, plain = megaopt.to_float8(model(), "current"), model(seed=1)
    net.load_state_dict(plain.state_dict(), strict=True)
    assert_same_parts(
        parts(net[0].weight), parts(Float8Weight.from_values(plain[0].weight, "current"))
    )


def test_a_state_of_another_recipe_is_refused():
    net, other = (megaopt.to_float8(model(), name) for name in ("current", "block_1x128"))
    before = parts(net[0].weight)
    with pytest.raises(RuntimeError, match="its codes would be others"):
        net.load_state_dict(other.state_dict())
    assert_same_parts(parts(net[0].weight), before)


def test_tied_weights_stay_tied_in_copies():
    net = model()
    net[2] = nn.Linear(48, 160, bias=False)
    net[2].weight = net[0].weight
    net = megaopt.to_float8(net, "current")
    assert net[2].weight is net[0].weight
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other[2].weight is other[0].weight


def test_moving_to_another_device():
    net = megaopt.to_float8(model(), "delayed")
    moved = copy.deepcopy(net).to("meta")
    for name, tensor in moved[0].weight.tensors().items():
        assert tensor.is_meta, name
    assert isinstance(moved[0].weight, nn.Parameter)
    assert type(moved[0].weight) is Float8Weight
    assert moved(torch.ones(3, 48, dtype=BF16, device="meta")).shape == (3, 10)


def test_a_compiled_model_has_the_same_bits():
    net, x = megaopt.to_float8(model(), "block_128x128"), torch.randn(5, 48).bfloat16()
    expected, found = gradients(net, x), gradients(torch.compile(net, backend="aot_eager"), x)
    for (name, tensor), other in zip(expected.items(), found.values(), strict=True):
        assert_same_bits(other, tensor, name)


@pytest.mark.gpu
@every_recipe
def test_there_and_back_again(recipe):
    net = awkward(recipe)
    before, values = parts(net[0].weight), net[0].weight.dequantize()
    there = net.cuda()
    assert_same_bits(there[0].weight.dequantize().cpu(), values)
    for name, tensor in there[0].weight.tensors().items():
        assert tensor.is_cuda, name
    assert_same_parts(parts(there.cpu()[0].weight), before)


def test_shared_memory():
    net = megaopt.to_float8(model(), "current").share_memory()
    assert all(tensor.is_shared() for tensor in net[0].weight.tensors().values())


# --- the initial value


def test_the_initial_value_stays_until_it_is_dropped():
    plain = model(FP32)
    net = megaopt.to_float8(copy.deepcopy(plain), Float8Recipe("current"))
    weight = net[0].weight
    for place in (weight, weight.detach(), copy.deepcopy(net)[0].weight, weight.data):
        assert_same_bits(place.high_precision_initial_value(), plain[0].weight.detach())
    gone = weakref.ref(weight.high_precision_initial_value())
    weight.detach().drop_high_precision_initial_value()
    assert weight.high_precision_initial_value() is None
    gc.collect()
    assert gone() is None  # freed


@pytest.mark.parametrize("change", ["quantize_", "copy_ plain", "copy_ fp8", "load_state_dict"])
def test_the_initial_value_goes_when_the_weight_changes(change):
    """A master made of it would bring the old weight back."""
    net, other = (megaopt.to_float8(model(seed=seed), "current") for seed in (0, 1))
    weight = net[0].weight
    with torch.no_grad():
        {
            "quantize_": lambda: weight.quantize_(torch.zeros(160, 48)),
            "copy_ plain": lambda: weight.copy_(torch.zeros(160, 48)),
            "copy_ fp8": lambda: weight.copy_(other[0].weight),
            "load_state_dict": lambda: net.load_state_dict(other.state_dict()),
        }[change]()
    assert weight.high_precision_initial_value() is None


# --- as a tensor


def test_what_operations_return():
    weight = Float8Weight.from_values(torch.randn(32, 48).bfloat16(), "block_128x128")
    dense = weight.dequantize()
    for name, operation in {
        "plus": lambda w: w + 1,
        "norm": lambda w: w.float().norm(),
        "view": lambda w: w.view(-1),
        "t": lambda w: w.t().contiguous(),
        "cat": lambda w: torch.cat([w, w]),
        "foreach": lambda w: torch._foreach_mul([w, w], 2.0)[1],
        "index": lambda w: w[3, ::2].contiguous(),
        "zeros_like": torch.zeros_like,
        "full_like": lambda w: torch.full_like(w, 3.0),
        "to": lambda w: w.to(FP32),
        "new_ones": lambda w: w.new_ones(3),
    }.items():
        found = operation(weight)
        assert type(found) is torch.Tensor, name
        assert_same_bits(found, operation(dense), name)
    empty = torch.empty_like(weight)
    assert (type(empty), empty.shape, empty.dtype) == (torch.Tensor, weight.shape, BF16)
    for same in (weight.detach(), weight.clone(), weight.data):
        assert_same_weight(same, weight)
    assert weight.detach().data8 is weight.data8
    assert weight.clone().data8.data_ptr() != weight.data8.data_ptr()


IN_PLACE = {
    "add_": lambda w: w.add_(1),
    "data": lambda w: w.data.mul_(2),
    "zero_": lambda w: w.zero_(),
    "item": lambda w: w.__setitem__(0, 1.0),
    "out": lambda w: torch.add(torch.ones(160, 48), 1, out=w.detach()),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "init": lambda w: nn.init.normal_(w),
    "data=": lambda w: setattr(w, "data", torch.zeros(160, 48).bfloat16()),
    "data_ptr": lambda w: w.data_ptr(),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_operations_in_place_are_refused(change):
    weight = megaopt.to_float8(model(), "current")[0].weight
    before = parts(weight)
    with torch.no_grad(), pytest.raises(TypeError, match="Float8Weight"):
        change(weight)
    assert_same_parts(parts(weight), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
    ids=["sgd", "sgd foreach", "adamw", "adamw foreach", "adamw fused"],
)
def test_other_optimizers_are_refused(make):
    net = megaopt.to_float8(model(), "current")
    before = parts(net[0].weight)
    optimizer = make(net.parameters())
    net(torch.randn(3, 48).bfloat16()).sum().backward()
    with pytest.raises(
        TypeError, match=r"in place on a Float8Weight .* an optimizer must know fp8"
    ):
        optimizer.step()
    assert_same_parts(parts(net[0].weight), before)


def test_another_dtype_of_the_module_is_refused():
    net = megaopt.to_float8(model(), "current")
    with pytest.raises(TypeError, match="nor is another dtype for its module"):
        net.float()
    net.to(BF16)


def test_quantize_refuses_before_it_changes():
    weight = Float8Weight.from_values(torch.ones(3, 4), "delayed")
    before = parts(weight)
    for values in (torch.ones(4, 3), torch.ones(3, 4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"not allowed: shape \(3, 4\), a floating dtype"):
            weight.quantize_(values)
    assert_same_parts(parts(weight), before)


def test_parts_that_do_not_fit_are_refused():
    weight = Float8Weight.from_values(torch.ones(40, 40), "mxfp8")
    recipe = dataclasses.replace(weight.recipe, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=re.escape("data8 (torch.float8_e4m3fn, (40, 40)) is not")):
        Float8Weight(weight.data8, weight.scale_inv, None, None, recipe)
    with pytest.raises(ValueError, match=r"scale_inv .* is not allowed with scaling='current'"):
        Float8Weight(weight.data8, weight.scale_inv, None, None, RECIPES["current"])
    with pytest.raises(ValueError, match=r"scale None is not allowed with scaling='delayed'"):
        Float8Weight(weight.data8, torch.ones(1), None, None, RECIPES["delayed"])


# --- to_float8


def test_which_weights_become_fp8():
    net = nn.ModuleDict(
        {
            "fits": nn.Linear(32, 48), "odd": nn.Linear(30, 48), "table": nn.Embedding(32, 48),
            "norm": nn.LayerNorm(32),
        }
    ).to(BF16)  # fmt: skip
    kept = {name: param for name, param in net.named_parameters() if name != "fits.weight"}
    assert megaopt.to_float8(net, "current") is net
    assert type(net["fits"].weight) is Float8Weight
    assert all(net.get_parameter(name) is param for name, param in kept.items())
    megaopt.to_float8(net, "mxfp8", filter=lambda name, layer: name in ("odd", "fits"))
    assert net["odd"].weight.recipe.scaling == "mxfp8"
    assert net["fits"].weight.recipe.scaling == "current"  # it was fp8 already


def test_a_parameter_keeps_what_it_was_marked_with():
    net = nn.Linear(16, 16)
    net.weight.requires_grad_(False)
    net.weight.tensor_model_parallel = True
    megaopt.to_float8(net, "current")
    assert net.weight.tensor_model_parallel
    assert not net.weight.requires_grad
    assert net.weight.dtype == FP32


def test_to_float8_refuses_before_it_changes():
    net = nn.ModuleDict({"table": nn.Embedding(32, 48), "head": nn.Linear(48, 32, bias=False)})
    net["head"].weight = net["table"].weight
    with pytest.raises(ValueError, match=r"the weight of 'head' .* also 'weight' of 'table'"):
        megaopt.to_float8(net, "current")
    assert type(net["head"].weight) is nn.Parameter
    with pytest.raises(ValueError, match="recipe='fp8' is not allowed: one of delayed, current"):
        megaopt.to_float8(net, "fp8")
    with pytest.raises(TypeError, match="recipe=None is not allowed"):
        megaopt.to_float8(net, None)
    double = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).double())
    with pytest.raises(ValueError, match=r"values torch.float64 is not allowed"):
        megaopt.to_float8(double, "current")
    assert type(double[0].weight) is nn.Parameter
