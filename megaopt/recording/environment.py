"""The environment of a run: versions, hardware, source and the variables that decide bits."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("CUDNN_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC", "MKL_CBWR"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_BUFFSIZE"),
    *("NCCL_COLLNET_ENABLE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS"),
    *("NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_TOPO_FILE"),
    *("NVIDIA_TF32_OVERRIDE", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
    *("NVTE_BWD_LAYERNORM_SM_MARGIN", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"),
    *("NVTE_TORCH_COMPILE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTHONHASHSEED"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_MAX_AUTOTUNE"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables of the environment that change which kernels, orders and precisions are taken."""
PATIENCE = 60
"""Seconds that git and nvidia-smi are waited for."""


def describe() -> dict[str, Any]:
    """Returns versions, hardware, source and settings; None for what is absent or not known."""
    on_gpu, diff = torch.cuda.is_available(), output("git", "diff", "HEAD")
    nccl: Any = torch.cuda.nccl  # which has no types
    has_nccl = on_gpu and torch.distributed.is_nccl_available()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cublas": installed("nvidia-cublas-cu12") or installed("nvidia-cublas"),
        "driver": driver() if on_gpu else None,
        "card": torch.cuda.get_device_name() if on_gpu else None,
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
        "TransformerEngine": installed("transformer-engine"),
        "python": platform.python_version(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "git commit": output("git", "rev-parse", "HEAD"),
        # None where nothing differs from the commit
        "diff hash": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def installed(distribution: str) -> str | None:
    """Returns the version of a package; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def driver() -> str | None:
    """Returns the version of the first card's driver."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return (output(*query) or "").split("\n")[0].strip() or None


def processor() -> str | None:
    """Returns the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or None


def output(*command: str) -> str | None:
    """Returns what a command prints; None where it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
