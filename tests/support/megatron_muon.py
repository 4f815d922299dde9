"""Megatron's Muon, its own or FusedMuon, on the small GPT: what a run leaves."""

import importlib
import re
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_gpt import (
    HAS_KEYS,
    Trainer,
    hash_of,
    megatron,
    optimizer_config,
    whole,
)
from unfused_torch import UnfusedAdam, UnfusedAdamW

from megaopt.integration import megatron as ours
from megaopt.kernels.shards import local_of
from megaopt.lab.regression.megatron.emerging import megatrons_muon
from megaopt.lab.regression.megatron.optimizer import leaves

PAGE = Path(__file__).parents[2] / "docs/how-to/megatron.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def build(case, chunks):
    config, options = optimizer_config(case), {"mode": case.plug, **case.options}
    if case.plug is not None and case.as_context:
        take_by_name()
        with ours.plugged_in(**options):
            return megatrons(config, chunks)
    if case.plug is not None:
        return ours.get_megatron_optimizer(config, chunks, **options)
    kept = torch.optim.AdamW, torch.optim.Adam
    torch.optim.AdamW, torch.optim.Adam = UnfusedAdamW, UnfusedAdam
    try:
        with megatrons_muon():
            take_by_name()
            return megatrons(config, chunks)
    finally:
        torch.optim.AdamW, torch.optim.Adam = kept


def megatrons(config, chunks):
    """As Megatron's training asks for an optimizer."""
    if HAS_KEYS:
        return megatron("optimizer").get_megatron_optimizer(config, chunks)
    is_apart = "dist" in config.optimizer
    return globals()[TAKEN](config, chunks, layer_wise_distributed_optimizer=is_apart)


TAKEN = "get_megatron_muon_optimizer"


def take_by_name():
    """As Megatron's training of release 0.16 imports it."""
    if not HAS_KEYS:
        own = importlib.import_module("megatron.core.optimizer.muon")
        globals()[TAKEN] = getattr(own, TAKEN)


class MuonTrainer(Trainer):
    """The states are of whole weights."""

    def make_optimizer(self):
        return build(self.case, self.chunks)

    def states(self):
        """A hash of each fp32 weight and its moments, put together from all ranks."""
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.parts())
        parts = {}
        for name, numel, start, tensors in (part for own in found for part in own):
            _, own = parts.setdefault(name, (numel, {}))
            for key, tensor in own.setdefault(start, tensors).items():
                assert torch.equal(tensor, tensors[key]), (name, key)  # copies on several ranks
        return {
            name: {key: hash_of(whole(numel, own.items(), key)) for key in keys_of(own)}
            for name, (numel, own) in sorted(parts.items())
        }

    def parts(self):
        """Of each weight that this rank steps, all of it or a part: as Trainer's."""
        models = {
            id(getattr(param, "main_param", param)): param for _, param in self.named_parameters()
        }
        found = []
        for leaf in leaves(self.optimizer):
            if hasattr(leaf, "model_param_gbuf_map"):  # the distributed optimizer
                for param, (group, place) in leaf.model_param_group_index_map.items():
                    main = leaf.optimizer.param_groups[group]["params"][place]
                    start = leaf._get_model_param_range_map(param)["param"].start
                    found.append((param, start, {"param": main, **leaf.optimizer.state[main]}))
                continue
            for group in leaf.optimizer.param_groups:
                for main in group["params"]:
                    tensors = {"param": main, **leaf.optimizer.state[main]}
                    found.append((models[id(main)], 0, tensors))
        return [
            (self.name(param), param.numel(), start, flat_copies(tensors))
            for param, start, tensors in found
        ]


def flat_copies(tensors):
    names = ("param", *STATES)
    own = {name: local_of(tensors[name]).detach() for name in names if name in tensors}
    return {name: tensor.clone().view(-1) for name, tensor in own.items()}


def keys_of(parts):
    return next(iter(parts.values())).keys()


def run_the_page(case, part="Muon"):
    """Two steps of the optimizer that a part of the page about Megatron makes."""

    class PageTrainer(MuonTrainer):
        def make_optimizer(self):
            (code,) = BLOCK.findall(PAGE.read_text(encoding="utf-8").split(f"\n## {part}\n")[1])[:1]
            found = {"model_chunks": self.chunks}
            exec(compile(code, f"megatron.md, {part}", "exec"), found)
            return found["optimizer"]

    trainer = PageTrainer(case)
    kinds = [type(leaf.fused).__name__ for leaf in leaves(trainer.optimizer)]
    return {"kinds": kinds, "steps": trainer.train(2)}
