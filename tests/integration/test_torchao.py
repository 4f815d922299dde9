"""torchao's lr as a tensor, and its checkpoints; test_drop_in_classes.py has the rest."""

import pytest
import stopped
import torch
from bits import assert_same_bits
from runs import BF16, assert_same, assert_same_run, parameters, snapshot, train, values

from megaopt import FusedAdam
from megaopt.integration import torchao

# States in the layout of torchao's, without torchao: plain, and in DTensors.


class Codes(torch.Tensor):
    """As OptimState8bit and OptimStateFp8: codes, and a scale for each block in a row."""

    @staticmethod
    def __new__(cls, codes, scale, qmap=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=BF16)

    def __init__(self, codes, scale, qmap=None):
        self.codes, self.scale, self.qmap = codes, scale, qmap

    def dequantize(self):
        own = self.codes.float() if self.qmap is None else self.qmap[self.codes.int()]
        return (own.view(len(self.scale), -1) * self.scale[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            raise AssertionError(f"{func}: only dequantize may be asked for")
        return cls(args[0].codes, args[0].scale, args[0].qmap)


class Codes4(Codes):
    """As OptimState4bit: two codes a byte, the even one in the upper half, all in one row."""

    @staticmethod
    def __new__(cls, codes, scale, qmap, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=BF16)

    def __init__(self, codes, scale, qmap, shape):
        super().__init__(codes, scale, qmap)
        self._shape = shape

    def dequantize(self):
        own = torch.stack([self.codes >> 4, self.codes & 15], -1)
        return (self.qmap[own.int()].view(len(self.scale), -1) * self.scale[:, None]).view(
            self._shape
        )


def codes(shape, seed, signed, kind):
    scale = values((shape.numel() // 128,), seed).abs() * 1e-3
    drawn = values(shape, seed + 1)
    drawn = drawn if signed else drawn.abs()
    if kind == "fp8":
        return Codes(drawn.to(torch.float8_e4m3fn), scale)
    qmap = torch.linspace(-1.0 if signed else 0.0, 1, 256)
    stored = (drawn * 30).abs().to(torch.uint8)
    if kind == "4 bits":
        return Codes4(stored.view(-1)[::2].contiguous(), scale, qmap[::17], shape)
    return Codes(stored, scale, qmap)


def loads_shards():
    """A DTensor whose shard has torchao's codes, loaded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    code = codes(torch.Size((32, 128)), 10 * rank + 1, True, "8 bits")
    square = codes(torch.Size((32, 128)), 10 * rank + 3, False, "8 bits")
    whole = torch.Size((64, 128))

    def split(local):
        own = {"shape": whole, "stride": (128, 1)}
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **own)

    param = torch.nn.Parameter(split(torch.zeros(32, 128)))
    optimizer = torchao.AdamW8bit([param])
    state = {"step": torch.tensor(1.0), "exp_avg": split(code), "exp_avg_sq": split(square)}
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    saved = {"state": {0: state}, "param_groups": [{**group, "params": [0]}]}
    optimizer.load_state_dict(saved)
    found = optimizer.get_unscaled_state(param, "exp_avg").to_local()
    alone = FusedAdam([torch.nn.Parameter(torch.zeros(32, 128))], exp_avg_dtype="block_e4m3")
    (plain,) = alone.param_groups[0]["params"]
    alone.set_scaled_state(plain, "exp_avg", code.dequantize())
    assert_same_bits(found, alone.get_unscaled_state(plain, "exp_avg"))
    return True


LARGE = [(33, 128), (5,)]
KINDS = {"Fp8": "fp8", "4bit": "4 bits"}
NAMES = ["Adam8bit", "AdamW8bit", "AdamFp8", "AdamWFp8", "Adam4bit", "AdamW4bit", "_AdamW"]
IN_BLOCKS = NAMES[:-1]
each_class = pytest.mark.parametrize("name", NAMES)


@each_class
def test_lr_is_a_tensor_that_can_be_filled(name):
    found, expected = (getattr(torchao, name)(parameters(LARGE), lr=lr) for lr in (0.5, 0.125))
    for optimizer in (found, expected):
        optimizer.add_param_group({"params": parameters([(7,)]), "lr": 0.25})
    for group, lr in zip(found.param_groups, (0.5, 0.25), strict=True):
        assert_same_bits(group["lr"], torch.tensor(lr))
        group["lr"].fill_(0.125)
    expected.param_groups[1]["lr"] = 0.125  # a number in its place
    train(found, 2)
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


@each_class
def test_torchaos_checkpoints_load_by_their_values(name):
    """Its layout by hand: codes for the large parameter, bf16 for the small one."""
    large, small = parameters(LARGE)
    kind = next((kind for end, kind in KINDS.items() if name.endswith(end)), "8 bits")
    moments = {"exp_avg": codes(large.shape, 1, True, kind)}
    moments["exp_avg_sq"] = codes(large.shape, 3, False, kind)
    plain = {
        "exp_avg": values(small.shape, 5, BF16),
        "exp_avg_sq": values(small.shape, 6, BF16) ** 2,
    }
    step = {"step": torch.tensor(7.0)}
    numbers = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.25}
    group = {"lr": torch.tensor(0.125), **numbers, "amsgrad": False, "params": [0, 1]}
    theirs = {"state": {0: {**step, **moments}, 1: {**step, **plain}}, "param_groups": [group]}
    found = getattr(torchao, name)([large, small])
    found.load_state_dict(theirs)
    expected = getattr(torchao, name)(parameters(LARGE), lr=torch.tensor(0.125), **numbers)
    (own,) = expected.param_groups
    own["step"] = 7
    read = {moment: value.dequantize() for moment, value in moments.items()}
    for param, state in zip(own["params"], (read, plain), strict=True):
        expected.initialize_state(param, False)
        for moment, value in state.items():
            expected.set_scaled_state(param, moment, value.float())
    assert isinstance(theirs["state"][0]["exp_avg"], Codes)
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)


@pytest.fixture
def peer():
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with torch.compiler.set_stance("force_eager"):
        yield optim


@pytest.mark.parametrize("name", [name for name in IN_BLOCKS if "4bit" not in name])
@pytest.mark.sample(2)
def test_exp_avg_sq_is_no_further_from_fp64_than_theirs(name, peer):
    kinds = getattr(torchao, name), getattr(peer, name)
    stopped.assert_no_further(*kinds, lambda state: state["exp_avg_sq"].dequantize())


def test_codes_in_dtensors_load_shard_by_shard(on_ranks):
    assert on_ranks(2, loads_shards) == [True, True]
