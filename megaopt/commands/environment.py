"""What a result was made with: versions and hardware, for `doctor` and for every record."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megaopt

__all__ = ["cores", "describe", "installed_version"]


def describe() -> dict[str, str | None]:
    """Return versions and hardware, each as text; None where there is none or it is not known.

    Returns:
        Always the same keys: megaopt, python, torch, triton, cuda_runtime, cuda_driver, gpu (with
        its count where several), compute_capability (of the current GPU, "9.0"), gpu_memory, cpu,
        cores (that this process may use), os.
    """
    return {
        "megaopt": megaopt.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed_version("triton"),
        "cuda_runtime": torch.version.cuda,
        **_gpu(),
        "cpu": _cpu_model(),
        "cores": str(cores()),
        "os": platform.platform(),
    }


def installed_version(distribution: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _gpu() -> dict[str, str | None]:
    if not torch.cuda.is_available():
        return dict.fromkeys(("cuda_driver", "gpu", "compute_capability", "gpu_memory"))
    current = torch.cuda.get_device_properties(torch.cuda.current_device())
    count = torch.cuda.device_count()
    return {
        "cuda_driver": _driver_version(),
        "gpu": current.name if count == 1 else f"{count} x {current.name}",
        "compute_capability": f"{current.major}.{current.minor}",
        "gpu_memory": f"{current.total_memory / 2**30:.1f} GiB",
    }


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or None


def cores() -> int:
    """How many cores this process may use."""
    # a container or a batch system often gives a process fewer cores than the machine has
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
