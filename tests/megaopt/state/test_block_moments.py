"""Moments in blocks of 8 and 4 bits on the public interface: which have them, what goes with them.

What they have in common with others is in test_every_kind.py.
"""

import copy
from itertools import pairwise

import block_oracle
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, refused, train_all
from kinds import BLOCKS, BLOCKS4, NEAREST, NEAREST4
from runs import (
    BF16,
    FP32,
    assert_same,
    assert_same_run,
    parameters,
    params_of,
    through_a_file,
    train,
    values,
)

from megaopt import FusedAdam, FusedLion, FusedSGD

BLOCKS64 = {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"}
OPTIONS = {"8 bits": BLOCKS, "4 bits": BLOCKS4}
# rows of whole blocks; of blocks of 64 or of none; few elements
SHAPES = [(33, 128), (5, 8, 128), (40, 192), (40, 104), (10,)]
HYPER = {"lr": 2e-3, "weight_decay": 0.1}
MOMENTS = ("exp_avg", "exp_avg_sq")
both_sizes = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def made(options, params=None, **more):
    params = parameters(SHAPES) if params is None else params
    return FusedAdam(params, weight_rounding="stochastic", **{**HYPER, **options, **more})


# --- which moments are in blocks

OF_4_BITS = {
    (64, 64): True, (128, 32): True, (128, 48): False, (1, 4128): True, (4, 4, 256): True,
    (65536,): True, (65537,): False, (65535,): False, (63, 64): False, (): False, (0, 5024): False,
}  # fmt: skip
OF_8_BITS = {
    (64, 128): True, (63, 65): False, (64, 100): False, (1, 4097): False, (1, 4224): True,
    (4, 4, 256): True, (65536,): True, (65537,): True, (65535,): False, (): False, (0, 5000): False,
}  # fmt: skip
KEPT = [
    (options, block, shape, is_kept)
    for options, block, shapes in (
        (BLOCKS, 128, OF_8_BITS),
        (BLOCKS64, 64, {**OF_8_BITS, (8, 8, 64): True}),
        (BLOCKS4, 32, OF_4_BITS),
    )
    for shape, is_kept in shapes.items()
]


@pytest.mark.parametrize(("options", "block", "shape", "is_kept"), KEPT, ids=str)
def test_rows_of_whole_blocks_have_codes_and_small_parameters_fp32(options, block, shape, is_kept):
    param = torch.nn.Parameter(values(shape, 0, BF16))
    optimizer = FusedAdam([param], **options)
    train(optimizer, 1)
    own = optimizer.state[param]
    for name in MOMENTS:
        assert (f"{name}_scale" in own) == is_kept
        if not is_kept:
            assert (own[name].dtype, own[name].shape) == (FP32, param.shape)
            continue
        packed = 2 if block == 32 else 1
        assert own[name].dtype == own[f"{name}_scale"].dtype == torch.uint8
        assert own[name].shape == (*shape[:-1], shape[-1] // packed)
        rows = [shape[0]] if len(shape) > 1 else []
        count = -(-param.numel() // block)
        assert own[f"{name}_scale"].shape == (*rows, count // (rows or [1])[0])
        value = optimizer.get_unscaled_state(param, name)
        assert (value.dtype, value.shape) == (FP32, param.shape)


# --- layouts


@both_backends
@both_sizes
def test_parameters_that_are_not_contiguous(options, backend):
    """Blocks follow the elements row by row, wherever they lie; the codes lie densely."""
    whole = parameters(SHAPES[:1])
    turned = [torch.nn.Parameter(param.detach().t().contiguous().t()) for param in whole]
    assert not turned[0].is_contiguous()
    expected = made(options, whole, backend="reference")
    found = made(options, turned, backend=backend)
    train_all((expected, found), 2)
    for own, other in zip(params_of(found), params_of(expected), strict=True):
        assert_same_bits(own, other)
        for name, tensor in expected.state[other].items():
            if tensor is not None:
                assert_same_bits(found.state[own][name], tensor, name)


@both_sizes
def test_codes_that_are_not_contiguous(options):
    """Columns of a larger tensor: the step works on copies."""
    expected, found = (made(options, backend=each) for each in ("reference", "triton"))
    train(expected, 3)
    train(found, 1)
    for param in params_of(found)[:2]:
        own = found.state[param]["exp_avg"]
        wide = torch.full((*own.shape[:-1], 2 * own.shape[-1]), 77, dtype=torch.uint8)
        wide[..., ::2] = own
        found.state[param]["exp_avg"] = wide[..., ::2]
    train(found, 2, first=1)
    for param in params_of(found)[:2]:
        own = found.state[param]["exp_avg"]
        base = own.as_strided((2 * own.numel(),), (1,))
        assert bool((base[1::2] == 77).all())
        found.state[param]["exp_avg"] = own.contiguous()
    assert_same_run(found, expected)


def parts_of(whole, cuts):
    """Flat parts of a parameter that know where they lie, as distributed optimizers have them."""
    parts = []
    for first, end in pairwise(cuts):
        parts.append(torch.nn.Parameter(whole.detach().reshape(-1)[first:end].clone()))
        parts[-1].megaopt_first_element = first
    for part in (whole, *parts):
        part.megaopt_whole_shape = tuple(whole.shape)
        part.megaopt_number = 4
    return parts


@both_sizes
def test_parts_from_blocks_beginnings_on_are_the_whole(options):
    whole = torch.nn.Parameter(values((40, 128), 0, BF16))
    cuts = [0, 128, 128 * 9, 5120]
    parts = parts_of(whole, cuts)
    one, many = made(options, [whole]), made(options, parts)
    for step in range(3):
        whole.grad = values(whole.shape, 50 + step, BF16)
        for part, (first, end) in zip(parts, pairwise(cuts), strict=True):
            part.grad = whole.grad.view(-1)[first:end].clone()
        one.step()
        many.step()
    assert_same_bits(torch.cat([part.detach() for part in parts]), whole.detach().view(-1))
    for name in (*MOMENTS, *(f"{name}_scale" for name in MOMENTS)):
        found = torch.cat([many.state[part][name] for part in parts])
        assert_same_bits(found, one.state[whole][name].view(-1), name)


@pytest.mark.parametrize(
    ("options", "scales"), [(BLOCKS, [1, 8, 33]), (BLOCKS4, [2, 31, 129])], ids=OPTIONS
)
def test_parts_that_start_within_a_block_step(options, scales):
    """They have a scale of their own for the part of a block; the backends agree."""
    runs = []
    for own in ("triton", "reference"):
        whole = torch.nn.Parameter(values((40, 128), 0, BF16))
        runs.append(made(options, parts_of(whole, [0, 38, 1000, 5120]), backend=own))
        train(runs[-1], 2)
    assert_same_run(*runs)
    found = [runs[0].state[part]["exp_avg_scale"].numel() for part in params_of(runs[0])]
    assert found == scales


# --- what is read, loaded and given


@both_sizes
def test_values_that_are_read_are_the_oracles(options):
    optimizer = made(options)
    train(optimizer, 2)
    for param in params_of(optimizer)[:2]:
        own = optimizer.state[param]
        for name in MOMENTS:
            scale = own[f"{name}_scale"]
            code = own[name].view(-1).numpy(), scale.view(-1).numpy()
            expected = torch.from_numpy(block_oracle.decode(options[f"{name}_dtype"], *code))
            assert_same_bits(optimizer.get_unscaled_state(param, name), expected.view(param.shape))
            assert_same_bits(optimizer.get_unscaled_state(param, f"{name}_scale"), scale)


def by_hand(name, value):
    """What is stored without a draw: as nearest, ties up."""
    half = np.full(value.numel(), 0x8000)
    code, scale = block_oracle.encode(name, value.reshape(-1).numpy(), 0, half)
    return torch.from_numpy(code), torch.from_numpy(scale)


@pytest.mark.parametrize(
    "options", [BLOCKS, NEAREST, BLOCKS4, NEAREST4], ids=lambda own: own["exp_avg_dtype"]
)
def test_the_state_of_torch_is_loaded_and_given_back(options):
    theirs = torch.optim.AdamW(parameters(SHAPES, FP32), **HYPER)
    train(theirs, 2)
    ours = FusedAdam(parameters(SHAPES, FP32), **HYPER, **options)
    ours.load_state_dict(theirs.state_dict())
    for param, other in zip(params_of(ours), params_of(theirs), strict=True):
        own = ours.state[param]
        for name in MOMENTS:
            value = theirs.state[other][name]
            if f"{name}_scale" not in own:
                assert_same_bits(own[name], value)
                continue
            code, scale = by_hand(options[f"{name}_dtype"], value)
            assert_same_bits(own[name].view(-1), code, name)
            assert_same_bits(own[f"{name}_scale"].view(-1), scale, name)
    back = torch.optim.AdamW(parameters(SHAPES, FP32), **HYPER)
    back.load_state_dict(through_a_file(ours.to_torch_state_dict()))
    for other, param in zip(params_of(back), params_of(ours), strict=True):
        assert set(back.state[other]) == {"step", *MOMENTS}
        for name in MOMENTS:
            assert_same_bits(back.state[other][name], ours.get_unscaled_state(param, name), name)


def test_groups_say_what_the_optimizer_does():
    optimizer = made(BLOCKS, seed=9)
    assert [group["seed"] for group in optimizer.param_groups] == [9]
    assert [group["contract"] for group in optimizer.param_groups] == ["ieee"]
    nearest = FusedAdam(parameters(SHAPES), **NEAREST)
    assert "seed" not in nearest.param_groups[0]  # nothing draws


# --- refusals


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_a_wrong_name_is_told_names_that_are_taken(name):
    with pytest.raises(ValueError, match="must be one of") as raised:
        FusedAdam(parameters(SHAPES), **{name: "block_e9m9"})
    allowed = str(raised.value).partition("one of ")[2].partition(", got")[0].split(", ")
    assert len(allowed) > 10
    for each in allowed:
        dtype = getattr(torch, each.removeprefix("torch.")) if "torch." in each else each
        FusedAdam(parameters(SHAPES), **{name: dtype})


SIGNED, UNSIGNED = r"must be one of .*has a sign, got ", r"must be one of .*never negative, got "
BESIDE = r"must not be given beside "
FP16_MASTERS = {"master_weights": True, "master_weight_dtype": torch.float16}
NEAR_TO = {"block_e4m3": NEAREST, "block32_e3m0": NEAREST4}


def refused_in_blocks(options):
    """What neither size of codes goes with."""
    signed, unsigned = options.values()
    nearest = NEAR_TO[signed]
    return {
        f"{signed} has a sign": (
            FusedAdam, {"exp_avg_dtype": unsigned}, rf"exp_avg_dtype {SIGNED}'{unsigned}'",
        ),
        f"{unsigned} is never negative": (
            FusedAdam, {"exp_avg_sq_dtype": signed}, rf"exp_avg_sq_dtype {UNSIGNED}'{signed}'",
        ),
        f"{signed}, contract torch": (
            FusedAdam, {"contract": "torch", **nearest},
            rf"exp_avg_dtype='{signed}_nearest'.* must not be given with contract='torch'",
        ),
        f"{signed}, scaled masters": (
            FusedAdam, {**FP16_MASTERS, **options}, rf"{BESIDE}master_weight_dtype=torch.float16",
        ),
        f"{unsigned} is drawn, amsgrad": (
            FusedAdam, {"amsgrad": True, **options},
            rf"exp_avg_sq_dtype must round to nearest with amsgrad=True, got '{unsigned}'",
        ),
    }  # fmt: skip


REFUSED = {
    **refused_in_blocks(BLOCKS),
    **refused_in_blocks(BLOCKS4),
    "lion": (
        FusedLion, {"exp_avg_dtype": "block_e5m3_nearest"},
        rf"exp_avg_dtype {SIGNED}'block_e5m3_nearest'",
    ),
    "sgd": (
        FusedSGD, {"momentum": 0.9, "momentum_buffer_dtype": "block_e5m3"},
        rf"momentum_buffer_dtype {SIGNED}'block_e5m3'",
    ),
    "contract torch and draws": (
        FusedAdam, {"contract": "torch", **BLOCKS},
        r"contract='torch' must round to nearest.*exp_avg_dtype='block_e4m3'",
    ),
    "two sizes": (
        FusedAdam, {**BLOCKS, "exp_avg_sq_dtype": "block32_e4m0"},
        r"blocks of one size, got exp_avg_dtype='block_e4m3', exp_avg_sq_dtype='block32_e4m0'",
    ),
    "scaled fp16 beside": (
        FusedAdam, {**BLOCKS, "exp_avg_sq_dtype": torch.float16},
        rf"exp_avg_dtype='block_e4m3' {BESIDE}exp_avg_sq_dtype='scaled_float16'",
    ),
    "scaled fp8 beside": (
        FusedAdam, {**BLOCKS, "exp_avg_dtype": torch.uint8},
        rf"exp_avg_sq_dtype='block_e5m3' {BESIDE}exp_avg_dtype=",
    ),
    "another name": (
        FusedAdam, {"exp_avg_dtype": "block32_e4m3"},
        r"exp_avg_dtype must be .*block_e4m3.*, got 'block32_e4m3'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(kind, options, message):
    params = parameters(SHAPES)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=message):
        kind(params, **options)
    assert_same([param.detach() for param in params], before)
    assert all(not vars(param) for param in params)


@pytest.mark.parametrize(
    ("shape", "first"), [((100,), 7), ((101,), 64), ((5, 7), 0), ((), 64)], ids=str
)
def test_parts_that_share_a_byte_are_refused(shape, first):
    part = torch.nn.Parameter(values(shape, 0, BF16))
    part.megaopt_whole_shape, part.megaopt_first_element = (64, 128), first
    part.megaopt_number = 0
    message = (
        r"parameter 0 of group 0: exp_avg_dtype='block32_e3m0' keeps two elements in a byte: .*even"
        rf".*got one of shape .* from element {first} on"
    )
    with pytest.raises(ValueError, match=message):
        FusedAdam([part], **BLOCKS4)
    FusedAdam([part], **BLOCKS)
    part.megaopt_whole_shape = (64, 120)  # keeps fp32
    train(FusedAdam([part], **BLOCKS4), 1)


def test_a_part_that_got_its_place_later_is_refused_before_anything_has_changed():
    """As Megatron's shards get theirs: by the step, by initialize_states, by a load."""
    part = torch.nn.Parameter(values((101,), 0, BF16))
    optimizer = FusedAdam([part], **BLOCKS4)
    theirs = torch.optim.AdamW([torch.nn.Parameter(values((101,), 0, BF16))])
    train(theirs, 1)
    part.megaopt_whole_shape, part.megaopt_first_element = (64, 128), 64
    for act in (
        lambda: train(optimizer, 1),
        optimizer.initialize_states,
        lambda: optimizer.load_state_dict(theirs.state_dict()),
        lambda: optimizer.set_scaled_state(part, "exp_avg", torch.ones(101)),
    ):
        with refused(optimizer, r"block32_e3m0.* keeps \w+ elements in a byte"):
            act()


DAMAGE = {
    "a code for each element": ("exp_avg", lambda own: torch.cat([own, own], -1)),
    "too few codes": ("exp_avg", lambda own: own.view(-1)[:-1]),
    "too few scales": ("exp_avg_scale", lambda own: own[:-1]),
    "scales of fp32": ("exp_avg_sq_scale", lambda own: own.float()),
    "signed bytes": ("exp_avg_sq", lambda own: own.view(torch.int8)),
}


@pytest.mark.parametrize(("name", "change"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("where", ["loaded", "stepped"])
@both_sizes
def test_a_state_that_does_not_fit_is_refused(options, where, name, change):
    optimizer = made(options)
    train(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    own = saved["state"][0] if where == "loaded" else optimizer.state[params_of(optimizer)[0]]
    own[name] = change(own[name])
    with refused(optimizer, "parameter 0 of group 0"):
        optimizer.load_state_dict(saved) if where == "loaded" else train(optimizer, 1, first=1)


def test_scales_are_not_set_by_themselves():
    optimizer = made(BLOCKS)
    train(optimizer, 1)
    param = params_of(optimizer)[0]
    for value in (optimizer.state[param]["exp_avg_scale"].clone(), torch.ones(1)):
        with refused(optimizer, "exp_avg_scale"):
            optimizer.set_scaled_state(param, "exp_avg_scale", value)
