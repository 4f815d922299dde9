"""GaLoreAdamW on FSDP2's DTensors, on two GPUs over NCCL, beside one of them; on CPUs over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from fsdp2_ranks import (
    Bare,
    give,
    gradients,
    whole,
)
from galore_ranks import NUMBERS, RANKED, Bytes, bytes_by_turns, exact_weights, norm_of_errors
from runs import assert_same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt import GaLoreAdamW

# --- what ranks do


def stepped_on(device, options, steps, shapes):
    """On a device, of this rank's rows where there are ranks: the weights, whole; bytes of steps.

    fp32 weights; a process group has to be there, or not.
    """
    model, found = Bare(shapes).to(device), []
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    params = list(model.parameters())
    optimizer = GaLoreAdamW(params, **{**NUMBERS, **RANKED, **options})
    for step in range(steps):
        give(params, [grad.to(device) for grad in gradients(step, shapes)])
        with Bytes() as counted:
            optimizer.step()
        found.append(counted.count)
    return [weight.cpu() for weight in whole([p.detach() for p in params])], found


def rank_of_two(rank, folder, options, steps, shapes):
    """A process for torch.multiprocessing: steps on a GPU of its own, and leaves what came out."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/meeting", world_size=2, rank=rank)
    torch.save(
        stepped_on(torch.device("cuda", rank), options, steps, shapes), f"{folder}/{rank}.pt"
    )
    dist.destroy_process_group()


STEPS = 8
LARGE = [(1024, 512), (512, 1030), (700, 700), (33,), (4096, 640)]
SMALL = [(24, 10), (7, 6), (9,), (4, 40)]
PLACES = [
    pytest.param("cpu", SMALL, 3, {"stagger": True}, id="cpu", marks=pytest.mark.slow),
    *[
        pytest.param("cuda", LARGE, 16, options, id=f"{'-'.join(map(str, options.values()))}",
                     marks=pytest.mark.gpu)
        for options in (
            {"stagger": False, "kernel": "torch"},
            {"stagger": True, "kernel": "hybrid"},
            {"stagger": True, "kernel": "grouped"},
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("device", "shapes", "rank", "options"), PLACES)
def test_two_ranks_are_off_by_no_more_than_twice_what_one_is(
    device, shapes, rank, options, tmp_path, on_ranks
):
    """Against fp64, by norm, over three refreshes; ranks communicate at refreshes alone."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = {**options, "rank": rank}
    given = (options, STEPS, shapes)
    if device == "cuda":
        torch.multiprocessing.spawn(rank_of_two, (str(tmp_path), *given), nprocs=2)
        runs = [torch.load(tmp_path / f"{own}.pt") for own in range(2)]
    else:
        runs = on_ranks(2, stepped_on, torch.device("cpu"), *given)
    alone, nothing = stepped_on(torch.device(device), options, STEPS, shapes)
    exact = exact_weights(STEPS, options["stagger"], shapes, rank)
    layout = 2, 1, shapes, rank
    sent = [bytes_by_turns(STEPS, options["stagger"], place, *layout) for place in range(2)]
    assert nothing == [0] * STEPS
    bound = 2 * norm_of_errors(matrices(alone), exact)
    assert 0 < bound < 1e-3 * norm_of_errors(exact, [torch.zeros(())] * len(exact))
    for (weights, bytes_of_steps), expected in zip(runs, sent, strict=True):
        assert norm_of_errors(matrices(weights), exact) <= bound
        assert bytes_of_steps == expected
        assert_same(weights, runs[0][0])
    assert options["stagger"] or sent[0][1] == sent[0][2] == 0


def matrices(weights):
    return [weight for weight in weights if weight.dim() == 2]
