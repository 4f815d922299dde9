"""bitsandbytes' names: their faces, what they stand for, and its checkpoints."""

import gc
import inspect
import pickle

import pytest
import stopped
import torch
from bits import assert_same_bits
from fake_pinning import FakePinning
from runs import BF16, FP32, assert_same, assert_same_run, parameters, snapshot, train, values

from megaopt import FusedAdam, FusedLion
from megaopt.integration import bitsandbytes
from megaopt.kernels.host_memory import held_bytes, pinned_by

EMPTY = inspect.Parameter.empty
LAST = {"args": None, "min_8bit_size": 4096, "is_paged": False}
ADAM = {"params": EMPTY, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
ADAM |= {"amsgrad": False, "optim_bits": 32, **LAST}
LION = {"params": EMPTY, "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0}
FACES = {
    "Adam": ADAM,
    "Adam8bit": ADAM,
    "AdamW": {**ADAM, "weight_decay": 1e-2},
    "AdamW8bit": {**ADAM, "weight_decay": 1e-2},
    "Lion": {**LION, "optim_bits": 32, **LAST},
    "Lion8bit": {**LION, **LAST},
}
EXTRA = {"percentile_clipping": 100, "block_wise": True, "seed": 0}
FORMATS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
LARGE = [(33, 128), (5,)]
each_class = pytest.mark.parametrize("name", FACES)
eight_bits = pytest.mark.parametrize("name", [name for name in FACES if "8" in name])


def expected_of(name, params, bits, **options):
    """This package's optimizer with the options that a class stands for."""
    face = {"lr": FACES[name]["lr"], "weight_decay": FACES[name]["weight_decay"], **options}
    if "Lion" in name:
        return FusedLion(params, **face, exp_avg_dtype="block_e4m3" if bits == 8 else FP32)
    return FusedAdam(params, **face, **(FORMATS if bits == 8 else {}))


@each_class
def test_arguments_have_the_peers_order_and_defaults(name):
    found = inspect.signature(getattr(bitsandbytes, name)).parameters
    face = [(own, found[own].default) for own in found]
    assert face == [*FACES[name].items(), *EXTRA.items()]
    assert all(found[own].kind is inspect.Parameter.KEYWORD_ONLY for own in EXTRA)


@each_class
def test_bitsandbytes_own_arguments_are_these(name):
    peer = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    found = inspect.signature(getattr(peer.optim, name)).parameters
    assert [(own, found[own].default) for own in found] == list(FACES[name].items())


@pytest.mark.parametrize("bits", [32, 8])
@each_class
def test_the_bits_are_those_of_the_optimizer_that_it_stands_for(name, bits):
    if "8" in name:
        bits, asked = 8, {}
    else:
        asked = {"optim_bits": bits}
    given = {"weight_decay": 0.25, "seed": 3}
    found = getattr(bitsandbytes, name)(parameters(LARGE), **asked, **given)
    expected = expected_of(name, parameters(LARGE), bits, **given)
    train(found, 3)
    train(expected, 3)
    assert_same_run(found, expected)
    large, small = found.param_groups[0]["params"]
    assert found.state[large]["exp_avg"].dtype == (torch.uint8 if bits == 8 else FP32)
    assert found.state[small]["exp_avg"].dtype == FP32
    found = pickle.loads(pickle.dumps(found))
    train(found, 2, first=3)
    train(expected, 2, first=3)
    assert_same_run(found, expected)


@pytest.mark.parametrize("asked", ["class", "argument"])
@each_class
def test_paged_states_are_in_host_memory_with_the_same_bits(name, asked):
    kind = getattr(bitsandbytes, f"Paged{name}" if asked == "class" else name)
    expected = getattr(bitsandbytes, name)(parameters(LARGE), weight_decay=0.25)
    gc.collect()
    fake = FakePinning()
    with pinned_by(fake):
        options = {"is_paged": True} if asked == "argument" else {}
        found = kind(parameters(LARGE), weight_decay=0.25, **options)
        assert isinstance(found, getattr(bitsandbytes, name))
        train(found, 3)
        train(expected, 3)
        assert_same_run(found, expected)
        assert held_bytes() > 0
        again = pickle.loads(pickle.dumps(found))
        assert type(again) is kind
        train(again, 2, first=3)
    train(expected, 2, first=3)
    assert_same_run(again, expected)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": 1}, "args must be None, got 1"),
        ({"is_paged": 1}, "is_paged must be one of False, True, got 1"),
        ({"percentile_clipping": 5}, "percentile_clipping must be 100, got 5"),
        ({"block_wise": False}, "block_wise must be True, got False"),
        ({"min_8bit_size": -1}, "min_8bit_size must be a whole number >= 0, got -1"),
        ({"min_8bit_size": None}, "min_8bit_size must be a whole number >= 0, got None"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
    ],
)
@each_class
def test_what_has_no_meaning_here_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(bitsandbytes, name)(parameters(), **options)


@pytest.mark.parametrize("name", ["Adam", "Adam8bit", "AdamW", "AdamW8bit"])
def test_amsgrad_is_refused(name):
    with pytest.raises(ValueError, match="amsgrad must be False, got True"):
        getattr(bitsandbytes, name)(parameters(), amsgrad=True)


@pytest.mark.parametrize(("name", "bits"), [("Adam8bit", 8), ("AdamW8bit", 8), ("AdamW", 16)])
def test_bits_that_are_not_there_are_refused(name, bits):
    with pytest.raises(ValueError, match=f"optim_bits must be .*32.*, got {bits}"):
        getattr(bitsandbytes, name)(parameters(), optim_bits=bits)


@eight_bits
def test_a_parameter_that_was_to_keep_fp32_is_refused(name):
    kind = getattr(bitsandbytes, name)
    message = "parameter 0 of group 0: min_8bit_size must be at most 4224, .* got 4225"
    with pytest.raises(ValueError, match=message):
        kind(parameters(LARGE), min_8bit_size=4225)
    optimizer = kind(parameters(LARGE), min_8bit_size=4224)
    with pytest.raises(ValueError, match=r"min_8bit_size must be at most 4096, .* got 4224"):
        pickle.loads(pickle.dumps(optimizer)).add_param_group({"params": parameters([(32, 128)])})
    kind(parameters([(60000,), (5,)]), min_8bit_size=65536)
    getattr(bitsandbytes, name.removesuffix("8bit"))(parameters(LARGE), min_8bit_size=10**6)


# --- checkpoints: bitsandbytes' layout by hand


def coded(shape, seed, number, block):
    code = (values(shape, seed) * 60).abs().to(torch.uint8)
    amax = values((-(-shape.numel() // block),), seed + 1).abs()
    table = torch.linspace(-1.0 if number == 1 else 0.0, 1, 256)
    exact = table[code.long()] * amax[torch.arange(shape.numel()) // block].view(shape)
    return {f"state{number}": code, f"qmap{number}": table, f"absmax{number}": amax}, exact


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("nested", [True, False])
@each_class
def test_bitsandbytes_checkpoints_load_by_their_values(name, nested, block):
    large, small = parameters(LARGE)
    moments = ("exp_avg",) if "Lion" in name else ("exp_avg", "exp_avg_sq")
    states, exact = [{}, {}], [{}, {}]
    for number, moment in enumerate(moments, 1):
        tensors, exact[0][moment] = coded(large.shape, number, number, block)
        states[0].update(tensors)
        exact[1][moment] = values(small.shape, 5 + number).abs()
        states[1][f"state{number}"] = exact[1][moment]
    wrapped = [{"__bnb_optimizer_quant_state__": own} if nested else own for own in states]
    numbers = {"lr": 0.125, "betas": (0.8, 0.95), "weight_decay": 0.25}
    theirs = {"eps": 0.0 if "Lion" in name else 1e-6, "alpha": 0.0, "t_alpha": None}
    saved = {
        "state": {key: {"step": 7, **own} for key, own in enumerate(wrapped)},
        "param_groups": [{**numbers, **theirs, "t_beta3": None, "params": [0, 1]}],
    }
    found = getattr(bitsandbytes, name)([large, small])
    found.load_state_dict(saved)
    expected = expected_of(name, parameters(LARGE), 8 if "8" in name else 32)
    (own,) = expected.param_groups
    own.update({**numbers, "step": 7, **({} if "Lion" in name else {"eps": 1e-6})})
    for param, state in zip(own["params"], exact, strict=True):
        expected.initialize_state(param)
        for moment, value in state.items():
            expected.set_scaled_state(param, moment, value)
    assert_same_run(found, expected)
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"absmax1": None}, "state 0: absmax1 must be a number for each block of 256 elements"),
        ({"absmax1": torch.ones(5)}, "state 0: absmax1 must be .*, got a torch.float32 tensor of"),
        ({"qmap1": None}, "state 0: qmap1 must be a tensor of 256 values, got None"),
        ({"qmap1": torch.ones(16)}, "state 0: qmap1 must be a tensor of 256 values, got a torch"),
    ],
)
def test_states_that_are_not_block_wise_are_refused(change, message):
    (large, _) = parameters(LARGE)
    found = bitsandbytes.Lion8bit([large])
    before = snapshot(found)
    state = {"step": 1, **coded(large.shape, 1, 1, 256)[0], **change}
    group = {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 0.0, "params": [0]}
    with pytest.raises(ValueError, match=message):
        found.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert_same(snapshot(found), before)


# --- beside bitsandbytes itself


@pytest.mark.parametrize("dtype", [BF16, FP32])
@each_class
def test_checkpoints_go_to_bitsandbytes_and_back(name, dtype):
    peer = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    ours = getattr(bitsandbytes, name)(parameters(LARGE, dtype))
    train(ours, 3)
    given = [torch.nn.Parameter(p.detach().clone()) for p in ours.param_groups[0]["params"]]
    theirs = getattr(peer.optim, name)(given)
    written = ours.to_bitsandbytes_state_dict()
    for number in (1, 2):
        if f"qmap{number}" in written["state"][0]:
            own = peer.functional.create_dynamic_map(signed=number == 1)
            assert_same_bits(written["state"][0][f"qmap{number}"], own)
    theirs.load_state_dict(written)
    train(theirs, 1, first=3)
    packed = theirs.state[given[0]]
    assert packed["state1"].dtype == (torch.uint8 if "8" in name else FP32)
    copied = [torch.nn.Parameter(p.detach().clone()) for p in given]
    back = getattr(bitsandbytes, name)(copied)
    back.load_state_dict(theirs.state_dict())
    assert back.param_groups[0]["step"] == 4
    again = expected_of(name, [torch.nn.Parameter(copied[0].detach().clone())], 8 * ("8" in name))
    (param,) = again.param_groups[0]["params"]
    again.initialize_state(param)
    for moment, number in {"exp_avg": 1, "exp_avg_sq": 2}.items():
        if f"state{number}" in packed:
            exact = packed[f"state{number}"]
            if "8" in name:
                exact = decoded(packed, number)
            again.set_scaled_state(param, moment, exact)
            assert_same_bits(back.state[copied[0]][moment], again.state[param][moment])
    train(back, 1, first=4)


def decoded(state, number):
    """A moment of theirs as they read it."""
    own = (state[f"absmax{number}"], state[f"qmap{number}"], 256, FP32)
    return torch.ops.bitsandbytes.dequantize_blockwise(state[f"state{number}"], *own)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit"])
def test_exp_avg_sq_is_no_further_from_fp64_than_theirs(name):
    """Half of the gradients stop: to nearest their exp_avg_sq stands still before it is small."""
    peer = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    param = stopped.parameter()
    theirs = getattr(peer.optim, name)([param], betas=stopped.BETAS)
    found = stopped.our_errors(getattr(bitsandbytes, name))
    other = stopped.exp_avg_sq_errors(theirs, param, lambda: decoded(theirs.state[param], 2))
    assert all(own <= their for own, their in zip(found, other, strict=True)), (found, other)
    assert found[0] < 0.05


@each_class
def test_help_names_every_argument(name):
    kind = getattr(bitsandbytes, name)
    shown = inspect.getdoc(kind)
    own = shown[shown.index("Args:") : shown.index("Raises:")]
    for argument in inspect.signature(kind).parameters:
        assert f"{argument}:" in own or f"{argument}," in own, argument
    assert "{" not in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in (bitsandbytes.Adam, bitsandbytes.AdamW8bit)
        for name in ("amsgrad", "optim_bits", "is_paged", "block_wise", "min_8bit_size")
    ],
)
def test_a_tensor_of_two_elements_in_an_arguments_place_is_refused_by_name(kind, name):
    with pytest.raises(ValueError, match=rf"^{name} must be .* tensor of shape \(2,\)"):
        kind([torch.nn.Parameter(torch.ones(3))], **{name: torch.ones(2)})
