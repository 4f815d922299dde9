"""What ranks record in the tests of layouts: fixed gradients, the same whatever the layout."""

import functools
import operator

import torch
from fsdp2_ranks import SHAPES, Bare, give, gradients, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from megaopt import FusedAdam, Recorder, digest
from megaopt.recording.files import LANES, Recording

BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "ours": lambda params: FusedAdam(params, lr=1e-3, backend="reference"),
    "launched": lambda params: FusedAdam(params, lr=1e-3, backend="triton"),
    "8 bit": lambda params: FusedAdam(
        params,
        lr=1e-3,
        backend="reference",
        exp_avg_dtype="block_e4m3",
        exp_avg_sq_dtype="block_e5m3",
    ),
}


def bare(out, name, is_sharded, replicas=1, shapes=SHAPES, steps=3, keep=()):
    """Records steps of parameters alone."""
    torch.manual_seed(0)  # of which ours take the seed of their random bits
    model = Bare(shapes)
    if is_sharded:
        sharded(model, replicas)
    optimizer = OPTIMIZERS[name](model.parameters())
    with Recorder(model, optimizer, out, keep=keep):
        for step in range(steps):
            give(list(model.parameters()), gradients(step, shapes))
            optimizer.step()


def small(out, is_sharded, is_late=False):
    """Records a model that runs, on a half of each batch where two ranks share it.

    is_late: the recorder hears of the optimizer after the forward, as `megaopt record` does.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    rank = torch.distributed.get_rank() if is_sharded else 0
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.arange(16.0).view(4, 4)
    with Recorder(model, [] if is_late else optimizer, out, level="modules") as recorder:
        model(batch[2 * rank : 2 * rank + 2] if is_sharded else batch).sum().backward()
        if is_late:
            recorder.add_optimizer(optimizer)
        optimizer.step()


def rows(out):
    """A recording's digests of all steps, by step; what no rank has is 0, replicas agree."""
    recording = Recording(out)
    found = {step: recording.digests(step) for step in recording.steps}
    for step in found.values():
        for key, summed in step.items():
            assert summed.missing == 0, key
            assert summed.replicas == (), key
    return {step: {k: s.digest for k, s in rows.items()} for step, rows in found.items()}


def kept(out, step):
    """The bits of all tensors of a step that ranks kept, whole."""
    recording = Recording(out)
    named = [*recording.values, *((n, f"old {q}") for n, q in recording.values if q != "grad")]
    found = {key: recording.kept(step, key) for key in named if not key[1].startswith("old old")}
    assert all(held.all() for _, held in filter(None, found.values()))
    return {key: each[0].tolist() for key, each in found.items() if each is not None}


def batches(out):
    """The digest of the batches of a recording's first step, over all ranks."""
    found = [each[0]["batch"] for each in Recording(out).scalars(1)]
    lanes = [(int(b[:16], 16), int(b[16:], 16)) for rank in found for b in rank]
    return tuple(functools.reduce(operator.add, lane) % LANES for lane in zip(*lanes, strict=True))


def digests_of_shards(whole, placements):
    """The digests of this rank's shards of a tensor, for each placement over two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    return [digest(distribute_tensor(whole, mesh, [each])) for each in placements]
