"""Megatron's shards with moments in blocks, and the same steps of whole parameters without it."""

import contextlib
import importlib
from pathlib import Path

import megatron_gpt
import torch
import torch.distributed as dist
from megatron_gpt import BETAS, EPS, Trainer, hash_of
from mutants import mutant

from megaopt import FusedAdam

SIZES = {"hidden": 106, "inner": 38, "clip_grad": 0.0}
"""Most weights have no whole number of blocks; those of 38 x 106 are small, by 68 elements. 2 ranks
and 3 cut blocks of 128. Without clipping, whose norm has other bits on other numbers of ranks."""
MOMENTS = ("exp_avg", "exp_avg_sq")


# --- steps


def magnitudes(numel):
    """By windows of 64, each of which is too small for a scale of the one before: halves of one
    block differ where they have scales of their own, and so do those of two blocks taken as one."""
    windows = torch.tensor([0.0, -15.0, -30.0, -45.0]).repeat_interleave(64)
    return 2.0 ** windows.repeat(-(-numel // 256))[:numel]


def gradient(step, place, shape):
    """The same whatever the number of ranks; place: of the parameter in the model."""
    generator = torch.Generator().manual_seed(100 * step + place)
    values = torch.randn(shape, generator=generator)
    return values * magnitudes(values.numel()).view(shape)


def lr_of(step, group):
    return 1e-2 / (1 + step) + 1e-4 * group


def take_steps(trainer, steps):
    params = list(trainer.chunk.module.parameters())
    for step in range(trainer.done, trainer.done + steps):
        for index, group in enumerate(trainer.optimizer.param_groups):
            group["lr"], group["weight_decay"] = lr_of(step, index), 0.1 * group["wd_mult"]
        trainer.step_given(gradient(step, n, param.shape) for n, param in enumerate(params))
    trainer.done += steps


def content_of(optimizer, param):
    """Weight and state of a parameter or shard, and what its moments stand for."""
    found = {"weight": param.detach().clone().view(-1)}
    for name, tensor in optimizer.state[param].items():
        found[name] = tensor.clone().view(-1)
    for name in MOMENTS:
        value = optimizer.get_unscaled_state(param, name)
        found[f"value of {name}"] = value.clone().view(-1)
    return found


def seen(trainer):
    """This rank's parts, by name: where they begin and what they have; all whole weights."""
    trainer.gather()
    (optimizer,) = trainer.optimizer.chained_optimizers
    parts = {}
    for model, shard in optimizer.shards.items():
        start = optimizer._get_model_param_range_map(model)["param"].start
        parts[trainer.name(model)] = start, content_of(optimizer.fused, shard)
    named = trainer.chunk.module.named_parameters()
    return {"parts": parts, "weights": {name: hash_of(param.data) for name, param in named}}


def train(case, steps):
    trainer = Trainer(case)
    take_steps(trainer, steps)
    return seen(trainer)


# --- the same without Megatron's optimizer


def plain_optimizer(case, trainer, **options):
    """Of whole copies of the parameters, and these by name."""
    (optimizer,) = trainer.optimizer.chained_optimizers
    order = [param for buffer in optimizer.buffers for param in buffer.params]
    groups = [{"params": [], "weight_decay": 0.1 * g["wd_mult"]} for g in optimizer.param_groups]
    params = {}
    for name, param in trainer.chunk.module.named_parameters():
        params[name] = torch.nn.Parameter(param.detach().clone())
        params[name].megaopt_whole_shape = tuple(param.shape)  # flat, as Megatron's shards are
        params[name].megaopt_number = next(i for i, each in enumerate(order) if each is param)
        groups[optimizer.model_param_group_index_map[param][0]]["params"].append(params[name])
    options = {"master_weights": True, "use_decoupled_grad": True, **case.options, **options}
    return FusedAdam(groups, betas=BETAS, eps=EPS, **options), params


def take_plain_steps(optimizer, params, first, steps):
    for step in range(first, first + steps):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = lr_of(step, index)
        for place, param in enumerate(params.values()):
            param.decoupled_grad = gradient(step, place, param.shape)
        optimizer.step()


def whole(case, stops):
    """What each parameter has after so many steps, for each of `stops`."""
    optimizer, params = plain_optimizer(case, Trainer(case))
    found, done = {}, 0
    for stop in stops:
        take_plain_steps(optimizer, params, done, stop - done)
        found[stop] = {name: content_of(optimizer, param) for name, param in params.items()}
        done = stop
    return found


def exact(case, first):
    """The moments, in fp32, after one more step from the values that `first` steps leave."""
    before = whole(case, (first,))[first]
    fp32 = dict.fromkeys((f"{name}_dtype" for name in MOMENTS), torch.float32)
    optimizer, params = plain_optimizer(case, Trainer(case), **fp32)
    optimizer.initialize_states()
    for name, param in params.items():
        for moment in MOMENTS:
            optimizer.set_scaled_state(param, moment, before[name][f"value of {moment}"])
    take_plain_steps(optimizer, params, first, 1)
    return {name: content_of(optimizer, param) for name, param in params.items()}


# --- checkpoints


def save(case, steps, folder, kind):
    trainer = Trainer(case)
    take_steps(trainer, steps)
    if kind == "one file":
        groups = trainer.optimizer.state_dict()
        trainer.optimizer.save_parameter_state(f"{folder}/state")
        if dist.get_rank() == 0:
            torch.save(groups, f"{folder}/groups")
        dist.barrier()
    else:
        trainer.save(Path(folder), kind)
    return seen(trainer)


def without_signs_of_zeros(function, *arguments):
    """What a function of megatron_gpt finds, where -0 is 0: moments in blocks that are stored again
    have no -0."""
    kept = megatron_gpt.hash_of
    megatron_gpt.hash_of = lambda tensor: kept(tensor + 0)
    try:
        return function(*arguments)
    finally:
        megatron_gpt.hash_of = kept


def load_and_train(case, done, steps, folder, kind):
    """What a fresh run has that loads a checkpoint, and after so many steps more."""
    trainer = Trainer(case)
    if kind == "one file":
        groups = torch.load(f"{folder}/groups", weights_only=False)
        trainer.optimizer.load_state_dict(groups)
        trainer.optimizer.load_parameter_state(f"{folder}/state")
        trainer.done = done
    else:
        trainer.load(folder, kind, done)
    loaded = seen(trainer)
    take_steps(trainer, steps)
    return {"loaded": loaded, "after": seen(trainer)}


# --- faults that are put in


@contextlib.contextmanager
def mutated(path, change, target, names, folder):
    """Within it, names of the module `target` stand for those of a changed copy of a source."""
    source = Path(importlib.import_module(path).__file__)
    module = mutant(source, change, Path(folder))
    owner = importlib.import_module(target)
    kept = {name: getattr(owner, name) for name in names}
    for name in names:
        setattr(owner, name, getattr(module, name))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def with_fault(fault, folder, function, *arguments):
    own = Path(folder) / str(dist.get_rank())
    own.mkdir(parents=True)
    with mutated(*fault, own):
        return function(*arguments)
