"""Megatron's Muon, its own or FusedMuon, on the small GPT: what a run leaves."""

import importlib
import warnings

import torch
import torch.distributed as dist
from emerging_stand_in import megatrons_muon
from megatron_gpt import HAS_KEYS, Trainer, hash_of, megatron, optimizer_config
from unfused_torch import UnfusedAdam, UnfusedAdamW

from megaopt.integration import megatron as ours

STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


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
        return build(self.case, self.chunks)

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
