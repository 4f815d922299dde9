"""Compiles the kernels for a GPU that is not there: `python gpu_compiler.py` steps on the CPU.

Each launch compiles, loads into nothing and runs nothing. For each kernel that was launched the
last line of the output has, as JSON, what ptxas gave it.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import triton
from muon_cases import FORMS, buffers, formats_of, how_of, stepped
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_engine_fakes import fake
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import megaopt
import megaopt.integration.transformer_engine
from megaopt import FusedAdam, FusedLion, FusedSGD, GaLoreAdamW
from megaopt.float8 import RECIPES
from megaopt.float8.shard import Float8Shard
from megaopt.kernels import backends
from megaopt.kernels.digest.launch import DigestPlan
from megaopt.kernels.formats import GRADS, MASTERS, WEIGHTS
from megaopt.kernels.gather import Gather
from megaopt.kernels.matrix.boxes import Box, BoxCopies, PartCopies
from megaopt.kernels.norm import launch
from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.place import Place
from megaopt.kernels.products.kernel import products_kernel
from megaopt.kernels.products.launch import products, symmetric_products
from megaopt.kernels.products.reference import OPERANDS
from megaopt.kernels.products.tables import TILES, UNEVEN
from megaopt.state import owned

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448
"""Bytes that a program may have on an H100 and an H200."""
SHAPE = (272, 304)
"""Tiles and blocks, whole ones and cut ones."""
WRITTEN = {"write_unscaled_grads": True}

compiled: list[dict[str, object]] = []
scenario = ""


class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        pass


class Utils:
    @staticmethod
    def get_device_properties(device):
        return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132}

    @staticmethod
    def load_binary(name, binary, shared, device):
        used = resources(binary)
        if name in ("products_kernel", "back_strips_kernel", "back_blocks_kernel"):
            used["HGMMA"] = dumped(binary, "--dump-sass").count("HGMMA")
        compiled.append({"scenario": scenario, "kernel": name, **used})
        return len(compiled), 0, used["REG"], used["LOCAL"], 1024

    @staticmethod
    def unload_module(module):
        pass


class Driver:
    launcher_cls = Launcher
    utils = Utils

    def get_current_target(self):
        return HOPPER

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_interface(self):
        return torch.cuda


def dumped(binary, what):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(binary):
    """Registers of a thread and bytes of its stack and local memory, where spills go."""
    text = dumped(binary, "--dump-resource-usage")
    return {key: int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


def plain(count=3, shape=SHAPE):
    return [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for _ in range(count)]


def float8(recipe):
    layer = torch.nn.Linear(*reversed(SHAPE), bias=False).bfloat16()
    return list(megaopt.to_float8(layer, recipe).parameters())


def foreign(recipe):
    return [fake(*float8(recipe))]


def sharded(recipe):
    (weight,) = float8(recipe)
    return [Float8Shard(weight, 0, 12345)]


def step(name, params, clip_norm=None, grad_scale=None, kind=FusedAdam, **options):
    """A step of an optimizer, whose launches are compiled."""
    global scenario
    scenario = name
    optimizer = kind(params, lr=1e-3, weight_decay=0.1, backend="triton", **options)
    optimizer.grad_scale = grad_scale
    for param in params:
        param.grad = torch.ones(param.shape, dtype=torch.bfloat16)
    optimizer.step(clip_norm=clip_norm)


def recorded():
    """The passes that a recording makes, whose launches are compiled."""
    global scenario
    scenario = "recorded"
    tensors = [param.detach() for param in plain()]
    places = [Place(0), Place(0, 3), Place(0, 0, 8, 16)]
    DigestPlan(tensors, places).add(tensors, torch.zeros(3, 3, dtype=torch.int64))
    Gather(tensors, [[0, 5]] * 3, launches=True)(tensors)


def copied():
    """Boxes within a memory, and parts of tensors into it, as ranks exchange them."""
    global scenario
    scenario = "copied"
    memory, part = torch.zeros(4096, dtype=torch.uint8), torch.zeros(64, dtype=torch.bfloat16)
    BoxCopies([Box(0, 512, 4, 9, 9, 16), Box(64, 1024, 1, 40, 40, 40)], memory.device).copy(memory)
    parts = PartCopies([256], [part.numel()], memory.device)
    parts.look(numpy.array([part.data_ptr()]), memory)
    parts.copy(memory)


def multiplied(dtype, tile):
    """Products of a list, and symmetric ones."""
    global scenario
    scenario = f"products, {dtype}, {tile}"
    size = 250 if tile is UNEVEN else 256
    whole = torch.zeros(size, size, dtype=dtype)
    products([whole], [whole], launches=True, tile=tile, out_dtype=torch.bfloat16)
    if tile.rows == 128:
        out = torch.zeros(size, size, dtype=torch.bfloat16)
        symmetric_products([whole], [out], add=[out], launches=True, tile=tile)


def muon(form, **how):
    """A clipped step of matrices, wide, tall and square."""
    global scenario
    scenario = f"muon, {form}, {how}"
    formats = formats_of(
        how_of(form, **how), (WEIGHTS["bfloat16"], MASTERS["float32"]), GRADS["bfloat16"]
    )
    shapes = [SHAPE, SHAPE[::-1], (256, 256)]
    own = buffers(formats, shapes)
    kept = [{"variance_neuron": torch.zeros(rows)} for rows, _ in shapes]
    stepped("triton", formats, shapes, own, "cpu", torch.ones(1, 5), steps=1, kept=kept)


def muon_whose_products_do_not_compile():
    """A step raises their error, and so does the next one."""
    planted = {"side_effect": RuntimeError("planted")}
    with mock.patch.object(products_kernel, "compile", **planted):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="planted"):
                muon("gram fp16")


def twice(tensor, op=dist.ReduceOp.SUM, group=None):
    """An all_reduce of two ranks that have the same."""
    if op == dist.ReduceOp.SUM:
        tensor.mul_(2)


def main():
    assert not INTERPRETED
    driver.set_active(Driver())
    backends.Triton.why_not = lambda self, device: None
    owned.why_not = lambda backend, contract, device: None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.all_reduce = twice
    masters = {"dtype": torch.float32}
    fp16 = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
    fp8 = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}
    for contract in ("ieee", "te", "torch"):
        step(f"{contract}", plain(), contract=contract, **masters)
    step("clipped", plain(), clip_norm=1.0, **masters)
    step("clipped, rounded", plain(), clip_norm=1.0, round_scaled_grads=True, **masters)
    scaled = {"grad_scale": torch.full((), 1024.0), **masters}
    for contract in ("te", "torch"):
        step(f"unscaled {contract}, written", plain(), contract=contract, **scaled, **WRITTEN)
    step("fp16 moments, unscaled, written", plain(), **scaled, **WRITTEN, **fp16)
    step("blocks, unscaled, written", float8("mxfp8"), **scaled, **WRITTEN)
    step("remainders", plain(), store_param_remainders=True, **masters)
    step("fp16 moments", plain(), **masters, **fp16)
    for name, recipe in RECIPES.items():
        step(name, float8(recipe), **masters)
        step(f"shard of {name}", sharded(recipe), **masters)
    for name in ("delayed", "mxfp8"):
        step(f"{name} of TransformerEngine", foreign(name), contract="te", **masters)
    step("fp16 moments, fp8 weights", float8("block_128x128"), **masters, **fp16)
    step("fp8 moments, fp8 weights", float8("current"), **masters, **fp8)
    recorded()
    copied()
    for dtype in OPERANDS:
        multiplied(dtype, TILES[1])
    for tile in (TILES[0], *TILES[2:], UNEVEN):
        multiplied(torch.bfloat16, tile)
    muon_whose_products_do_not_compile()
    for form in FORMS:
        muon(form, second_moment="normuon" if form.endswith("bf16") else None)
    step("lion", plain(), kind=FusedLion, **masters)
    step("lion, fp8 moment", plain(), kind=FusedLion, exp_avg_dtype=torch.uint8, **masters)
    step("sgd", plain(), kind=FusedSGD, **masters)
    step("nesterov", plain(), kind=FusedSGD, momentum=0.9, nesterov=True, **masters)
    step("capturable nesterov", plain(), kind=FusedSGD, momentum=0.9, capturable=True, **masters)
    for contract in ("ieee", "torch"):
        step(f"{contract}, amsgrad", plain(), contract=contract, amsgrad=True, **masters)
    drawn = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
    weights = {"master_weights": False, "weight_rounding": "stochastic"}
    step("stochastic", plain(), **weights, **drawn)
    step("stochastic, capturable", plain(), capturable=True, **weights, **drawn)
    for name in ("remainder8", "remainder8_stochastic", "kahan", "kahan_stochastic"):
        step(name, plain(), master_weights=True, master_weight_dtype=name)
    step("stochastic lion", plain(), kind=FusedLion, exp_avg_dtype="bfloat16_stochastic", **masters)
    step("blocks, lion", float8("block_128x128"), kind=FusedLion, **masters)
    galore = {"kind": GaLoreAdamW, "rank": 40}
    grouped = {**galore, "kernel": "grouped"}
    for proj_type in ("right", "left"):
        step(
            f"galore, {proj_type}", plain(), proj_type=proj_type, clip_norm=1.0, **galore, **masters
        )
    for precision in ("tf32", "bf16"):
        step(f"galore, {precision}", plain(), precision=precision, **grouped, **masters)
    own = {**grouped, "rank": 64, "precision": "bf16", "proj_type": "right"}
    step("galore, whole tiles, slabs", plain(shape=(256, 2048)), **own, **masters)
    fused = {**own, "kernel": "fused"}
    step("galore, fused, slabs", plain(shape=(256, 2048)), clip_norm=1.0, **fused, **masters)
    high = {**fused, "rank": 512, "proj_type": "left"}
    for precision in ("bf16", "tf32"):  # by blocks
        step("galore, high rank", plain(shape=(1024, 4096)), **{**high, "precision": precision})
    for launches in (grouped, fused):  # by strips, of factors that are turned, and that are not
        own_way = {**launches, "rank": 64, "precision": "tf32", "proj_type": "left"}
        step("galore, tf32, whole tiles", plain(shape=(256, 2048)), **own_way, **masters)
    step("galore, fused, uneven", plain(), **{**fused, "proj_type": "left", "precision": "tf32"})
    step("galore, remainders", plain(), store_param_remainders=True, **galore, **masters)
    blocks = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
    step("galore, stochastic", plain(), **galore, **weights, **blocks)
    pairs = [("block_e4m3", "block_e5m3"), ("block_int8", "block_e5m3")]
    for signed, unsigned in (*pairs, ("block32_e3m0", "block32_e4m0")):
        moments = {"exp_avg_dtype": signed, "exp_avg_sq_dtype": unsigned}
        step(f"{signed} and {unsigned}", plain(shape=(272, 384)), **weights, **moments)
    own = {"kind": FusedSGD, "momentum": 0.9, "momentum_buffer_dtype": "block_int8"}
    step("block_int8, sgd", plain(shape=(272, 384)), **weights, **own)
    beside = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
    for name, recipe in RECIPES.items():
        for kept, own in (("stochastic", weights), ("remainder8_stochastic", beside)):
            step(f"{name}, {kept}", float8(recipe), **own)
            step(f"{name}, {kept}, blocks", float8(recipe), **own, **blocks)
        step(f"shard of {name}, stochastic", sharded(recipe), **weights)
    step(
        "delayed, remainder8",
        float8("delayed"),
        master_weights=True,
        master_weight_dtype="remainder8",
    )
    step("mxfp8 of TransformerEngine, stochastic", foreign("mxfp8"), **weights)
    launch.total(new_bins(torch.device("cpu")))
    print(json.dumps(compiled))


if __name__ == "__main__":
    sys.exit(main())
