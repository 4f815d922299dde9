"""The versions and hardware that a result was made with, for `doctor` and for every record."""

import os
import platform

import torch

import megaopt
from megaopt.recording.environment import driver, installed, processor

GPU = ("cuda_driver", "gpu", "compute_capability", "gpu_memory")


def describe() -> dict[str, str | None]:
    """Return versions and hardware, each as text; None where there is none or it is not known.

    Returns:
        Always the same keys: megaopt, python, torch, triton, cuda_runtime, cuda_driver, gpu (with
        its count where several), compute_capability (of the current GPU, "9.0"), gpu_memory, cpu,
        cores (that this process may use), os.
    """
    gpu: dict[str, str | None] = dict.fromkeys(GPU)
    if torch.cuda.is_available():
        current = torch.cuda.get_device_properties(torch.cuda.current_device())
        count = torch.cuda.device_count()
        gpu = {
            "cuda_driver": driver(),
            "gpu": current.name if count == 1 else f"{count} x {current.name}",
            "compute_capability": f"{current.major}.{current.minor}",
            "gpu_memory": f"{current.total_memory / 2**30:.1f} GiB",
        }
    return {
        "megaopt": megaopt.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "cuda_runtime": torch.version.cuda,
        **gpu,
        "cpu": processor(),
        "cores": str(cores()),
        "os": platform.platform(),
    }


def cores() -> int:
    """Returns the number of cores that this process may use."""
    # a container or a batch system often gives a process fewer cores than the machine has
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
