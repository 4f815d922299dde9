"""The modes of ours that are measured: the formats and contracts of a step."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from megaopt.float8 import RECIPES
from megaopt.kernels.contracts import CONTRACTS
from megaopt.lab.bench.subjects import PEERS, Subject, describe_float8

MASTER: dict[str, Any] = {"dtype": torch.float32}
REMAINDERS = {**MASTER, "store_param_remainders": True}
REMAINDER8 = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
KAHAN = {"master_weights": True, "master_weight_dtype": "kahan_stochastic"}
NO_MASTER = {"master_weights": False, "weight_rounding": "stochastic"}
OF_10_BYTES = ("flashoptim-8bit-no-master", "torchao-8bit", "torchao-fp8", "bitsandbytes-8bit")


def _moments(exp_avg: Any, exp_avg_sq: Any = None) -> dict[str, Any]:
    return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq or exp_avg}


BLOCKS = _moments("block_e4m3", "block_e5m3")
NEAREST_BLOCKS = _moments("block_e4m3_nearest", "block_e5m3_nearest")
BLOCKS_OF_4_BITS = _moments("block32_e3m0", "block32_e4m0")


def _modes(
    name: str,
    options: Mapping[str, Any],
    *against: str,
    described: tuple[str, float] | None = None,
    twins: Mapping[str, str | None] = MappingProxyType({}),
    kind: str = "FusedAdam",
    **more: Any,
) -> Iterator[Subject]:
    """Give the mode under ieee, and under each contract in `twins`, where that contract exists.

    Args:
        name: Under ieee.
        options: Of the optimizer.
        against: The peers that do the same work.
        described: Description and bytes per parameter; None: those of the first peer.
        twins: For a contract the peer whose bits it promises; None where none keeps these formats.
        kind: The optimizer.
        more: Other fields of `Subject`.
    """
    if described is None:
        first = PEERS[against[0]]
        described = (first.description, first.bytes_per_parameter)
    for contract, twin in {"ieee": None, **twins}.items():
        if contract in CONTRACTS:
            yield Subject(
                name=name if contract == "ieee" else f"{contract}:{name}",
                description=described[0],
                options={"contract": contract, **options} if kind == "FusedAdam" else options,
                bytes_per_parameter=described[1],
                kind=kind,
                contract=contract,
                twin=twin,
                against=against,
                **more,
            )


def _as_transformer_engine(name: str, options: Mapping[str, Any]) -> Iterator[Subject]:
    peer = f"transformerengine-{name}"
    return _modes(name, options, peer, twins={"te": peer})


def _float8(name: str, *peers: str) -> Iterator[Subject]:
    """Give the mode of a recipe; its bits under te are those of the first peer.

    With delayed scaling these are of a fused step, which casts fp32 values directly.
    """
    recipe = RECIPES[name]
    described = None if peers else (describe_float8(name), 27)
    twins = {"te": peers[0]} if peers else {}
    for mode in _modes(
        f"fp8-{name}", MASTER, *peers, described=described, twins=twins, recipe=recipe
    ):
        direct = recipe.quantizer.keeps_scale and mode.contract == "te"
        yield replace(mode, recipe=replace(recipe, direct=direct))


def _all() -> Iterator[Subject]:
    yield from _as_transformer_engine("bf16", MASTER)
    yield from _as_transformer_engine("bf16-remainders", REMAINDERS)
    yield from _as_transformer_engine("bf16-moments", MASTER | _moments(torch.bfloat16))
    remainders = REMAINDERS | _moments(torch.bfloat16)
    yield from _modes("bf16-remainders-moments", remainders, "flashoptim-32bit-master")
    yield from _as_transformer_engine("fp16-moments", MASTER | _moments(torch.float16))
    yield from _as_transformer_engine("fp8-moments", MASTER | _moments(torch.float8_e4m3fn))
    engine = "transformerengine-fp8"
    yield from _float8("delayed", f"{engine}-delayed", f"{engine}-delayed-cast")
    yield from _float8("current", f"{engine}-current")
    yield from _float8("block_128x128", f"{engine}-block_128x128")
    yield from _float8("mxfp8")
    # without fp32 masters, moments in 8 bits beside the codes
    masters = (
        ("stochastic", "stochastic", 8, NO_MASTER),
        ("remainder8", "8 more bits beside each", 10, REMAINDER8),
    )
    for name, (key, rounding, size, options) in itertools.product(RECIPES, masters):
        matrices, *_ = describe_float8(name).split(",")
        words = f"{matrices}, {rounding}, no fp32 masters, 8-bit moments"
        row = (f"fp8-{name}-{key}-8bit", options | BLOCKS)
        yield from _modes(*row, described=(words, size), recipe=RECIPES[name])
    words = "bf16 weights without masters and bf16 moments, stochastic"
    moments = NO_MASTER | _moments("bfloat16_stochastic")
    yield from _modes("stochastic", moments, described=(words, 14))
    words = "bf16 weights, 24-bit masters, stochastic"
    yield from _modes("remainder8_stochastic", REMAINDER8, described=(words, 24))
    words = "bf16 weights, Kahan compensation, stochastic"
    yield from _modes("kahan_stochastic", KAHAN, described=(words, 26))
    words = "Lion, bf16 weights, fp32 masters"
    yield from _modes("lion", MASTER, described=(words, 20), kind="FusedLion")
    words = "SGD with momentum, bf16 weights, fp32 masters"
    momentum = MASTER | {"momentum": 0.9}
    yield from _modes("sgd", momentum, described=(words, 20), kind="FusedSGD")
    te = {"te": None}
    yield from _modes("blocks", NO_MASTER | BLOCKS, *OF_10_BYTES, twins=te)
    yield from _modes("blocks-nearest", NO_MASTER | NEAREST_BLOCKS, *OF_10_BYTES, twins=te)
    yield from _modes("remainder8_stochastic-blocks", REMAINDER8 | BLOCKS, "flashoptim-8bit")
    peer = "flashoptim-8bit-32bit-master"
    yield from _modes("bf16-remainders-blocks", REMAINDERS | BLOCKS, peer)
    peers: tuple[str, ...] = ("flashoptim-lion-8bit", "bitsandbytes-lion-8bit")
    options = {**NO_MASTER, "exp_avg_dtype": "block_e4m3"}
    yield from _modes("lion-blocks", options, *peers, kind="FusedLion")
    peers = ("flashoptim-sgd-8bit", "bitsandbytes-sgd-8bit")
    options = {**NO_MASTER, "momentum_buffer_dtype": "block_e4m3", "momentum": 0.9}
    yield from _modes("sgd-blocks", options, *peers, kind="FusedSGD")
    yield from _modes("blocks-4bit", NO_MASTER | BLOCKS_OF_4_BITS, "torchao-4bit")
    peers = ("torch-fused-fp32", "torch-foreach-fp32", "apex-fp32")
    yield from _modes("fp32", {}, *peers, twins={"torch": peers[0]}, weight_dtype=torch.float32)


MODES = {mode.name: mode for mode in _all()}
