"""torchao's names: their faces, what they stand for, and its checkpoints."""

import inspect
import pickle

import pytest
import stopped
import torch
import torchao_codes
from bits import assert_same_bits
from runs import BF16, FP32, assert_same, assert_same_run, parameters, snapshot, train, values
from torchao_codes import Codes, codes

from megaopt import FusedAdam
from megaopt.integration import torchao

EMPTY = inspect.Parameter.empty
ADAM = {"params": EMPTY, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
BLOCKS = {"amsgrad": False, "block_size": 256, "bf16_stochastic_round": False}
L2 = {**ADAM, "weight_decay": 0, **BLOCKS}
DECOUPLED = {**ADAM, "weight_decay": 1e-2, **BLOCKS}
FACES = {
    "Adam8bit": L2,
    "AdamFp8": L2,
    "AdamW8bit": DECOUPLED,
    "AdamWFp8": DECOUPLED,
    "Adam4bit": {**L2, "block_size": 128},
    "AdamW4bit": {**DECOUPLED, "block_size": 128},
    "_AdamW": {name: value for name, value in DECOUPLED.items() if name != "block_size"},
}
LARGE = [(33, 128), (5,)]
IN_BLOCKS = [name for name in FACES if name != "_AdamW"]
each_class = pytest.mark.parametrize("name", FACES)


def formats(block=128, nearest=""):
    if block == 32:
        return {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": f"block32_e4m0{nearest}"}
    name = "block" if block == 128 else f"block{block}"
    return {"exp_avg_dtype": f"{name}_e4m3", "exp_avg_sq_dtype": f"{name}_e5m3{nearest}"}


def block_of(name):
    return 32 if "4bit" in name else 128


def expected_of(name, params, **options):
    """megaopt.FusedAdam with the options that a class stands for."""
    face = {
        "lr": torch.tensor(1e-3),
        "weight_decay": FACES[name]["weight_decay"],
        "adam_w_mode": "W" in name,
    }
    moments = {} if name == "_AdamW" else formats(block_of(name))
    return FusedAdam(params, **{**face, **moments, **options})


@each_class
def test_arguments_have_the_peers_order_and_defaults(name):
    found = inspect.signature(getattr(torchao, name)).parameters
    assert [(own, found[own].default) for own in found] == [*FACES[name].items(), ("seed", 0)]
    late = {own for own in found if found[own].kind is inspect.Parameter.KEYWORD_ONLY}
    assert late == {"block_size", "bf16_stochastic_round", "seed"} & {*found}


@each_class
def test_torchaos_own_arguments_are_these(name):
    peer = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    theirs = inspect.signature(getattr(peer, name)).parameters
    assert [(own, theirs[own].default) for own in theirs] == list(FACES[name].items())
    ours = inspect.signature(getattr(torchao, name)).parameters
    assert all(ours[own].kind is theirs[own].kind for own in theirs)


@pytest.mark.parametrize("rounds", [True, False])
@each_class
def test_the_bits_are_those_of_the_optimizer_that_it_stands_for(name, rounds):
    found = getattr(torchao, name)(parameters(LARGE), bf16_stochastic_round=rounds, seed=3)
    rounding = "stochastic" if rounds else "nearest"
    expected = expected_of(name, parameters(LARGE), weight_rounding=rounding, seed=3)
    train(found, 3)
    train(expected, 3)
    assert_same_run(found, expected)
    large, small = found.param_groups[0]["params"]
    assert found.state[large]["exp_avg_sq"].dtype == (FP32 if name == "_AdamW" else torch.uint8)
    assert found.state[small]["exp_avg_sq"].dtype == FP32
    found = pickle.loads(pickle.dumps(found))
    train(found, 2, first=3)
    train(expected, 2, first=3)
    assert_same_run(found, expected)


@pytest.mark.parametrize(("asked", "block"), [(64, 64), (127, 64), (128, 128), (2048, 128)])
@pytest.mark.parametrize("name", [name for name in IN_BLOCKS if "4bit" not in name])
def test_blocks_are_never_larger_than_asked_for(name, asked, block):
    found = getattr(torchao, name)(parameters(LARGE), block_size=asked)
    expected = expected_of(name, parameters(LARGE), **formats(block))
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)


@each_class
def test_amsgrad_rounds_exp_avg_sq_to_nearest(name):
    found = getattr(torchao, name)(parameters(LARGE), amsgrad=True)
    moments = {} if name == "_AdamW" else formats(block_of(name), nearest="_nearest")
    expected = expected_of(name, parameters(LARGE), amsgrad=True, **moments)
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)


# --- lr


@each_class
def test_lr_is_a_tensor_that_can_be_filled(name):
    found = getattr(torchao, name)(parameters(LARGE), lr=0.5)
    found.add_param_group({"params": parameters([(7,)]), "lr": 0.25})
    for group, lr in zip(found.param_groups, (0.5, 0.25), strict=True):
        assert_same_bits(group["lr"], torch.tensor(lr))
        group["lr"].fill_(0.125)
    train(found, 2)
    expected = expected_of(name, parameters(LARGE), lr=0.125)
    expected.add_param_group({"params": parameters([(7,)])})
    train(expected, 2)
    assert_same(snapshot(found)["weights"], snapshot(expected)["weights"])
    found.load_state_dict(expected.state_dict())
    for group in found.param_groups:
        assert_same_bits(group["lr"], torch.tensor(0.125))


def test_only_a_tensor_on_a_gpu_makes_the_optimizer_capturable(device):
    """A step that waits for nothing reads lr there; on a CPU reading it costs nothing."""
    lr = torch.tensor(1e-3, device=device)
    params = [torch.nn.Parameter(param.detach().to(device)) for param in parameters(LARGE)]
    found = torchao.AdamW8bit(params, lr=lr)
    assert found.options.capturable is (device.type == "cuda")
    for param in params:
        param.grad = torch.ones_like(param)
    found.step()
    assert found.param_groups[0]["lr"].device == lr.device
    assert_same_bits(found.param_groups[0]["lr"], lr)


# --- refusals


@pytest.mark.parametrize("asked", [32, 128, 256])
@pytest.mark.parametrize("name", ["Adam4bit", "AdamW4bit"])
def test_blocks_of_4_bits_have_32_elements_whatever_is_asked_for(name, asked):
    found = getattr(torchao, name)(parameters(LARGE), block_size=asked)
    expected = expected_of(name, parameters(LARGE))
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)
    with pytest.raises(ValueError, match="block_size must be a whole number >= 32, got 31"):
        getattr(torchao, name)(parameters(LARGE), block_size=31)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16}, "block_size must be a whole number >= (64|32), got 16"),
        ({"block_size": 128.0}, "block_size must be a whole number >= (64|32), got 128.0"),
        ({"block_size": True}, "block_size must be a whole number >= (64|32), got True"),
        ({"bf16_stochastic_round": 1}, "bf16_stochastic_round must be one of True, False, got 1"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
    ],
)
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_what_has_no_meaning_here_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(torchao, name)(parameters(), **options)


# --- checkpoints: torchao's layout by hand


@pytest.mark.parametrize("kind", ["fp8", "8 bits", "4 bits"])
@each_class
def test_torchaos_checkpoints_load_by_their_values(name, kind):
    large, small = parameters(LARGE)
    moments = {"exp_avg": codes(large.shape, 1, True, kind)}
    moments["exp_avg_sq"] = codes(large.shape, 3, False, kind)
    plain = {
        "exp_avg": values(small.shape, 5, BF16),
        "exp_avg_sq": values(small.shape, 6, BF16) ** 2,
    }
    step = {"step": torch.tensor(7.0)}
    theirs = {"state": {0: {**step, **moments}, 1: {**step, **plain}}}
    numbers = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.25, "amsgrad": False}
    group = {"lr": torch.tensor(0.125), **numbers}
    theirs["param_groups"] = [{**group, "params": [0, 1]}]
    found = getattr(torchao, name)([large, small])
    found.load_state_dict(theirs)
    expected = expected_of(name, parameters(LARGE), lr=torch.tensor(0.125))
    (own,) = expected.param_groups
    own.update({**numbers, "step": 7})
    del own["amsgrad"]
    read = {moment: value.dequantize() for moment, value in moments.items()}
    for param, state in zip(own["params"], (read, plain), strict=True):
        expected.initialize_state(param, False)
        for moment, value in state.items():
            expected.set_scaled_state(param, moment, value.float())
    assert_same(snapshot(found)["states"], snapshot(expected)["states"])
    assert isinstance(theirs["state"][0]["exp_avg"], Codes)
    train(found, 2)
    train(expected, 2)
    assert_same(snapshot(found)["states"], snapshot(expected)["states"])
    assert_same(snapshot(found)["weights"], snapshot(expected)["weights"])


# --- beside torchao itself


@pytest.fixture
def peer():
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with torch.compiler.set_stance("force_eager"):
        yield optim


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_checkpoints_go_to_torchao_and_back(peer, name):
    ours = getattr(torchao, name)(parameters([(33, 256), (5,)]))
    train(ours, 3)
    given = [torch.nn.Parameter(p.detach().clone()) for p in ours.param_groups[0]["params"]]
    theirs = getattr(peer, name)(given)
    theirs.load_state_dict(ours.to_torchao_state_dict())
    train(theirs, 1, first=3)
    packed = theirs.state[given[0]]
    kind = "OptimStateFp8" if "Fp8" in name else f"OptimState{name[-4:]}"
    assert [type(packed[own]).__name__ for own in ("exp_avg", "exp_avg_sq")] == [kind] * 2
    copied = [torch.nn.Parameter(p.detach().clone()) for p in given]
    back = getattr(torchao, name)(copied)
    back.load_state_dict(theirs.state_dict())
    assert back.param_groups[0]["step"] == 4
    for moment in ("exp_avg", "exp_avg_sq"):
        exact = packed[moment].dequantize().float()
        again = expected_of(name, [torch.nn.Parameter(copied[0].detach().clone())])
        (param,) = again.param_groups[0]["params"]
        again.initialize_state(param, False)
        again.set_scaled_state(param, moment, exact)
        assert_same_bits(back.state[copied[0]][moment], again.state[param][moment])
    train(back, 1, first=4)


@pytest.mark.parametrize("name", [name for name in IN_BLOCKS if "4bit" not in name])
def test_exp_avg_sq_is_no_further_from_fp64_than_theirs(name, peer):
    """Half of the gradients stop: to nearest their exp_avg_sq stands still before it is small."""
    param = stopped.parameter()
    theirs = getattr(peer, name)([param], betas=stopped.BETAS)
    found = stopped.our_errors(getattr(torchao, name))
    other = stopped.exp_avg_sq_errors(
        theirs, param, lambda: theirs.state[param]["exp_avg_sq"].dequantize()
    )
    assert all(own <= their for own, their in zip(found, other, strict=True)), (found, other)
    assert found[0] < 0.05


def test_codes_in_dtensors_load_shard_by_shard(on_ranks):
    assert on_ranks(2, torchao_codes.loads_shards) == [True, True]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "amsgrad") for kind in (torchao.AdamW8bit, torchao.AdamW4bit, torchao._AdamW)],
)
def test_a_tensor_of_two_elements_in_an_arguments_place_is_refused_by_name(kind, name):
    with pytest.raises(ValueError, match=rf"^{name} must be .* tensor of shape \(2,\)"):
        kind([torch.nn.Parameter(torch.ones(3))], **{name: torch.ones(2)})
