"""Codes in a state dict are never read in another format than the one they were saved in."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import assert_same_bits
from handling import refused
from runs import BF16, FP16, FP32, assert_same, snapshot, through_a_file, train, values
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedSGD
from megaopt.kernels.formats import BESIDE, MASTERS, MOMENTS, Format
from megaopt.saving.formats import sized_contract, text_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def in_bytes(name, step):
    """A user's format: multiples of a step, from -127 to 127, in a byte and without a scale."""

    def decode(code, scale=None):
        return code.view(torch.int8).float() * step

    def encode(value, inverse=None):
        return (value / step).clamp(-127, 127).to(torch.int8).view(torch.uint8)

    return Format(name, torch.uint8, None, decode, encode, decode, encode)


OWN = {form.name: form for form in (in_bytes("hundredths", 0.01), in_bytes("tenths", 0.1))}


@pytest.fixture(autouse=True)
def own_formats():
    for form in OWN.values():
        MOMENTS.add(form)
    yield
    for name in OWN:
        del MOMENTS[name]


class Model(torch.nn.Module):
    """One weight, large enough for moments in blocks."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.weight = torch.nn.Parameter(values((33, 128), 1, dtype))


def with_momentum(model, key):
    options = {"momentum_buffer_dtype": key, "backend": "reference"}
    return FusedSGD(model.parameters(), 0.1, 0.9, **options)


def with_square(model, key):
    return FusedAdam(model.parameters(), exp_avg_sq_dtype=key, backend="reference")


def with_master(model, key):
    key = {"float32": FP32, "scaled_float16": FP16}.get(key, key)
    options = {"master_weights": True, "master_weight_dtype": key, "backend": "reference"}
    return FusedAdam(model.parameters(), **options)


ROLES = {
    "momentum_buffer": (with_momentum, BF16, lambda: [f for f in SHIPPED if not f.unsigned]),
    "exp_avg_sq": (with_square, BF16, lambda: [f for f in SHIPPED if f.unsigned or not f.block]),
    "master of bf16": (with_master, BF16, lambda: of_weights(BF16)),
    "master of fp16": (with_master, FP16, lambda: of_weights(FP16)),
}
SHIPPED = list(MOMENTS.values())


def of_weights(dtype):
    fit = [form for form in MASTERS.values() if form.requires_weight in (None, dtype)]
    return [form for form in fit if form.present]


def every_pair():
    found = []
    for role, (_, _, formats) in ROLES.items():
        own = list(OWN) if "master" not in role else []
        names = [form.name for form in formats()] + own
        found += [(role, *pair) for pair in itertools.product(names, names)]
    return found


def state_of(role, model, optimizer):
    return optimizer.get_unscaled_state(model.weight, "master_param" if "master" in role else role)


def asked_as(name):
    """What users call a master that has a row of its own beside fp16."""
    return {form.name: own for own, form in BESIDE[torch.float16].items()}.get(name, name)


def made(role, name, dtype):
    model = Model(dtype)
    return model, ROLES[role][0](model, asked_as(name))


def two_runs(role, saved, own):
    """Of two formats, by other gradients; the second has the first's weight."""
    runs = [made(role, name, ROLES[role][1]) for name in (saved, own)]
    (model, source), (other, target) = runs
    train(source, 3)
    train(target, 1, first=7)
    with torch.no_grad():
        other.weight.copy_(model.weight)
    return runs


def family(name):
    """The format, however it rounds."""
    return name.removesuffix("_stochastic").removesuffix("_nearest")


@pytest.mark.parametrize(("role", "saved", "own"), every_pair())
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_a_load_keeps_all_values_or_names_both_formats(role, saved, own):
    (model, source), (other, target) = two_runs(role, saved, own)
    target.refresh_masters()
    state = through_a_file(source.state_dict())
    if family(saved) == family(own):
        target.load_state_dict(state)
        assert_same_bits(state_of(role, other, target), state_of(role, model, source))
        return
    with refused(target, f"must be '{asked_as(own)}', got '{asked_as(saved)}'"):
        target.load_state_dict(state)


class PassesOver(DefaultLoadPlanner):
    """As planners of other libraries: tensors of another size stay as they are."""

    def create_local_plan(self):
        saved, kept = self.metadata.state_dict_metadata, {}
        for name, own in self.state_dict.items():
            size = getattr(saved.get(name), "size", None)
            if size is None or not isinstance(own, torch.Tensor) or size == own.size():
                kept[name] = own
        return create_default_local_load_plan(kept, self.metadata, not self.allow_partial_load)


def planner_of(way, partial):
    kind = PassesOver if way == "passes over sizes" else DefaultLoadPlanner
    return kind(allow_partial_load=partial)


def through_a_checkpoint(saved, wanted, folder, planner):
    """planner: by allow_partial_load what a checkpoint lacks (the seed of who draws now) stays."""
    dcp.save({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
    found = {"optimizer": wanted}
    dcp.load(found, checkpoint_id=folder, planner=planner, no_dist=True)
    return found["optimizer"]


def in_text(found):
    """What torch gets of an optimizer, with contracts as older versions named them."""
    if isinstance(found, list):
        return [in_text(each) for each in found]
    if not isinstance(found, dict):
        return found
    own = {name: in_text(value) for name, value in found.items()}
    marks = [name for name in own if str(name).endswith("contract")]
    return {**own, **{name: text_of(own[name]) for name in marks}}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.10's
@pytest.mark.parametrize(
    ("role", "saved", "own"),
    [
        ("momentum_buffer", "hundredths", "tenths"),
        ("momentum_buffer", "hundredths", "float32"),
        ("momentum_buffer", "float32", "hundredths"),
        ("momentum_buffer", "bfloat16", "bfloat16_stochastic"),
        ("momentum_buffer", "bfloat16_stochastic", "bfloat16"),
        ("momentum_buffer", "block_e4m3", "float32"),
        ("momentum_buffer", "scaled_float16", "bfloat16"),
        ("exp_avg_sq", "block_e5m3_nearest", "block_e5m3"),
        ("exp_avg_sq", "block_e5m3", "bfloat16"),
        ("master of bf16", "remainder16", "float32"),
        ("master of bf16", "remainder8", "remainder8_stochastic"),
        ("master of bf16", "remainder8", "remainder16"),
        ("master of bf16", "kahan", "float32"),
    ],
)
@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("way", ["", "an older version", "passes over sizes"])
@pytest.mark.sample(3)
@pytest.mark.thirds
def test_torchs_checkpoints_cast_no_codes(role, saved, own, flat, way, tmp_path):
    """torch.distributed.checkpoint casts what it reads to the dtypes of the state that is there.

    It refuses other formats before it reads; those of older versions, and whatever a planner takes
    in spite of their size, the load refuses afterwards.
    """
    options = FLAT if flat else StateDictOptions()
    (model, source), (other, target) = two_runs(role, saved, own)
    kept = get_optimizer_state_dict(model, source, options=options)
    kept = in_text(kept) if way == "an older version" else kept
    wanted = get_optimizer_state_dict(other, target, options=options)
    same = family(saved) == family(own)
    planner = planner_of(way, partial=same or not way)
    if not same and not way:
        with refused(target, "Size mismatch .*contract", CheckpointException):
            through_a_checkpoint(kept, wanted, tmp_path, planner)
        return
    found = through_a_checkpoint(kept, wanted, tmp_path, planner)
    if same:
        set_optimizer_state_dict(other, target, found, options=options)
        assert_same_bits(state_of(role, other, target), state_of(role, model, source))
        return
    with pytest.raises(ValueError, match=rf"must be '{own}', got '{saved}'"):
        set_optimizer_state_dict(other, target, found, options=options)


def test_state_dicts_without_the_mark_load():
    """Those of earlier versions: dtypes and shapes are what is compared then."""
    (model, source), (other, target) = (made("exp_avg_sq", "bfloat16", BF16) for _ in range(2))
    train(source, 2)
    state = source.state_dict()
    for group in state["param_groups"]:
        del group["state_formats"]
    target.load_state_dict(state)
    found, expected = (state_of("exp_avg_sq", *run) for run in ((other, target), (model, source)))
    assert_same_bits(found, expected)
    _, of_bytes = made("exp_avg_sq", "tenths", BF16)
    with pytest.raises(ValueError, match=r"'exp_avg_sq' of the state dict must be torch.uint8"):
        of_bytes.load_state_dict(state)


def test_small_parameters_have_fp32_moments_under_either_block():
    runs = []
    for key in ("block_e4m3", "block64_e4m3", "float32"):
        param = torch.nn.Parameter(values((5, 7), 1, FP32))
        optimizer = FusedSGD([param], 0.1, 0.9, momentum_buffer_dtype=key, backend="reference")
        train(optimizer, 2)
        runs.append((param, optimizer))
    for (param, target), (_, source) in itertools.permutations(runs, 2):
        target.load_state_dict(source.state_dict())
        assert target.state[param]["momentum_buffer"].dtype == FP32


@pytest.mark.parametrize("mark", [5, "", "float32", "exp_avg", ["exp_avg=float32"], {}], ids=repr)
def test_a_mark_that_names_no_formats_is_refused(mark):
    (_, source), (_, target) = (made("exp_avg_sq", "bfloat16", BF16) for _ in range(2))
    train(source, 1)
    state = source.state_dict()
    state["param_groups"][0]["state_formats"] = mark
    with refused(target, r"parameter 0 of group 0: 'state_formats' of the state"):
        target.load_state_dict(state)


def test_a_format_of_a_users_that_is_gone_is_named():
    (_, source), (_, target) = (made("exp_avg_sq", "tenths", BF16) for _ in range(2))
    train(source, 1)
    state = copy.deepcopy(source.state_dict())
    mark = state["param_groups"][0]["state_formats"]
    state["param_groups"][0]["state_formats"] = mark.replace("tenths", "sixths")
    with pytest.raises(ValueError, match=r"'exp_avg_sq' .* must be 'tenths', got 'sixths'"):
        target.load_state_dict(state)


def test_bytes_of_ones_own_are_offered_by_name():
    """torch.uint8 means fp8, as for TransformerEngine, whoever else stores bytes."""
    with pytest.raises(ValueError, match="hundredths, tenths, got 'sixths'") as caught:
        made("exp_avg_sq", "sixths", BF16)
    assert "uint8" not in str(caught.value)
    model, optimizer = made("exp_avg_sq", torch.uint8, BF16)
    train(optimizer, 1)
    assert optimizer.state[model.weight]["exp_avg_sq"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("saved", "own"), [("stochastic", "nearest"), ("nearest", "stochastic")], ids=str
)
def test_weights_may_be_rounded_in_another_way_after_a_load(saved, own):
    runs = []
    for rounding in (saved, own):
        model = Model()
        options = {"master_weights": False, "weight_rounding": rounding, "backend": "reference"}
        runs.append((model, FusedAdam(model.parameters(), lr=0.01, **options)))
    (_, source), (_, target) = runs
    train(source, 2)
    target.load_state_dict(through_a_file(source.state_dict()))
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


# --- what torch compares before it loads


@pytest.mark.parametrize("masters", [None, True])
def test_formats_of_other_values_have_other_sizes(masters):
    """Of the shipped ones; those that differ in rounding alone have one size."""
    sizes, pairs = {}, set()
    for one, other in itertools.product(SHIPPED, SHIPPED):
        with contextlib.suppress(ValueError):  # without a sign, or with one
            dtypes = {"exp_avg_dtype": one.name, "exp_avg_sq_dtype": other.name}
            mark = mark_in_torchs_form(master_weights=masters, **dtypes)
            pair = family(one.name), family(other.name)
            sizes[mark.numel()] = sizes.get(mark.numel(), pair)
            assert sizes[mark.numel()] == pair
            pairs.add(pair)
            assert text_of(mark) == "ieee"
    assert len(sizes) == len(pairs) > 20


def mark_in_torchs_form(weights=BF16, **options):
    optimizer = FusedAdam([torch.nn.Parameter(values((33, 128), 1, weights))], **options)
    return sized_contract(optimizer._owned, torch.device("cpu"))


def test_masters_that_no_weight_has_make_no_size():
    """As fp32 weights, with which either option loads."""
    ways = [{}, {"master_weights": True}, {"dtype": FP32}]
    assert len({mark_in_torchs_form(FP32, **way).numel() for way in ways}) == 1
    assert len({mark_in_torchs_form(BF16, **way).numel() for way in ways}) == 2


OTHERS = [
    {"adam_w_mode": False},
    {"amsgrad": True},
    {"maximize": True},
    {"step_counts": "parameter"},
]


def test_what_else_a_load_refuses_has_another_size_than_the_default():
    """Which has that of older checkpoints."""
    for default in ({}, {"step_counts": "group"}):
        assert mark_in_torchs_form(**default).numel() == 3821
    for other in OTHERS:
        assert mark_in_torchs_form(**other).numel() != 3821


def test_state_dicts_for_others_have_text():
    """What users save themselves stays as it was."""
    model, optimizer = made("exp_avg_sq", "bfloat16", BF16)
    train(optimizer, 1)
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["contract"] == "ieee"
    (group,) = get_optimizer_state_dict(model, optimizer)["param_groups"]
    assert text_of(group["contract"]) == "ieee"
    assert optimizer.param_groups[0]["contract"] == "ieee"


# --- whose steps count


def counted(kind, step_counts, capturable, equal=False):
    """A model whose second parameter has a gradient in the last of four steps only."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), 0.1, step_counts=step_counts, capturable=capturable)
    for step in range(4):
        model.weight.grad = torch.ones(4, 4)
        model.bias.grad = torch.ones(4) if equal or step == 3 else None
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("partial", [True, False], ids=["partial", "whole"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "running"])
@pytest.mark.parametrize("counts", [("parameter", "group"), ("group", "parameter")], ids=str)
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_torchs_checkpoints_of_other_counts_are_refused(
    kind, capturable, flat, partial, fresh, counts, tmp_path
):
    """The run goes on as if it had not tried."""
    options = FLAT if flat else StateDictOptions()
    source, (model, target) = (counted(kind, each, capturable) for each in counts)
    if fresh:
        target = type(target)(model.parameters(), 0.1, step_counts=counts[1], capturable=capturable)
        target.initialize_states()
    kept = get_optimizer_state_dict(*source, options=options)
    wanted = get_optimizer_state_dict(model, target, options=options)
    with refused(target, r"Size mismatch .*contract|Missing key", CheckpointException):
        through_a_checkpoint(kept, wanted, tmp_path, planner_of("", partial))


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("counts", [("parameter", "group"), ("group", "parameter")], ids=str)
def test_counts_that_a_planner_left_out_are_named(flat, counts, tmp_path):
    options = FLAT if flat else StateDictOptions()
    source, target = (counted(FusedAdam, each, False) for each in counts)
    kept, wanted = (get_optimizer_state_dict(*run, options=options) for run in (source, target))
    found = through_a_checkpoint(
        kept, copy.deepcopy(wanted), tmp_path, planner_of("passes over sizes", True)
    )
    message = rf"parameter 0 of group 0: .*'step'.* step_counts='{counts[0]}'"
    with refused(target[1], message):
        set_optimizer_state_dict(*target, found, options=options)


# --- whether there are masters


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("saved", [True, False], ids=["left out", "missing"])
@pytest.mark.parametrize("way", ["", "an older version", "passes over sizes"])
def test_torchs_checkpoints_leave_no_master_out(saved, flat, way, tmp_path):
    """torch reads what the optimizer has; with allow_partial_load it keeps what nobody saved."""
    options, runs = FLAT if flat else StateDictOptions(), []
    for has_masters in (saved, not saved):
        model = Model()
        runs.append((model, FusedAdam(model.parameters(), master_weights=has_masters or None)))
        train(runs[-1][1], 2)
    target = runs[1][1]
    kept, wanted = (get_optimizer_state_dict(*run, options=options) for run in runs)
    planner = planner_of(way, partial=True)
    kept = in_text(kept) if way == "an older version" else kept
    if not way:
        with refused(target, "Size mismatch .*contract", CheckpointException):
            through_a_checkpoint(kept, wanted, tmp_path, planner)
        return
    found = through_a_checkpoint(kept, copy.deepcopy(wanted), tmp_path, planner)
    message = f"masters of the state dict must be this optimizer's, {not saved}, got '{saved}'"
    with refused(target, f"parameter 0 of group 0: {message}"):
        set_optimizer_state_dict(*runs[1], found, options=options)


# --- state dicts of versions that kept blocks across rows


def of_an_older_version():
    """A plain run's state dict whose blocks go from row to row, and the values of its moments."""
    weight = torch.nn.Parameter(values((64, 100), 1, BF16))
    flat = torch.nn.Parameter(weight.detach().clone().view(-1))
    flat.megaopt_whole_shape, flat.megaopt_first_element = (64, 100), 0
    blocks = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
    source = FusedAdam([flat], **blocks)
    train(source, 2)
    saved = copy.deepcopy(source.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][name] = saved["state"][0][name].view(64, 100)
    saved["param_groups"][0]["state_formats"] = "exp_avg=block_e4m3, exp_avg_sq=block_e5m3"
    moments = {n: source.get_unscaled_state(flat, n) for n in ("exp_avg", "exp_avg_sq")}
    return FusedAdam([weight], **blocks), saved, moments


def test_blocks_across_rows_of_older_versions_become_fp32():
    target, saved, expected = of_an_older_version()
    target.load_state_dict(saved)
    (state,) = target.state.values()
    for name, value in expected.items():
        assert_same_bits(state[name], value.view(64, 100))
        assert f"{name}_scale" not in state


def test_codes_of_older_versions_that_torch_may_have_cast_are_refused():
    target, saved, _ = of_an_older_version()
    for name in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][name] = saved["state"][0][name].float()
        del saved["state"][0][f"{name}_scale"]
    with refused(target, "'exp_avg' of the state dict must be 'block_e4m3' with"):
        target.load_state_dict(saved)


def test_scales_of_older_versions_in_one_row_load():
    (_, source), (_, target) = (made("exp_avg_sq", "block_e5m3", BF16) for _ in range(2))
    train(source, 2)
    saved = copy.deepcopy(source.state_dict())
    saved["param_groups"][0]["state_formats"] = "exp_avg=float32, exp_avg_sq=block_e5m3"
    state = saved["state"][0]
    state["exp_avg_sq_scale"] = state["exp_avg_sq_scale"].view(-1)
    target.load_state_dict(saved)
    assert_same(snapshot(target)["states"], snapshot(source)["states"])
