"""Model state dicts with all the bits of the masters: read, and set into weights and masters."""

import copy

import fsdp2_ranks
import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from fsdp2_ranks import build, split_like, whole
from handling import train_all
from runs import (
    BF16,
    FP16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    snapshot,
    train,
    values,
)
from torch import nn

import megaopt
from megaopt import (
    FusedAdam,
    FusedLion,
    FusedSGD,
    get_fp32_model_state_dict,
    set_fp32_model_state_dict,
)


def fp32_values(options):
    """State dicts of a model after steps, and after other values were set; refusals of others."""
    model, optimizer = build({"weights": BF16, **options})
    fsdp2_ranks.train(model, optimizer, 2)
    first = whole(dict(megaopt.get_fp32_model_state_dict(model, optimizer)))
    given = {name: values(param.shape, 40) for name, param in model.named_parameters()}
    if dist.is_initialized():
        params = dict(model.named_parameters())
        for spoilt in (given, {**given, "p0": torch.ones(2)}):
            with pytest.raises(ValueError, match=r"state_dict\['p0'\]"):
                megaopt.set_fp32_model_state_dict(model, optimizer, spoilt)
        given = {name: split_like(params[name], value) for name, value in given.items()}
    megaopt.set_fp32_model_state_dict(model, optimizer, given)
    second = whole(dict(megaopt.get_fp32_model_state_dict(model, optimizer)))
    weights = whole(dict(model.state_dict()))
    fsdp2_ranks.train(model, optimizer, 1, first=2)
    return [first, second, weights, whole(dict(model.state_dict()))]


FORMATS = {
    "fp32": (BF16, MASTER),
    "fp32 beside fp16": (FP16, MASTER),
    "scaled fp16": (BF16, {"master_weights": True, "master_weight_dtype": FP16}),
    "remainder16": (BF16, REMAINDERS),
    "remainder8": (BF16, {"master_weights": True, "master_weight_dtype": "remainder8"}),
    "kahan": (BF16, {"master_weights": True, "master_weight_dtype": "kahan"}),
    "kahan beside fp16": (FP16, {"master_weights": True, "master_weight_dtype": "kahan"}),
    "none": (BF16, {"master_weights": False}),
    "fp32 weights": (FP32, {}),
}
EXACT = ("fp32", "fp32 beside fp16", "remainder16", "fp32 weights")
each_format = pytest.mark.parametrize("name", FORMATS)


class Model(nn.Module):
    """With tied weights, buffers, a frozen parameter and extra state."""

    def __init__(self, dtype=BF16, seed=0):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.note = "new"
        for index, param in enumerate(self.parameters()):
            param.data = values(param.shape, seed + index).to(dtype)

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def owned_of(model):
    return [param for param in model.parameters() if param.requires_grad]


def made(name="fp32", steps=2, kind=FusedAdam, seed=0):
    dtype, options = FORMATS[name]
    model = Model(dtype, seed)
    optimizer = kind(owned_of(model), lr=0.01, **options)
    train(optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 2], ids=["no state yet", "two steps"])
@each_format
def test_weights_have_the_masters_values_and_the_rest_is_the_models(name, steps):
    model, optimizer = made(name, steps)
    found, plain = get_fp32_model_state_dict(model, optimizer), model.state_dict()
    assert list(found) == list(plain)
    assert found["embedding.weight"] is found["head.weight"]
    names = {param: own for own, param in model.named_parameters() if param.requires_grad}
    for param, own in names.items():
        expected = param.detach().float()
        if steps:
            expected = optimizer.get_unscaled_state(param, "master_param")
            has_more = not torch.equal(expected, param.float())
            assert has_more is (name not in ("none", "fp32 weights"))
        assert_same_bits(found[own], expected, own)
    for own in plain.keys() - {*names.values(), "head.weight"}:
        assert_same(found[own], plain[own], own)
    assert len(optimizer.state) == (len(names) if steps else 0)


@each_format
def test_what_is_set_is_what_is_read(name):
    """A second optimizer, of other weights, steps on as the first: no bit of a master is lost."""
    model, optimizer = made(name)
    model.note, model.norm.running_mean[0] = "kept", 7.0
    saved = copy.deepcopy(get_fp32_model_state_dict(model, optimizer))
    other, stepped = made(name, seed=50)
    set_fp32_model_state_dict(other, stepped, saved)
    assert (other.note, float(other.norm.running_mean[0])) == ("kept", 7.0)
    if name != "scaled fp16":  # a step casts weights from what such masters are rounded from
        assert_same(other.state_dict(), model.state_dict())
    assert_same(dict(get_fp32_model_state_dict(other, stepped)), dict(saved))
    states = dict(stepped.state)
    for param, own in zip(owned_of(model), owned_of(other), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):  # the runs had the same gradients before
            stepped.state[own][moment].copy_(optimizer.state[param][moment])
    assert all(stepped.state[param] is state for param, state in states.items())
    train_all((optimizer, stepped), 2, first=2)
    assert_same_run(stepped, optimizer)


@pytest.mark.parametrize("steps", [0, 2], ids=["no state yet", "two steps"])
@each_format
def test_fp32_values_from_elsewhere_set_weight_and_master(name, steps):
    """At once: the weight is the cast of the value, also before the next step."""
    model, optimizer = made(name, steps)
    given = {own: values(v.shape, 70 + i) for i, (own, v) in enumerate(model.named_parameters())}
    set_fp32_model_state_dict(model, optimizer, given, strict=False)
    found = get_fp32_model_state_dict(model, optimizer)
    for own, param in model.named_parameters():
        if not param.requires_grad:
            assert_same_bits(param.detach(), given[own].to(param.dtype))
            continue
        if name in EXACT:
            assert_same_bits(found[own], given[own], own)
        stored = optimizer.options.master_format(param.dtype, name not in ("none", "fp32 weights"))
        expected = given[own].to(param.dtype)
        if stored.joined:
            expected, _ = stored.encode_by_hand(given[own])
            expected = expected.view(param.dtype)
        assert_same_bits(param.detach(), expected, own)
    before = snapshot(optimizer)["weights"]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, 1, first=5)  # without a warning: nobody wrote the weights
    assert_same(snapshot(optimizer)["weights"], before)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("none", "fp32 weights")])
def test_a_model_that_became_fp32_has_its_masters_values(name):
    """As the next step takes them; what somebody else wrote since stays."""
    model, optimizer = made(name)
    model.float()
    with torch.no_grad():
        model.head.bias[1] = 1.2345678
    found = copy.deepcopy(get_fp32_model_state_dict(model, optimizer))
    other, stepped = made(name)
    other.float()
    with torch.no_grad():
        other.head.bias[1] = 1.2345678
    for group in stepped.param_groups:
        group["lr"] = 0.0
    train(stepped, 1, first=2)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)
    for own, param in other.named_parameters():
        assert_same_bits(found[own].float(), param.detach().float(), own)
    assert float(found["head.bias"][1]) == float(torch.tensor(1.2345678))
    set_fp32_model_state_dict(model, optimizer, found)
    assert_same_bits(model.embedding.weight.detach(), other.embedding.weight.detach())


@pytest.mark.parametrize("kind", [FusedLion, FusedSGD])
def test_other_optimizers(kind):
    model, optimizer = made(kind=kind)
    saved = copy.deepcopy(get_fp32_model_state_dict(model, optimizer))
    train(optimizer, 1, first=2)
    set_fp32_model_state_dict(model, optimizer, saved)
    assert_same(dict(get_fp32_model_state_dict(model, optimizer)), dict(saved))


def test_masters_of_the_caller():
    """Read before any state is there, and written where they are."""
    model = Model()
    masters = [values(param.shape, 30 + i) for i, param in enumerate(owned_of(model))]
    optimizer = FusedAdam(owned_of(model), master_weights=masters)
    found = get_fp32_model_state_dict(model, optimizer)
    assert_same_bits(found["embedding.weight"], masters[0])
    given = {**found, "embedding.weight": masters[0] + 1, "head.weight": masters[0] + 1}
    set_fp32_model_state_dict(model, optimizer, given)
    assert_same_bits(masters[0], given["head.weight"])
    assert_same_bits(model.head.weight.detach(), given["head.weight"].to(BF16))


def test_a_written_weight_is_read_as_the_next_step_takes_it():
    model, optimizer = made()
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    with pytest.warns(UserWarning, match="was written outside the optimizer"):
        found = get_fp32_model_state_dict(model, optimizer)
    assert_same_bits(found["head.bias"], torch.full((5,), 3.0))


@pytest.mark.parametrize("recipe", ["current", "block_128x128", "delayed"])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_fp8_weights(recipe, masters, steps):
    """The masters' values, of weights yet without state those that they were made from."""
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    megaopt.to_float8(model.to(BF16), recipe)
    options = MASTER if masters else {"master_weights": False}
    optimizer = FusedAdam(model.parameters(), lr=0.01, **options)
    train(optimizer, steps)
    found = get_fp32_model_state_dict(model, optimizer)
    weight = model[0].weight
    if steps and masters:
        expected = optimizer.state[weight]["master_param"]
    elif masters:
        expected = whole["0.weight"].to(BF16).float()
    else:
        expected = weight.dequantize().float()
    assert_same_bits(found["0.weight"], expected)
    set_fp32_model_state_dict(model, optimizer, whole)
    again = get_fp32_model_state_dict(model, optimizer)["0.weight"]
    assert_same_bits(again, whole["0.weight"] if masters else weight.dequantize().float())
    history = None if weight.amax_history is None else weight.amax_history.clone()
    twin = megaopt.float8.Float8Weight(
        torch.empty_like(weight.data8),
        torch.empty_like(weight.scale_inv),
        weight.scale,
        history,
        weight.recipe,
        weight.dtype,
    )
    twin.quantize_(whole["0.weight"])
    assert_same_bits(weight.detach().dequantize(), twin.dequantize())


@pytest.mark.parametrize("name", ["fp32", "remainder16", "none"])
def test_shards(on_ranks, name):
    """DTensors in, DTensors out; two ranks have the bits of one."""
    _, options = FORMATS[name]
    alone = fp32_values(options)
    for found in on_ranks(2, fp32_values, options):
        assert_same(found, alone)


# --- refusals


def refused(message, change, strict=True, name="fp32"):
    """Setting a state dict that `change` has spoilt raises, and nothing has changed."""
    model, optimizer = made(name)
    given = copy.deepcopy(dict(get_fp32_model_state_dict(model, optimizer)))
    for value in (each for each in given.values() if isinstance(each, torch.Tensor)):
        value.add_(1)
    change(given)
    before, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        set_fp32_model_state_dict(model, optimizer, given, strict=strict)
    assert_same(snapshot(optimizer), before)
    assert_same(dict(model.state_dict()), dict(weights))


SPOILT = {
    "a name less": (
        lambda given: given.pop("head.bias"), "got one that lacks head.bias; strict=False",
    ),
    "another name": (lambda g: g.update(other=g.pop("frozen")), "lacks frozen and has other;"),
    "no extra state": (lambda given: given.pop("_extra_state"), "lacks _extra_state;"),
    "tied names of two values": (
        lambda given: given.update({"head.weight": given["embedding.weight"] + 1}),
        r"state_dict\['head.weight'\] must be state_dict\['embedding.weight'\], as these names are",
    ),
    "a buffer's shape": (
        lambda given: given.update({"norm.running_mean": torch.ones(5)}),
        r"state_dict\['norm.running_mean'\] must be a tensor of shape \(4,\), got",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), SPOILT.values(), ids=SPOILT)
def test_what_does_not_fit_is_refused_before_anything_is_set(change, message):
    refused(message, change)


def test_other_arguments_are_refused():
    for strict in (0, None):
        refused("strict must be one of True, False", lambda given: None, strict=strict)
    with pytest.raises(ValueError, match="state_dict must be a dict of tensors by name, got 3"):
        set_fp32_model_state_dict(*made(), 3)


def test_one_of_tied_names_is_enough():
    model, optimizer = made()
    given = dict(get_fp32_model_state_dict(model, optimizer))
    given["head.weight"] = given.pop("embedding.weight") + 1
    set_fp32_model_state_dict(model, optimizer, given)
    found = get_fp32_model_state_dict(model, optimizer)
    assert_same_bits(found["embedding.weight"], given["head.weight"])


def test_not_strict_takes_what_is_there():
    model, optimizer = made()
    before = copy.deepcopy(dict(get_fp32_model_state_dict(model, optimizer)))
    given = {"head.bias": torch.full((5,), 0.1), "other": torch.ones(1)}
    set_fp32_model_state_dict(model, optimizer, given, strict=False)
    found = dict(get_fp32_model_state_dict(model, optimizer))
    assert_same(found, {**before, "head.bias": given["head.bias"]})


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (torch.ones(4), r"shape \(5,\), got a torch.float32 tensor of shape \(4,\)"),
        (torch.ones(5, 1), r"shape \(5,\), got"),
        (torch.ones(5, dtype=torch.float64), "torch.float32, torch.bfloat16, torch.float16 of"),
        (torch.ones(5, dtype=torch.int32), "torch.float32, torch.bfloat16, torch.float16 of"),
        (torch.ones(5, device="meta"), "torch.float32, .* on meta"),
        (None, "torch.float32, .* got None"),
    ],
    ids=["size", "shape", "fp64", "int", "meta", "None"],
)
def test_values_that_are_no_weights_are_refused(value, allowed):
    message = rf"state_dict\['head.bias'\] must be .*{allowed}"
    refused(message, lambda given: given.update({"head.bias": value}))


@pytest.mark.parametrize("name", ["fp32", "scaled fp16", "remainder8", "kahan"])
def test_states_are_checked_before_anything_is_set(name):
    """A master, or a scale, of another shape, that of the last parameter."""
    model, optimizer = made(name)
    given = {own: torch.ones(v.shape) for own, v in model.named_parameters()}
    given["norm.running_mean"] = torch.full((4,), 9.0)
    state, wrong = optimizer.state[model.head.bias], "master_param"
    if name == "scaled fp16":
        wrong = "master_param_scale"
    state[wrong] = torch.zeros(9, dtype=state[wrong].dtype)
    saved, buffers = snapshot(optimizer), copy.deepcopy(model.state_dict())
    message = f"parameter 3 of group 0: state '{wrong}' must be torch.*of shape .*on cpu, got a "
    with pytest.raises(ValueError, match=message):
        set_fp32_model_state_dict(model, optimizer, given, strict=False)
    assert_same(snapshot(optimizer), saved)
    assert_same(dict(model.state_dict()), dict(buffers))


def test_another_model_is_refused():
    _, optimizer = made()
    for call in (get_fp32_model_state_dict, lambda *own: set_fp32_model_state_dict(*own, {})):
        with pytest.raises(ValueError, match="model must have parameters of the optimizer"):
            call(Model(), optimizer)


def test_a_state_dict_without_the_parameters_is_refused():
    """A hook that copies them, say, would have hidden what the masters hold."""
    model, optimizer = made()
    model.register_state_dict_post_hook(
        lambda own, state, *_: state.update({"head.bias": state["head.bias"].clone()})
    )
    with pytest.raises(ValueError, match=r"must have the optimizer's .* got none for head.bias"):
        get_fp32_model_state_dict(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
def test_nan_has_one_pattern_wherever_it_lies(dtype, masters):
    """torch converts the last elements of fp16 tensors by other instructions than the others."""
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(42, dtype=dtype))})
    options = {"master_weights": masters, "master_weight_dtype": torch.float16}
    optimizer = FusedAdam(model.parameters(), lr=0.1, backend="reference", **options)
    model["weight"].grad = torch.full((42,), torch.nan, dtype=dtype)
    optimizer.step()
    set_fp32_model_state_dict(model, optimizer, get_fp32_model_state_dict(model, optimizer))
    expected = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}[dtype]
    assert set(model["weight"].detach().view(torch.int16).tolist()) == {expected}
