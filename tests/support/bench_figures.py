"""Figures of the benches that nobody measured."""

from megaopt.lab.bench.measure import with_rates

FIGURES = with_rates(
    {
        "tensors": 1, "elements": 1000, "bytes": 28_000, "held_bytes": 14_000, "repetitions": 50,
        "step_ms": 2.0, "step_ms_quartiles": (1.9, 2.1), "copy_bytes": 56_000, "copy_ms": 3.0,
        "copy_ms_quartiles": (2.9, 3.1), "wall_ms": 2.25, "wall_moved_ms": 2.5,
        "kernels": {"step_kernel": 1}, "transfers": {"Memcpy HtoD": 2}, "scratch_bytes": 2**20,
    }
)  # fmt: skip
