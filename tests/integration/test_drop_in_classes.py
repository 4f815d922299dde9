"""Optimizers under torchao's, bitsandbytes' and flashoptim's names: faces, bits, refusals."""

import gc
import inspect
import pickle
import re
from functools import partial
from importlib import import_module

import pytest
import torch
from fake_pinning import FakePinning
from galore_cases import needs_galore_torch
from runs import BF16, FP16, FP32, assert_same, assert_same_run, parameters, train

from megaopt import FusedAdam, FusedLion, FusedSGD
from megaopt.integration import bitsandbytes, flashoptim, galore_torch, torchao
from megaopt.kernels.host_memory import held_bytes, pinned_by

LARGE = [(33, 128), (5,)]
"""Moments of the first are in blocks, where such are asked for."""
BITSANDBYTES = ("Adam", "AdamW", "Lion", "SGD")
NAMES = {
    torchao: ["Adam8bit", "AdamFp8", "AdamW8bit", "AdamWFp8", "Adam4bit", "AdamW4bit", "_AdamW"],
    bitsandbytes: [f"{kind}{bits}" for kind in BITSANDBYTES for bits in ("", "8bit", "32bit")],
    flashoptim: ["FlashAdam", "FlashAdamW", "FlashLion", "FlashSGD", "FlashSGDW"],
}
PEERS = {torchao: "torchao.optim", bitsandbytes: "bitsandbytes.optim", flashoptim: "flashoptim"}
KINDS = [getattr(module, name) for module, names in NAMES.items() for name in names]
OWN = {"seed": 0}
"""Arguments that the peers do not have, or had in older releases."""
OLDER = {"percentile_clipping": 100, "block_wise": True}
PAGED = [name for name in NAMES[bitsandbytes] if "SGD" not in name]
each_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: f"{kind.__module__[20:]}.{kind.__name__}"
)


@each_kind
def test_arguments_have_the_peers_order_and_defaults(kind):
    module = import_module(kind.__module__)
    peer = pytest.importorskip(PEERS[module], reason="the peer is not installed")
    theirs = inspect.signature(getattr(peer, kind.__name__)).parameters.values()
    ours = inspect.signature(kind).parameters
    more = {**OLDER, **OWN} if module is bitsandbytes else OWN
    expected = [*((each.name, each.default) for each in theirs), *more.items()]
    assert [(each.name, each.default) for each in ours.values()] == expected
    assert all(ours[each.name].kind is each.kind for each in theirs)
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in more)


@needs_galore_torch
def test_galore_torchs_arguments_are_these():
    peer = pytest.importorskip("galore_torch.adamw8bit", reason="needs bitsandbytes")
    theirs = inspect.signature(peer.AdamW8bit).parameters.values()
    ours = inspect.signature(galore_torch.GaLoreAdamW8bit).parameters.values()
    expected = [*((each.name, each.default) for each in theirs), *OWN.items()]
    assert [(each.name, each.default) for each in ours] == expected


@pytest.mark.parametrize("kind", [*KINDS, bitsandbytes.PagedLion8bit, galore_torch.GaLoreAdamW8bit])
def test_help_names_every_argument(kind):
    shown = inspect.getdoc(kind)
    own = shown[shown.index("Args:") : shown.index("Raises:")]
    for argument in inspect.signature(kind).parameters:
        assert re.search(rf"(^ {{4}}|, ){argument}[,:]", own, re.MULTILINE), argument
    assert max(map(len, shown.splitlines())) <= 100
    assert kind.__name__ in shown


def test_a_class_of_ones_own_keeps_its_docstring_and_signature():
    class Own(flashoptim.FlashAdamW):
        """Mine."""

        def __init__(self, params, rate):
            super().__init__(params, rate, master_weight_bits=32)

    assert inspect.getdoc(Own) == "Mine."
    assert [*inspect.signature(Own).parameters] == ["params", "rate"]
    assert Own(parameters(), 0.5).param_groups[0]["lr"] == 0.5


def test_classes_inherit_as_there():
    assert issubclass(flashoptim.FlashAdamW, flashoptim.FlashAdam)
    assert issubclass(flashoptim.FlashSGDW, flashoptim.FlashSGD)
    for name in PAGED:
        paged = getattr(bitsandbytes, f"Paged{name}")
        assert issubclass(paged, getattr(bitsandbytes, name))
        assert inspect.signature(paged) == inspect.signature(getattr(bitsandbytes, name))


# --- the bits are those of this package's optimizers


def blocks(size, nearest=""):
    kinds = {32: ("32_e3m0", "32_e4m0"), 64: ("64_e4m3", "64_e5m3"), 128: ("_e4m3", "_e5m3")}
    exp_avg, exp_avg_sq = (f"block{kind}" for kind in kinds[size])
    return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": f"{exp_avg_sq}{nearest}"}


def of_torchao():
    for name in NAMES[torchao]:
        same = {"lr": torch.tensor(1e-3), "adam_w_mode": "W" in name}
        same["weight_decay"] = 1e-2 if "W" in name else 0
        most = 32 if "4bit" in name else 128
        has_blocks = name != "_AdamW"
        usual = blocks(most) if has_blocks else {}
        drawn = {"weight_rounding": "stochastic", "seed": 3}
        yield name, {"bf16_stochastic_round": True, "seed": 3}, FusedAdam, same | usual | drawn
        nearest = blocks(most, "_nearest") if has_blocks else {}
        yield name, {"amsgrad": True}, FusedAdam, {**same, **nearest, "amsgrad": True}
        for size in (64, 127, 2048) if has_blocks else ():
            least = min(most, 64 if size < 128 else 128)
            yield name, {"block_size": size}, FusedAdam, same | blocks(least)


def of_bitsandbytes():
    for name in NAMES[bitsandbytes]:
        rule = {"L": FusedLion, "S": FusedSGD}.get(name[0], FusedAdam)
        given = {"weight_decay": 0.25, "seed": 3}
        given |= {"lr": 0.1, "momentum": 0.9} if rule is FusedSGD else {}
        for bits in (8,) if "8bit" in name else (32,) if "32bit" in name else (32, 8):
            asked = {} if "bit" in name else {"optim_bits": bits}
            yield name, given | asked, rule, given | (MOMENTS[rule] if bits == 8 else {})


MASTERS = {
    24: {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"},
    32: {"master_weights": True, "master_weight_dtype": "remainder16"},
    None: {"master_weights": False, "weight_rounding": "stochastic"},
}
DECAY = {"weight_decay": 0.1}
MOMENTUM = {"momentum": 0.9, **DECAY}
FLASH = {
    "FlashAdam": (FusedAdam, DECAY, {"adam_w_mode": False}),
    "FlashAdamW": (FusedAdam, {}, {"weight_decay": 1e-2}),
    "FlashLion": (FusedLion, DECAY, {"lr": 1e-3}),
    "FlashSGD": (FusedSGD, MOMENTUM, {}),
    "FlashSGDW": (FusedSGD, {**MOMENTUM, "nesterov": True}, {"decoupled_weight_decay": True}),
}
MOMENTS = {FusedAdam: blocks(128), FusedLion: {"exp_avg_dtype": "block_e4m3"}}
MOMENTS[FusedSGD] = {"momentum_buffer_dtype": "block_e4m3"}


def of_flashoptim():
    for name, (kind, given, fixed) in FLASH.items():
        for bits, quantize in ((24, True), (32, True), (None, True), (24, False)):
            own = {"master_weight_bits": bits, "quantize": quantize, "compress_state_dict": False}
            same = MASTERS[bits] | (MOMENTS[kind] if quantize else {})
            yield name, {**given, **own, "seed": 3}, kind, {**given, **fixed, **same, "seed": 3}


STANDS_FOR = {
    f"{module.__name__[20:]}.{name} {given}": (getattr(module, name), given, kind, same)
    for module, cases in (
        (torchao, of_torchao()),
        (bitsandbytes, of_bitsandbytes()),
        (flashoptim, of_flashoptim()),
    )
    for name, given, kind, same in cases
}


@pytest.mark.parametrize(("kind", "given", "base", "same"), STANDS_FOR.values(), ids=STANDS_FOR)
@pytest.mark.sample(2)
def test_the_bits_are_those_of_the_optimizer_that_it_stands_for(kind, given, base, same):
    found, expected = kind(parameters(LARGE), **given), base(parameters(LARGE), **same)
    assert isinstance(found, base)
    train(found, 3)
    train(expected, 3)
    assert_same_run(found, expected)
    found = pickle.loads(pickle.dumps(found))
    assert type(found) is kind
    train(found, 2, first=3)
    train(expected, 2, first=3)
    assert_same_run(found, expected)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("asked", ["class", "argument"])
@pytest.mark.parametrize("name", PAGED)
def test_paged_states_are_in_host_memory_with_the_same_bits(name, asked):
    kind = getattr(bitsandbytes, f"Paged{name}" if asked == "class" else name)
    expected = getattr(bitsandbytes, name)(parameters(LARGE), weight_decay=0.25)
    gc.collect()
    with pinned_by(FakePinning()):
        options = {"is_paged": True} if asked == "argument" else {}
        found = kind(parameters(LARGE), weight_decay=0.25, **options)
        train(found, 2)
        assert held_bytes() > 0
        found = pickle.loads(pickle.dumps(found))
        assert type(found) is kind
        train(found, 1, first=2)
    train(expected, 3)
    assert_same_run(found, expected)


@pytest.mark.parametrize("name", FLASH)
def test_the_argument_fused_moves_no_bit(name):
    fused, unfused = (getattr(flashoptim, name)(parameters(), fused=flag) for flag in (True, False))
    assert (fused.options.backend, unfused.options.backend) == ("auto", "reference")
    train(fused, 2)
    train(unfused, 2)
    assert_same_run(fused, unfused)


# --- what has no meaning here

TWO = torch.ones(2)
OF_TORCHAO = {
    "block_size": [(31, "a whole number >= (64|32)"), (128.0, "a whole"), (True, "a whole")],
    "bf16_stochastic_round": [(1, "one of True, False, got 1")],
    "amsgrad": [(TWO, r"one of True, False, got a torch.float32 tensor of shape \(2,\)")],
    "lr": [(-1.0, "a finite number >= 0")],
}
OF_BITSANDBYTES = {
    "args": [(1, "None, got 1")],
    "is_paged": [(1, "one of False, True, got 1"), (TWO, "one of False, True, got a torch")],
    "percentile_clipping": [(5, "100, got 5")],
    "block_wise": [(False, "True, got False"), (TWO, "True, got a torch")],
    "min_8bit_size": [(value, "a whole number >= 0, got") for value in (-1, None, TWO)],
    "amsgrad": [(True, "False, got True"), (TWO, "False, got a torch")],
    "optim_bits": [(16, ".*32.*, got 16"), (TWO, ".*32.*, got a torch")],
    "lr": [(-1.0, "a finite number >= 0")],
}
OF_FLASHOPTIM = {
    "check_numerics": [(True, "False, got True")],
    "master_weight_bits": [(16, "one of 24, 32, None, got 16")],
    "compress_state_dict": [(None, "one of True, False, got None")],
    "quantize": [(8, "one of True, False, got 8")],
    "fused": [(1, "one of True, False, got 1")],
    "decouple_lr": [(True, "False, got True")],
    "lr": [(-1.0, "a finite number >= 0")],
}
REFUSED = {torchao: OF_TORCHAO, bitsandbytes: OF_BITSANDBYTES, flashoptim: OF_FLASHOPTIM}


@each_kind
def test_what_has_no_meaning_here_is_refused(kind):
    taken = inspect.signature(kind).parameters
    for name, cases in REFUSED[import_module(kind.__module__)].items():
        for value, allowed in cases if name in taken else ():
            with pytest.raises(ValueError, match=f"{name} must be {allowed}"):
                kind(parameters(), **{"lr": 0.1, name: value})
    with pytest.raises(TypeError, match="wieght_decay"):
        kind(parameters(), lr=0.1, wieght_decay=0.1)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Adam32bit", "PagedAdamW32bit"])
def test_8_bits_are_asked_for_by_the_name_alone(name):
    with pytest.raises(ValueError, match="optim_bits must be 32, got 8"):
        getattr(bitsandbytes, name)(parameters(), optim_bits=8)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Lion8bit", "SGD8bit"])
def test_a_parameter_that_was_to_keep_fp32_is_refused(name):
    numbers = {"lr": 0.1, "momentum": 0.9} if "SGD" in name else {}
    kind = partial(getattr(bitsandbytes, name), **numbers)
    message = "parameter 0 of group 0: min_8bit_size must be at most 4224, .* got 4225"
    with pytest.raises(ValueError, match=message):
        kind(parameters(LARGE), min_8bit_size=4225)
    optimizer = kind(parameters(LARGE), min_8bit_size=4224)
    with pytest.raises(ValueError, match=r"min_8bit_size must be at most 4096, .* got 4224"):
        pickle.loads(pickle.dumps(optimizer)).add_param_group({"params": parameters([(32, 128)])})
    kind(parameters([(60000,), (5,)]), min_8bit_size=65536)
    base = getattr(bitsandbytes, name.removesuffix("8bit"))
    base(parameters(LARGE), min_8bit_size=10**6, **numbers)


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("name", FLASH)
def test_weights_that_have_no_such_masters_are_refused(name, bits, monkeypatch):
    def flash(dtype, bits=bits):
        return getattr(flashoptim, name)(parameters(dtype=dtype), master_weight_bits=bits)

    with pytest.raises(ValueError, match=f"master_weight_bits must be None where .*, got {bits}"):
        flash(FP32)
    message = f"parameter 0 of group 0: master_weight_bits must be None for torch.float16 .*{bits}"
    with pytest.raises(ValueError, match=message):
        flash(FP16)
    mixed = [*parameters(), *parameters(dtype=FP32)]
    train(getattr(flashoptim, name)(mixed, master_weight_bits=bits), 1)
    train(flash(FP16, None), 1)
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "1")
    found, expected = flash(FP32), flash(FP32, None)
    for optimizer in (found, expected):
        train(optimizer, 2)
    weights = [[*map(torch.detach, each.param_groups[0]["params"])] for each in (found, expected)]
    assert all(map(torch.equal, *weights))
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "")
    with pytest.raises(ValueError, match="unless the environment has FLASHOPTIM_ALLOW"):
        flash(FP32)
    assert flash(BF16).param_groups


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("name", FLASH)
def test_flashoptim_refuses_its_default_for_fp32_weights(name, allowed, monkeypatch):
    peer = pytest.importorskip("flashoptim", reason="flashoptim is not installed")
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "1" if allowed else "")
    for library in (peer, flashoptim):
        params = [torch.nn.Parameter(torch.zeros(3, device="cuda"))]
        if allowed:
            getattr(library, name)(params)
            continue
        with pytest.raises(ValueError, match="master_weight_bits"):
            getattr(library, name)(params)


@pytest.mark.parametrize("kind", [bitsandbytes.AdamW8bit, torchao.AdamW8bit])
def test_masters_are_had_as_the_warning_says(kind):
    with pytest.warns(UserWarning, match=r"have no fp32 master.*optimizer\.master_weights = True"):
        train(kind(parameters(LARGE), lr=1e-2), 1)
    optimizer = kind(parameters(LARGE), lr=1e-2)
    optimizer.master_weights = True
    train(optimizer, 3)
    own = {"lr": 1e-2, "weight_decay": 1e-2, "dtype": torch.float32}
    moments = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
    expected = FusedAdam(parameters(LARGE), **own, **moments)
    train(expected, 3)
    for found, other in zip(optimizer.state.values(), expected.state.values(), strict=True):
        assert found["master_param"].dtype == torch.float32
        assert_same(dict(found), dict(other))
