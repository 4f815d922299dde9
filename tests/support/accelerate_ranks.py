"""Accelerate's way with FSDP2 on CPUs, which Accelerate itself takes on GPUs alone."""

from how_to import as_rank, free_port, script
from ranks import start_ranks


def run_sharded(runs):
    """Runs docs/how-to/accelerate_fsdp2.py on two ranks, once for each list of options."""
    ports = [free_port() for _ in runs]
    start_ranks(_run_rank, (runs, ports), 2)


def _run_rank(rank, runs, ports):
    how_to = script("accelerate_fsdp2")
    build = how_to.build_accelerator
    how_to.build_accelerator = lambda: sharding(build())
    for options, port in zip(runs, ports, strict=True):
        as_rank(rank, port, 2)
        how_to.main(options)


def sharding(accelerator):
    """The accelerator, told that its CPUs are devices on which it shards."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    return accelerator
