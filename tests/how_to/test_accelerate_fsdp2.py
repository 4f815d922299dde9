import pytest
import torch
from how_to import as_rank, free_port, mean_of_two_ranks, needs, run_ranks, script
from ranks import start_ranks
from runs import assert_same
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

# Accelerate's way with FSDP2 on CPUs, which Accelerate itself takes on GPUs alone.


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


pytestmark = needs("accelerate")

KINDS = ["adam", "adam_8_bit", "muon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of each kind, a straight run and one that goes on from its third step."""
    folder = tmp_path_factory.mktemp("accelerate")
    runs = []
    for kind in KINDS:
        straight, own = folder / kind / "straight", ["--optimizer", kind]
        runs.append(["--folder", str(straight), *own])
        resumed = ["--folder", str(folder / kind / "resumed"), *own]
        runs.append([*resumed, "--resume", str(straight / "step-3")])
    run_sharded(runs)
    return folder


def whole(folder, tmp_path):
    """What Accelerate saved of shards, as whole tensors."""
    found = {}
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp_to_torch_save(folder / "step-6" / name, tmp_path / name)
        found |= torch.load(tmp_path / name)
    return found


def plain_loop(kind):
    model, optimizer = mean_of_two_ranks(script("accelerate_fsdp2"), kind=kind)
    states = get_optimizer_state_dict(model, optimizer)
    return {"model": dict(model.state_dict()), "optimizer": states}


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_bits_of_a_plain_loop(folder, kind, tmp_path):
    assert_same(whole(folder / kind / "straight", tmp_path), plain_loop(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_straight(folder, kind, tmp_path):
    assert not (folder / kind / "resumed" / "step-3").exists()
    resumed = whole(folder / kind / "resumed", tmp_path)
    assert_same(resumed, whole(folder / kind / "straight", tmp_path))


def test_the_script_runs_as_it_is_printed(tmp_path):
    """On CPUs, under DistributedDataParallel."""
    run_ranks("accelerate_fsdp2", [["--folder", str(tmp_path)]])
    found = load_file(tmp_path / "step-6" / "model.safetensors")
    model, _ = mean_of_two_ranks(script("accelerate_fsdp2"))
    assert_same(found, dict(model.state_dict()))
