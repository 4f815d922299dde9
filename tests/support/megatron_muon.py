"""Megatron's Muon, its own or FusedMuon, on the small GPT: what a run leaves."""

import copy
import importlib
import re
import warnings
from functools import partial
from pathlib import Path

import megatron_gpt
import torch
import torch.distributed as dist
from fsdp2_ranks import raised_by
from megatron_gpt import (
    HAS_KEYS,
    Trainer,
    build_chunks,
    hash_of,
    make_groups,
    megatron,
    optimizer_config,
    random_gradients,
    seen,
    whole,
)
from unfused_torch import UnfusedAdam, UnfusedAdamW

from megaopt.commands.regression.megatron.emerging import megatrons_muon
from megaopt.commands.regression.megatron.optimizer import leaves
from megaopt.integration import megatron as ours
from megaopt.params.dtensor import local_of

PAGE = Path(__file__).parents[2] / "docs/how-to/megatron.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def muon_config(**more):
    """What a Case's config says to take Muon."""
    return {"optimizer": "muon", "use_distributed_optimizer": False, **more}


def layer_wise(**more):
    name = (
        {"use_layer_wise_distributed_optimizer": True} if HAS_KEYS else {"optimizer": "dist_muon"}
    )
    return muon_config(**name, **more)


def cut(**more):
    """Matrices are in shards of the ordinary distributed optimizer."""
    return {"config": muon_config(**{**more, "use_distributed_optimizer": True}), "shards": True}


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


train = partial(megatron_gpt.train, kind=MuonTrainer)
train_and_save = partial(megatron_gpt.train_and_save, kind=MuonTrainer)
load_and_train = partial(megatron_gpt.load_and_train, kind=MuonTrainer)


def step_given_gradients(case, steps=3):
    """What a run has whose gradients are the same on any number of ranks."""
    trainer = MuonTrainer(case)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    return seen(trainer)


def step_clipped(case, factors=(1.0, 1.0, 1.0)):
    """What a run has, and by what its gradients, which are multiplied before, are to be clipped."""
    trainer, found = MuonTrainer(case), []
    for step, factor in enumerate(factors):
        grads = random_gradients(step, trainer.chunk.module.parameters())
        _, norm, _ = trainer.step_given([grad * factor for grad in grads])
        found.append(torch.tensor(case.clip_grad / (norm + 1e-6)).item())
    return seen(trainer), found


def matrices_made(case, steps=2):
    """What a run has, and for each of Muon's weights among how many ranks the work is divided."""
    trainer = MuonTrainer(case)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    muons = [leaf.fused for leaf in leaves(trainer.optimizer) if hasattr(leaf.fused, "describe")]
    return seen(trainer), [each.ranks for muon in muons for each in muon.describe()]


def names_owned(case):
    """The weights that this rank steps."""
    return [name for name, *_ in MuonTrainer(case).parts()]


def load_weights_first(case):
    """A step of a run, and the same of one into which the run before it was loaded."""
    trainer, other = MuonTrainer(case), MuonTrainer(case)
    trainer.train(2)
    other.chunk.module.load_state_dict(trainer.chunk.module.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    other.done = trainer.done
    return [(each.step(), seen(each)) for each in (trainer, other)]


PATCHED = ("", ".layer_wise_optimizer", *(() if HAS_KEYS else (".muon",)))
"""Modules of Megatron's optimizers in which names stand for ours while one is made."""


def mark(layer):
    layer.mlp.linear_fc1.weight.use_muon = False


def take_another_attention(layer):
    layer.self_attention.__class__ = type("Other", (torch.nn.Module,), {})


def take_other_rows(layer):
    layer.self_attention.linear_qkv.weight = torch.nn.Parameter(torch.zeros(40, 32))


def fuse_experts(layer):
    """As 0.16's GroupedMLP has them."""
    layer.mlp.num_local_experts = 2
    layer.mlp.register_parameter("weight1", layer.mlp.linear_fc1.weight)


CHANGES = {
    each.__name__: each for each in (mark, take_another_attention, take_other_rows, fuse_experts)
}
"""What is done to the first layer before its optimizer is made."""


def error_of(case, change=None):
    """The error of making the optimizer, and which names of Megatron's are others after it."""
    modules = [importlib.import_module(f"megatron.core.optimizer{name}") for name in PATCHED]
    before = [dict(vars(module)) for module in modules]
    _, chunks = prepared(case)
    if change is not None:
        CHANGES[change](chunks[0].module.decoder.layers[0])
    error = raised_by(lambda: build(case, chunks)) or "no error"
    left = [
        name
        for module, kept in zip(modules, before, strict=True)
        for name, value in kept.items()
        if vars(module)[name] is not value
    ]
    return error, left


def prepared(case):
    make_groups(case)
    return build_chunks(case)


def warnings_of(case):
    """What is told while the optimizer is made."""
    _, chunks = prepared(case)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        build(case, chunks)
    return [str(each.message) for each in told if "muon" in str(each.message)]


def shapes_of(case, sizes):
    """The matrices of each parameter of Muon's, where the first layer's MLP says its sizes."""
    _, chunks = prepared(case)
    chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.muon_split_sizes = sizes
    (muon, *_) = leaves(build(case, chunks))
    return [list(each.matrices) for each in muon.fused.describe()]


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


def step_parts(case, steps=3):
    """A hash of each whole weight and its moments after steps of given whole gradients."""
    trainer = MuonTrainer(case)
    group = megatron("parallel_state").get_tensor_model_parallel_group()
    params = list(trainer.chunk.module.parameters())
    for step in range(steps):
        grads = [
            own_part(torch.randn(whole_shape(param, group), generator=generator), param, group)
            for number, param in enumerate(params)
            for generator in [torch.Generator().manual_seed(100 * step + number)]
        ]
        trainer.step_given(grads)
    return joined(trainer)


def save_parts(case, folder, form):
    """The same of a training, which is saved."""
    trainer = MuonTrainer(case)
    trainer.train(2)
    trainer.save(folder, form)
    return joined(trainer)


def load_parts(case, folder, form):
    """The same of what is loaded."""
    trainer = MuonTrainer(case)
    trainer.load(folder, form, 2)
    return joined(trainer)


def joined(trainer):
    """A hash of each whole weight and its moments, of the parts of all ranks."""
    rank = megatron("parallel_state").get_tensor_model_parallel_rank()
    params = dict(trainer.chunk.module.named_parameters())
    own = [(name.partition(" of ")[0], tensors) for name, _, _, tensors in trainer.parts()]
    own += [(name, {"weight": param.detach().view(-1)}) for name, param in params.items()]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (rank, own))
    parts = {}
    for other, held in gathered:
        for name, tensors in held:
            for key, tensor in tensors.items():
                parts.setdefault((name, key), {})[other] = tensor.view(params[name].shape)
    return {
        place: hash_of(together([own[i] for i in sorted(own)], params[place[0]]))
        for place, own in sorted(parts.items())
    }


def together(parts, param):
    dim = getattr(param, "partition_dim", -1)
    return parts[0] if dim < 0 else torch.cat(parts, dim)


def whole_shape(param, group):
    shape, dim = list(param.shape), getattr(param, "partition_dim", -1)
    if dim >= 0:
        shape[dim] *= group.size()
    return shape


def own_part(tensor, param, group):
    dim = getattr(param, "partition_dim", -1)
    return tensor if dim < 0 else tensor.chunk(group.size(), dim)[group.rank()]
