"""GaLoreAdamW in Megatron's distributed optimizer, and alone on whole weights: what runs leave."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_ranks import raised_by
from megatron_gpt import Case, Trainer, random_gradients
from unfused_torch import BETAS, EPS

from megaopt import GaLoreAdamW
from megaopt.commands.regression.megatron.optimizer import leaves
from megaopt.kernels.galore import rule
from megaopt.kernels.matrix import bucket
from megaopt.params.view import EMBEDDING

KEPT = ("projection", "captured_energy")
MOMENTS = ("exp_avg", "exp_avg_sq")


def galore_case(own=None, options=None, **settings):
    """Of a GPT whose matrices are of 32 rows and columns, or more."""
    given = {"rank": 4, "update_proj_gap": 4, **(own or {})}
    settings = {"overlap": False, "clip_grad": 0.0, **settings}
    return Case("main_shards", options={"galore": given, **(options or {})}, **settings)


def grads_of(step, params):
    return [grad.bfloat16() for grad in random_gradients(step, params)]


def train(trainer, steps, first=0):
    for step in range(first, first + steps):
        trainer.step_given(grads_of(step, trainer.chunk.module.parameters()))


def stepped(case, steps=10):
    trainer = Trainer(case)
    train(trainer, steps)
    return snapshot(trainer)


def parts_of_matrices(case):
    """Of each matrix of which this rank has elements, how large a part they are."""
    (leaf,) = leaves(Trainer(case).optimizer)
    pairs = leaf.shards.items()
    return [shard.numel() / model.numel() for model, shard in pairs if model.dim() == 2]


def clipped(case, steps=5):
    """The same, and by what gradients were to be multiplied."""
    trainer, factors = Trainer(case), []
    for step in range(steps):
        grads = grads_of(step, trainer.chunk.module.parameters())
        _, norm, _ = trainer.step_given(grads)
        factors.append(torch.tensor([case.clip_grad / (norm + 1e-6)]))
    return snapshot(trainer), factors


def saved(case, steps, folder, form):
    """What is saved of a run."""
    trainer = Trainer(case)
    train(trainer, steps)
    trainer.save(folder, form)
    return snapshot(trainer)


def gone_on(case, first, steps, folder, form):
    """What is loaded into a run that had gone another way, and what steps then make of it."""
    trainer = Trainer(case)
    train(trainer, 1, 20)
    trainer.load(folder, form, first)
    loaded = snapshot(trainer)
    train(trainer, steps, first)
    return loaded, snapshot(trainer)


def snapshot(trainer):
    """For each weight, whole: itself, its master and its moments; what this rank keeps."""
    trainer.gather()
    own, kept = {}, {}
    models = dict(trainer.chunk.module.named_parameters())
    for leaf in leaves(trainer.optimizer):
        shards = [shard for group in leaf.fused.param_groups for shard in group["params"]]
        names = {id(leaf.shards.get(model)): name for name, model in models.items()}
        for shard in shards:
            state = leaf.fused.state[shard]
            name = names.get(id(shard)) or name_of_empty(shard, models)
            kept[name] = {key: state[key].clone() for key in KEPT if key in state}
            master = state["master_param"]
            parts = {"master": shard if master is None else master}
            parts |= {key: state[key] for key in MOMENTS}
            own[name] = {key: part.detach().clone().view(-1) for key, part in parts.items()}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {
        name: {
            "weight": model.detach().clone(),
            **{key: torch.cat([rank[name][key] for rank in ranks]) for key in own[name]},
            **kept[name],
        }
        for name, model in models.items()
    }


def name_of_empty(shard, models):
    """The weight of which this rank has nothing: it is in the same place of memory."""
    memory = shard.untyped_storage().data_ptr()
    (name,) = [
        name for name, model in models.items()
        if model.untyped_storage().data_ptr() == memory
        and model.storage_offset() == shard.storage_offset()
    ]  # fmt: skip
    return name


def alone(case, steps=10, factors=None):
    """The same of GaLoreAdamW without Megatron, of the same weights; factors: clip coefficients."""
    trainer = Trainer(case)
    module, options = trainer.chunk.module, dict(case.options)
    (leaf,) = leaves(trainer.optimizer)
    order = [param for buffer in trainer.chunk.buffers for param in buffer.params]
    models, groups = dict(module.named_parameters()), []
    params = {name: torch.nn.Parameter(model.detach().clone()) for name, model in models.items()}
    for name, model in models.items():
        is_matrix = model.dim() == 2 and not getattr(model, EMBEDDING, False)
        decay = leaf.param_groups[leaf.model_param_group_index_map[model][0]]["weight_decay"]
        numbers = [next(i for i, each in enumerate(order) if each is model)]
        groups.append({"params": [params[name]], "weight_decay": decay, "param_numbers": numbers})
        if not is_matrix:
            groups[-1]["rank"] = None
    optimizer = GaLoreAdamW(
        groups, lr=case.lr, betas=BETAS, eps=EPS, dtype=torch.float32, use_decoupled_grad=True,
        **options.pop("galore"), **options,
    )  # fmt: skip
    for step in range(steps):
        for param, grad in zip(params.values(), grads_of(step, params.values()), strict=True):
            param.decoupled_grad = grad.float() if case.fp32_grads else grad
        optimizer.step(clip_coefficient=None if factors is None else factors[step])
    found = {}
    for name, param in params.items():
        state = optimizer.state[param]
        master = state["master_param"]
        flat = {"master": param if master is None else master}
        flat |= {key: state[key] for key in MOMENTS}
        found[name] = {
            "weight": param.detach(),
            **{key: value.detach().view(-1) for key, value in flat.items()},
            **{key: state[key] for key in KEPT if key in state},
        }
    return found


PLACES = {
    "exchange": (bucket, "unpacked"),
    "refresh": (rule, "refreshed"),
    "update": (rule, "projected_back"),
}
CHANGED = {
    "gap": {"update_proj_gap": 1},
    "rank": {"rank": None},
    "a rank that saves nothing": {"rank": 1000},
    "lr": {"lr": 0.5},
    "a number for parameters": {"params": 5},
}
EDITED = {
    "no tensor": lambda params: params.__setitem__(0, "weight"),
    "a parameter less": lambda params: params.__delitem__(0),
}
"""What becomes of the parameters of the first group that is stepped, Megatron's or ours."""


@contextlib.contextmanager
def changed_groups(groups, values):
    kept = [dict(group) for group in groups]
    for group in groups:
        group.update(values)
    try:
        yield
    finally:
        for group, own in zip(groups, kept, strict=True):
            group.update(own)


@contextlib.contextmanager
def edited(params, edit):
    kept = list(params)
    edit(params)
    try:
        yield
    finally:
        params[:] = kept


def said_of(kind, case, steps=3):
    """The error of a step in which the last rank does something else, and what was before and is.

    kind: it lacks a "gradient", or fails in the "exchange", in a "refresh" or at an "update"; or
    its groups are CHANGED or EDITED.
    steps: taken before.
    """
    trainer = Trainer(case)
    train(trainer, steps)
    (leaf,) = leaves(trainer.optimizer)
    leaf.fused.initialize_states()
    before = snapshot(trainer)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    trainer.chunk.zero_grad_buffer()
    params = list(trainer.chunk.module.parameters())
    for param, grad in zip(params, grads_of(steps, params), strict=True):
        param.main_grad.copy_(grad)
    trainer.optimizer.prepare_grads()
    shard = next(iter(leaf.shards.values()))
    failing = contextlib.nullcontext()
    if is_last and kind == "gradient":
        failing = mock.patch.object(shard, "decoupled_grad", None)
    elif is_last and kind in CHANGED:
        failing = changed_groups(trainer.optimizer.param_groups, CHANGED[kind])
    elif is_last and kind in EDITED:
        failing = edited(leaf.fused.param_groups[0]["params"], EDITED[kind])
    elif is_last:
        failing = mock.patch.object(*PLACES[kind], side_effect=RuntimeError("no memory"))
    with failing:
        error = raised_by(trainer.optimizer.step_with_ready_grads)
    after = snapshot(trainer)
    train(trainer, 1, steps)
    return error, before, after, snapshot(trainer)


def error_of(case, folder=None, form=None):
    """The error of making the optimizer, or of loading into it."""

    def made():
        trainer = Trainer(case)
        if folder is not None:
            trainer.load(folder, form, 0)

    return raised_by(made) or "no error"
