"""Models become 16-bit in place, but for what is kept, and masters keep what the cast drops."""

import copy
import pickle

import pytest
import torch
from bits import assert_same_bits
from fsdp2_ranks import mesh_of, perceptron, whole
from runs import BF16, FP16, FP32, assert_same, values
from torch import nn
from torch.distributed.fsdp import fully_shard

import megaopt
from megaopt import FusedAdam, FusedSGD, cast_model


def cast(options):
    """What is left of fp32 weights when a sharded model is cast, and what they were."""
    model = perceptron(FP32)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=mesh_of())
    params = list(model.parameters())
    optimizer = FusedAdam(params, **options)
    megaopt.cast_model(model, BF16, optimizer=optimizer)
    same_objects = all(a is b for a, b in zip(model.parameters(), params, strict=True))
    found = megaopt.get_fp32_model_state_dict(model, optimizer)
    model(values((4, 6), 0, BF16)).float().sum().backward()
    return same_objects, list({param.dtype for param in params}), whole(dict(found)), expected


FP32_MASTERS = {"master_weights": True}
REMAINDERS = {"master_weights": True, "master_weight_dtype": "remainder16"}
FORMATS = {
    "fp32": FP32_MASTERS,
    "remainder16": REMAINDERS,
    "scaled fp16": {"master_weights": True, "master_weight_dtype": FP16},
    **{
        name: {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8", "remainder8_stochastic", "kahan")
    },
}


class HouseRMSNorm(nn.Module):
    """As model libraries write their own."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.seen = None

    def forward(self, x):
        self.seen = x.dtype
        return x * x.pow(2).mean(-1, keepdim=True).rsqrt() * self.weight


class PreNorm(nn.Module):
    """Its name ends in Norm, and it holds a whole block."""

    def __init__(self, size):
        super().__init__()
        self.norm = HouseRMSNorm(size)
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([PreNorm(8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))])
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", values((3,), 99))
        self.twin = nn.Module()
        self.twin.register_buffer("table", self.table)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("spectrum", torch.ones(2, dtype=torch.complex64))
        for index, param in enumerate(self.parameters()):
            param.data = values(param.shape, seed + index)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.batch(x))


KEPT = {
    "blocks.0.norm.weight",
    "blocks.1.0.weight",
    "blocks.1.0.bias",
    *(f"batch.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
    *("batch.num_batches_tracked", "count", "spectrum"),
}
TOKENS = torch.tensor([0, 3, 6, 2])


def dtypes(model, dtype):
    return {name for name, value in model.state_dict().items() if value.dtype != dtype}


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_everything_is_cast_but_norms(dtype):
    model, whole = Model(), Model()
    objects = dict(model.named_parameters())
    assert cast_model(model, dtype) is model
    assert dtypes(model, dtype) == KEPT
    for name, value in model.state_dict().items():
        expected = whole.state_dict()[name]
        assert_same_bits(value, expected if name in KEPT else expected.to(dtype), name)
    for name, param in model.named_parameters():
        assert param is objects[name]
    assert model.head.weight is model.embedding.weight
    assert model.twin.table is model.table


def test_the_cast_model_trains():
    """Kept modules compute in fp32 within 16-bit ones; nothing promotes what follows them."""
    model = cast_model(Model(), BF16)
    out = model(TOKENS)
    out.float().sum().backward()
    assert out.dtype == BF16
    assert model.blocks[0].norm.seen == FP32
    assert {p.grad.dtype for p in model.parameters()} == {BF16, FP32}
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(copied.eval()(TOKENS), model.eval()(TOKENS))


def test_without_recasting_modules_get_what_there_is():
    model = cast_model(Model(), BF16, recast=False)
    assert model.blocks[0].norm(torch.ones(8, dtype=BF16)).dtype == FP32
    assert model.blocks[0].norm.seen == BF16


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), set()),
        (nn.LayerNorm, {"blocks.1.0.weight", "blocks.1.0.bias"}),
        (
            (nn.LayerNorm, "blocks.0.n*"),
            {"blocks.1.0.weight", "blocks.1.0.bias", "blocks.0.norm.weight"},
        ),
        ("blocks.1", {f"blocks.1.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}),
        (["head"], {"head.weight", "embedding.weight"}),
        (lambda name, module: name == "twin", {"table", "twin.table"}),
        (
            lambda name, module: isinstance(module, nn.Linear) and module.bias is not None,
            {
                f"blocks.{name}"
                for name in ("0.inner.weight", "0.inner.bias", "1.1.weight", "1.1.bias")
            },
        ),
    ],
    ids=["none", "class", "class and pattern", "with all in it", "tied", "buffer", "function"],
)
def test_what_is_kept(keep, kept):
    never = {"batch.num_batches_tracked", "count", "spectrum"}
    model = cast_model(Model(), BF16, keep)
    assert dtypes(model, BF16) == kept | never
    assert model.head.weight is model.embedding.weight


def test_containers_and_blocks_that_are_kept_compute_in_fp32():
    model = Model()
    cast_model(model, BF16, keep=["blocks", "batch"])
    assert model(TOKENS).dtype == BF16
    assert model.blocks[0].norm.seen == FP32


def test_a_kept_gradient_stays_and_others_are_cast():
    model = Model()
    model(TOKENS).sum().backward()
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    cast_model(model, BF16)
    for name, param in model.named_parameters():
        expected = before[name] if name in KEPT else before[name].to(BF16)
        assert_same_bits(param.grad, expected, name)


def test_fp8_weights_and_bytes_stay():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    megaopt.to_float8(model, "current")
    model.register_buffer("codes", torch.zeros(3, dtype=torch.float8_e4m3fn))
    weight, codes = model[0].weight, model[0].weight.data8.clone()
    cast_model(model, BF16)
    assert model[0].weight is weight
    assert torch.equal(weight.data8.view(torch.uint8), codes.view(torch.uint8))
    assert model.codes.dtype == torch.float8_e4m3fn
    assert model[0].bias.dtype == BF16


# --- masters


def fp32_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "after two"])
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_masters_are_made_of_the_values_before_the_cast(options, steps):
    """Bit for bit where the format holds them; else as the format stores an fp32 value."""
    model = Model()
    optimizer = FusedAdam(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        model(TOKENS).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected, param = fp32_of(model), model.blocks[0].inner.weight
    moment = optimizer.state[param]["exp_avg"].clone() if steps else None
    cast_model(model, BF16, optimizer=optimizer)
    for name, own in model.named_parameters():
        if name in KEPT:
            assert_same_bits(own.detach(), expected[name], name)
            continue
        stored = FusedAdam([nn.Parameter(expected[name].to(BF16))], **options)
        (twin,) = stored.param_groups[0]["params"]
        stored.set_scaled_state(twin, "master_param", expected[name])
        found = optimizer.get_unscaled_state(own, "master_param")
        assert_same_bits(found, stored.get_unscaled_state(twin, "master_param"), name)
        exact = options in (FP32_MASTERS, REMAINDERS)
        assert torch.equal(found, expected[name]) or not exact
        assert own.dtype == BF16
    if steps:
        assert_same_bits(optimizer.state[param]["exp_avg"], moment)
    model(TOKENS).float().pow(2).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == steps + 1


@pytest.mark.parametrize("options", [FP32_MASTERS, REMAINDERS], ids=["fp32", "remainder16"])
def test_training_goes_on_from_the_fp32_weights(options):
    """With equal gradients the masters walk as the fp32 weights would have."""
    found, expected = Model(), Model()
    cast = FusedAdam(found.parameters(), lr=0.01, **options)
    plain = FusedAdam(expected.parameters(), lr=0.01)
    for step in range(4):
        if step == 2:
            cast_model(found, BF16, (), optimizer=cast)
        for index, (own, other) in enumerate(
            zip(found.parameters(), expected.parameters(), strict=True)
        ):
            grad = values(own.shape, 50 * step + index).to(BF16)
            own.grad, other.grad = grad.to(own.dtype), grad.float()
        cast.step()
        plain.step()
    for own, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert_same_bits(cast.get_unscaled_state(own, "master_param"), other.detach())


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_model_that_became_fp32_is_cast_from_its_masters(options):
    """Between model.float() and a step the weights are still the 16-bit ones."""
    model = nn.Linear(8, 8)
    optimizer = FusedAdam(model.parameters(), lr=0.01, **options)
    cast_model(model, BF16, optimizer=optimizer)
    model(values((3, 8), 5, BF16)).float().pow(2).sum().backward()
    optimizer.step()
    weights = fp32_of(model)
    expected = [optimizer.get_unscaled_state(p, "master_param").clone() for p in model.parameters()]
    cast_model(model.float(), BF16, optimizer=optimizer)
    for param, master in zip(model.parameters(), expected, strict=True):
        assert_same_bits(optimizer.get_unscaled_state(param, "master_param"), master)
    if options is not FORMATS["scaled fp16"]:  # a step casts what such masters are rounded from
        assert_same(fp32_of(model), weights)


def test_a_master_of_another_shape_is_refused_before_the_cast():
    model = nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters(), **FP32_MASTERS)
    cast_model(model, BF16, optimizer=optimizer)
    optimizer.state[model.bias]["master_param"] = torch.zeros(9)
    before = fp32_of(model)
    message = "parameter 1 of group 0: state 'master_param' must be torch.float32 of shape"
    with pytest.raises(ValueError, match=message):
        cast_model(model, FP16, optimizer=optimizer)
    assert_same(fp32_of(model), before)


def test_masters_of_16_bit_weights_move_to_the_other_16_bits():
    model = nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters(), **FP32_MASTERS)
    expected = fp32_of(model)
    cast_model(model, BF16, optimizer=optimizer)
    cast_model(model, FP16, optimizer=optimizer)
    for name, param in model.named_parameters():
        assert_same_bits(param.detach(), expected[name].to(FP16))
        assert_same_bits(optimizer.get_unscaled_state(param, "master_param"), expected[name])


@pytest.mark.parametrize("options", [FP32_MASTERS, REMAINDERS], ids=["fp32", "remainder16"])
def test_shards_of_fsdp2(on_ranks, options):
    """Masters of all ranks together are the fp32 weights; parameters stay the same objects."""
    for same_objects, dtypes, found, expected in on_ranks(2, cast, options):
        assert same_objects
        assert dtypes == [BF16]
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert_same_bits(value, expected[name], name)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (REMAINDERS, "must be torch.bfloat16 for masters st"),
        ({}, "optimizer must keep masters .* got one without: leave it out"),
        ({"kind": FusedSGD, "weight_rounding": "stochastic"}, "optimizer must keep masters"),
        ({"external": True}, "optimizer must make its masters itself, got one with a list"),
    ],
)
def test_optimizers_that_cannot_keep_the_values_are_refused(options, message):
    options, model = dict(options), Model()
    extra = nn.Parameter(torch.ones(2, dtype=BF16))
    params, kind = [*model.parameters(), extra], options.pop("kind", FusedAdam)
    if options.pop("external", False):
        options["master_weights"] = [None] * (len(params) - 1) + [torch.ones(2)]
    optimizer = kind(params, **options)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        cast_model(model, FP16, optimizer=optimizer)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="optimizer must have parameters of the model"):
        cast_model(Model(), BF16, optimizer=FusedAdam(Model().parameters(), **FP32_MASTERS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": FP32}, r"dtype must be one of torch.bfloat16, torch.float16, got torch.float32"),
        ({"dtype": "bf16"}, "dtype must be one of .*, got 'bf16'"),
        ({"keep": "haed"}, "keep must name modules of the model, got 'haed'"),
        ({"keep": ("head", "norm*")}, r"keep must name modules of the model, got 'norm\*'"),
        ({"keep": 3}, "keep must be a function, or classes and names of modules, got 3"),
        ({"keep": (nn.LayerNorm, 3)}, "keep must be a function, or classes and names of modules"),
        ({"keep": None}, "keep must be a function, or classes and names of modules, got None"),
        ({"recast": 1}, "recast must be one of True, False, got 1"),
    ],
)
def test_arguments_are_refused_before_anything_has_changed(arguments, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        cast_model(model, **{"dtype": BF16, **arguments})
    assert {param.dtype for param in model.parameters()} == {FP32}
