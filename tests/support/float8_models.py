"""A model whose weights become fp8, and what two such weights have in common."""

import torch
from bits import assert_same_bits
from torch import nn

from megaopt.float8 import Float8Weight

BF16, FP32 = torch.bfloat16, torch.float32


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
