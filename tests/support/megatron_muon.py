"""Megatron's Muon, its own or FusedMuon, on the small GPT: what a run leaves."""

import importlib
import warnings

import torch
import torch.distributed as dist
from emerging_stand_in import megatrons_muon
from megatron_gpt import (
    HAS_KEYS,
    Trainer,
    hash_of,
    megatron,
    optimizer_config,
    random_gradients,
)
from unfused_torch import UnfusedAdam, UnfusedAdamW

from megaopt.integration import megatron as ours

STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


gather_alike = dist.all_gather


def gather(parts, own, group=None, **others):
    """all_gather of tensors of several sizes, which NCCL can and gloo cannot."""
    most = max(part.numel() for part in parts)
    if all(part.numel() == most for part in parts):
        return gather_alike(parts, own, group, **others)
    padded = [part.new_zeros(most) for part in parts]
    gather_alike(padded, torch.nn.functional.pad(own, (0, most - own.numel())), group)
    for part, whole in zip(parts, padded, strict=True):
        part.copy_(whole[: part.numel()])


def muon_config(**more):
    """What a Case's config says to take Muon."""
    return {"optimizer": "muon", "use_distributed_optimizer": False, **more}


def layer_wise(**more):
    name = {"use_layer_wise_distributed_optimizer": True} if HAS_KEYS else {"optimizer": "dist_muon"}
    return muon_config(**name, **more)


def build(case, chunks):
    config = optimizer_config(case)
    if case.plug is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of blockwise
            return ours.get_megatron_optimizer(config, chunks, mode=case.plug, **case.options)
    kept = torch.optim.AdamW, torch.optim.Adam
    torch.optim.AdamW, torch.optim.Adam = UnfusedAdamW, UnfusedAdam
    try:
        with megatrons_muon():
            if HAS_KEYS:
                return megatron("optimizer").get_megatron_optimizer(config, chunks)
            make = importlib.import_module("megatron.core.optimizer.muon")
            is_apart = "dist" in config.optimizer
            return make.get_megatron_muon_optimizer(
                config, chunks, layer_wise_distributed_optimizer=is_apart
            )
    finally:
        torch.optim.AdamW, torch.optim.Adam = kept


def leaves(optimizer):
    """The optimizers of a chain that have parameters."""
    own = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if own is None else [leaf for each in own for leaf in leaves(each)]


class MuonTrainer(Trainer):
    """The states are of whole weights."""

    def make_optimizer(self):
        dist.all_gather = gather
        return build(self.case, self.chunks)

    def template(self, metadata, is_loading):
        model = self.chunk.module.sharded_state_dict()
        state = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": state}

    def states(self):
        """A hash of each fp32 weight and its moments, from the ranks that hold them."""
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.own_states())
        merged = {}
        for own in found:
            for name, state in own.items():
                assert merged.setdefault(name, state) == state, name
        return merged

    def own_states(self):
        models = {
            id(getattr(param, "main_param", param)): param for _, param in self.named_parameters()
        }
        found = {}
        for leaf in leaves(self.optimizer):
            for group in leaf.optimizer.param_groups:
                for main in group["params"]:
                    state = {k: v for k, v in leaf.optimizer.state[main].items() if k in STATES}
                    tensors = {"param": main, **state}
                    found[self.name(models[id(main)])] = {
                        key: hash_of(tensor) for key, tensor in tensors.items()
                    }
        return found



def seen(trainer):
    return {"weights": trainer.weights(), "states": trainer.states()}


def train(case, steps=3):
    """What a rank sees of a run."""
    trainer = MuonTrainer(case)
    return {"steps": trainer.train(steps), **seen(trainer)}


def train_and_save(case, folder, metadata, steps=2):
    trainer = MuonTrainer(case)
    trainer.train(steps)
    trainer.save(folder, metadata)
    return seen(trainer)


def load_and_train(case, folder, metadata, done=2, steps=2):
    """A fresh run that goes on from a checkpoint: what it has at first, and in the end."""
    trainer = MuonTrainer(case)
    trainer.load(folder, metadata, done)
    loaded = seen(trainer)
    return {"loaded": loaded, "steps": trainer.train(steps), **seen(trainer)}


def step_given_gradients(case, steps=3):
    """What a run has whose gradients are the same on any number of ranks."""
    trainer = MuonTrainer(case)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    return seen(trainer)


def names_owned(case):
    """The weights that this rank steps."""
    return list(MuonTrainer(case).own_states())
