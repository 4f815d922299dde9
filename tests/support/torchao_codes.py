"""States in the layout of torchao's, without torchao: plain, and in DTensors."""

import torch
from bits import assert_same_bits
from runs import BF16, values

from megaopt import FusedAdam
from megaopt.integration import torchao


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
