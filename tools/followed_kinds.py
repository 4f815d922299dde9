"""What tools/moment_fidelity.py follows: our formats of moments, and other libraries' 8 and 4 bits.

Other libraries' moments are read by their own functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from megaopt import FusedAdam
from megaopt.commands.bench.peers import PEERS


def _moments(exp_avg: Any, exp_avg_sq: Any) -> dict[str, Any]:
    return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq, "seed": 5}


OURS = {
    "fp32": _moments(torch.float32, torch.float32),
    "bf16, nearest": _moments(torch.bfloat16, torch.bfloat16),
    "bf16, stochastic": _moments("bfloat16_stochastic", "bfloat16_stochastic"),
    "blocks, nearest": _moments("block_e4m3_nearest", "block_e5m3_nearest"),
    "blocks, stochastic": _moments("block_e4m3", "block_e5m3"),
    "4 bits": _moments("block32_e3m0", "block32_e4m0"),
}


def _ours(optimizer: Any, param: Any, name: str) -> Any:
    return optimizer.get_unscaled_state(param, name)


def _torchao(optimizer: Any, param: Any, name: str) -> Any:
    return optimizer.state[param][name].dequantize()


def _flashoptim(optimizer: Any, param: Any, name: str) -> Any:
    return optimizer.state[param][name].materialize()


def _bitsandbytes(optimizer: Any, param: Any, name: str) -> Any:
    from bitsandbytes.functional import dequantize_blockwise

    own, place = optimizer.state[param], "1" if name == "exp_avg" else "2"
    scales = {"absmax": own["absmax" + place], "code": own["qmap" + place]}
    return dequantize_blockwise(own["state" + place], **scales, blocksize=256)


READERS = {
    "torchao-8bit": _torchao,
    "torchao-fp8": _torchao,
    "torchao-4bit": _torchao,
    "bitsandbytes-8bit": _bitsandbytes,
    "flashoptim-8bit": _flashoptim,
}
"""By the name of a peer, as `megaopt bench` knows it."""


Kind = tuple[Any, Any, dict[str, Any]]
"""Its class, what reads a moment of it, and its options."""


def kinds(device: str) -> tuple[dict[str, Kind], dict[str, str], dict[str, str]]:
    """All that can be followed here, versions of the libraries, and why others are left out."""
    found: dict[str, Kind] = {name: (FusedAdam, _ours, options) for name, options in OURS.items()}
    versions, skipped = {}, {}
    for name, read in READERS.items():
        peer = PEERS[name]
        reason = "needs a GPU" if device == "cpu" else peer.why_not()
        if reason is not None:
            skipped[name] = reason
            continue
        # weights are fp32 here, beside which flashoptim's cannot have more bits
        options = {"master_weight_bits": None} if peer.package == "flashoptim" else {}
        found[name] = (getattr(import_module(peer.module), peer.kind), read, options)
        versions[peer.package] = peer.version()
    return found, versions, skipped
