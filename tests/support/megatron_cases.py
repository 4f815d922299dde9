"""What the ranks of tests/integration/test_megatron.py do beside training."""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from fsdp2_ranks import raised_by
from megatron_gpt import (
    Case,
    Trainer,
    build_model,
    build_optimizer,
    hash_of,
    make_groups,
    megatron,
    random_gradients,
    seen,
)
from megatron_gpt import optimizer_config as make_config

import megaopt
from megaopt.integration import megatron as ours


def step_given_gradients(case, steps=3):
    """The state after steps whose gradients are the same whatever the number of ranks."""
    trainer = Trainer(case)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    return seen(trainer)


def step_with_a_nan(case):
    """Norms and states of two steps, the first with one gradient that is NaN; NaNs are alike."""
    trainer = Trainer(case)
    norms = []
    for step in range(2):
        grads = [*random_gradients(step, trainer.chunk.module.parameters())]
        if step == 0:
            grads[0].view(-1)[0] = torch.nan
        norms.append(trainer.step_given(grads)[1])
    trainer.gather()
    tensors = [param.data for param in trainer.chunk.module.parameters()]
    tensors += [parts[key] for *_, parts in trainer.parts() for key in sorted(parts)]
    counts = [int(tensor.isnan().sum()) for tensor in tensors]
    return [str(norm) for norm in norms], counts, [hash_of(t.nan_to_num(0)) for t in tensors]


def zero_gradients(case):
    """Whether each optimizer is without parameters, after its gradients are zeroed either way."""
    optimizer = Trainer(case).optimizer
    for to_none in (False, True):
        optimizer.zero_grad(set_to_none=to_none)
    return [each.is_stub_optimizer for each in optimizer.chained_optimizers]


def make_states_and_save(case, folder):
    """Each optimizer's init_state_fn, with its config and without; or moments put in by hand."""
    first = []
    for way in ("with config", "without", "by hand"):
        trainer = Trainer(case)
        for each in trainer.optimizer.chained_optimizers:
            if way != "by hand":
                each.init_state_fn(each.optimizer, *([each.config] if way == "with config" else []))
                continue
            for group in each.optimizer.param_groups:
                for param in group["params"]:
                    zeros = torch.zeros(param.shape)
                    each.optimizer.state[param].update(exp_avg=zeros, exp_avg_sq=zeros.clone())
        first.append(trainer.states())
    trainer.save(folder, "dp_reshardable")
    return {"first": first, **seen(trainer)}


def save_groups_never_stepped(case, folder):
    """One group of each optimizer has a step count; what a state dict has, and what is loaded."""
    trainer = Trainer(case)
    for each in trainer.optimizer.chained_optimizers:
        each.optimizer.param_groups[0]["step"] = 1234
    packed = trainer.optimizer.state_dict()
    trainer.save(folder, "dp_reshardable")
    other = Trainer(case)
    other.load(folder, "dp_reshardable", 0)
    found = [packed, other.optimizer.state_dict()]
    found = [each if isinstance(each, list) else [each] for each in found]
    return [
        [group["step"] for part in parts for group in part["optimizer"]["param_groups"]]
        for parts in found
    ]


def edit_main_params(case):
    """As qk-clip does between steps: some main shards are scaled in place."""
    trainer = Trainer(case)
    found = trainer.train(2)
    norms = []
    for _, param in trainer.chunk.module.named_parameters():
        main = getattr(param, "main_param", None)
        if main is not None:
            norms.append(main.norm().item().hex())
            main.data.copy_(main.data * 0.75)
    return {"steps": found + trainer.train(2), "norms": norms, **seen(trainer)}


def reload_weights(case, with_state_dict):
    """Weights are changed behind the optimizer's back, which is then told to read them."""
    trainer = Trainer(case)
    found = trainer.train(1)
    trainer.gather()
    state_dict = None
    if with_state_dict:  # more exact than the weights
        named = trainer.chunk.module.named_parameters()
        state_dict = {name: param.detach().float() * 1.0009765625 for name, param in named}
    for _, param in trainer.chunk.module.named_parameters():
        param.data.mul_(0.5)
    trainer.optimizer.reload_model_params(state_dict)
    return {"steps": found + trainer.train(2), **seen(trainer)}


def load_without_model(case, folder, kind):
    """The optimizer alone is loaded: its masters say what the weights are."""
    trainer = Trainer(case)
    template = trainer.template(kind, True)
    loaded = megatron("dist_checkpointing").load(template, str(folder))
    for _, param in trainer.chunk.module.named_parameters():
        param.data.fill_(3.0)
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    return seen(trainer)


def save_legacy(case, file):
    trainer = Trainer(case)
    trainer.train(2)
    trainer.optimizer.save_parameter_state(file)
    found = {"groups": trainer.optimizer.state_dict(), **seen(trainer)}
    return {"model": trainer.chunk.module.state_dict(), **found}


def load_legacy(case, file, groups, model):
    """Groups and step counts in one file, states in another; the weights first, as Megatron-LM."""
    trainer = Trainer(case)
    trainer.chunk.module.load_state_dict(model)
    trainer.optimizer.load_state_dict(groups)
    trainer.optimizer.load_parameter_state(file)
    trainer.done = 2
    return {**seen(trainer), "steps": trainer.train(2)}


def move_shards(case):
    """Parameters get new memory, as Megatron's offload_to_cpu gives them, and come back."""
    trainer = Trainer(case)
    found = trainer.train(1)
    trainer.gather()
    for each in trainer.optimizer.chained_optimizers:
        for group in each.optimizer.param_groups:
            for param in group["params"]:
                param.data = param.data.clone()
        for state in each.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].clone()
    trainer.optimizer.restore_from_cpu()
    return {"steps": found + trainer.train(2), **seen(trainer)}


def gradients_of(case):
    """Where the step reads gradients: in DDP's buffer, bound once."""
    trainer = Trainer(case)
    trainer.train(1)
    (optimizer,) = trainer.optimizer.chained_optimizers
    storages = {buffer.grad_data.untyped_storage().data_ptr() for buffer in optimizer.buffers}
    first = [shard.decoupled_grad for shard in optimizer.shards.values()]
    before = [grad.clone() for grad in first]
    norm = float(trainer.optimizer.get_grad_norm())
    trainer.train(1)
    second = [shard.decoupled_grad for shard in optimizer.shards.values()]
    trainer.backward()
    kept = [grad.clone() for grad in second]
    trainer.optimizer.step()
    return {
        "dtypes": {grad.dtype for grad in first},
        "in_buffer": {grad.untyped_storage().data_ptr() for grad in first} <= storages,
        "bound_once": all(map(lambda a, b: a is b, first, second)),
        "left_alone": all(map(torch.equal, kept, second)),
        "changed": not all(map(torch.equal, before, second)),
        "clipped": norm > case.clip_grad,
    }


def norm_of_16_bits(case):
    """Steps with a norm whose kernel takes 16 bits, as TransformerEngine's does."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    from megaopt.integration.megatron import distributed

    dtypes = set()

    def l2_norm(size, flag, lists, per_tensor):
        dtypes.update(grad.dtype for grad in lists[0])
        copies = [[grad.float() for grad in each] for each in lists]
        return local_multi_tensor_l2_norm(size, flag, copies, per_tensor)

    clip_grads.l2_norm_impl = distributed.l2_norm_impl = l2_norm
    try:
        return {"steps": Trainer(case).train(3), "dtypes": dtypes}
    finally:
        clip_grads.l2_norm_impl = distributed.l2_norm_impl = local_multi_tensor_l2_norm


def names_of_megatron():
    """Everything that a module of Megatron's optimizers has, by identity."""
    modules = ("optimizer", "optimizer.distrib_optimizer", "optimizer.optimizer")
    return [dict(vars(megatron(name))) for name in modules]


def what_stays(case):
    """Names that are other objects after ours was made, twice, once with an error on the way."""
    Trainer(case)
    before = names_of_megatron()
    config = make_config(case)
    fields = dict(vars(config))
    _, chunk = build_model(case)
    build_optimizer(case, chunk, config)
    after_one = names_of_megatron()
    try:
        with ours.plugged_in(mode=case.plug):
            raise KeyError("on the way")
    except KeyError:
        pass
    build_optimizer(case, build_model(case)[1], config)
    after = names_of_megatron()
    changed = [
        name
        for modules in zip(before, after_one, after, strict=True)
        for name in modules[0].keys() | modules[2].keys()
        if len({id(module.get(name)) for module in modules}) > 1
    ]
    stock = Case(dtype=case.dtype)
    (optimizer,) = build_optimizer(stock, build_model(stock)[1]).chained_optimizers
    return {
        "changed": changed,
        "config": [name for name, value in vars(config).items() if fields[name] is not value],
        "stock": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "adam": isinstance(optimizer.optimizer, megaopt.FusedAdam),
    }


@contextmanager
def version(text):
    core = sys.modules["megatron.core"]
    kept, core.__version__ = core.__version__, text
    try:
        yield
    finally:
        core.__version__ = kept


class Quantized(torch.Tensor):
    """Stands for TransformerEngine's fp8 tensors."""


def error_of(case, change):
    """The message with which a setting is refused, and whether the weights are what they were."""
    Trainer(case)
    config = make_config(case)
    _, chunk = build_model(case)
    options = {"mode": case.plug, **case.options}
    weights = [hash_of(param.data) for param in chunk.parameters()]
    kind, name, value = change
    given = {"config": config, "model_chunks": [chunk]}
    installed = megatron("package_info").__version__
    if kind == "config":
        setattr(config, name, value)
    elif kind == "option":
        options[name] = value
    elif kind == "given":
        given[name] = value
    elif kind == "without ddp":
        given["model_chunks"] = [chunk, chunk.module]
    elif kind == "ddp":
        setattr(chunk.ddp_config, name, value)
    elif kind == "aware":
        config.use_precision_aware_optimizer = True
        setattr(config, name, value)
    elif kind == "quantized":
        owner, _, last = name.rpartition(".")
        module = chunk.get_submodule(owner)
        quantized = getattr(module, last).data.as_subclass(Quantized)
        module._parameters[last] = torch.nn.Parameter(quantized)
    else:
        installed = value
    try:
        with version(installed):
            ours.get_megatron_optimizer(**given, **options)
    except (ValueError, RuntimeError) as error:
        after = [hash_of(param.data) for param in chunk.parameters()]
        return f"{type(error).__name__}: {error}", weights == after
    return "no error", True


def save_without_psutil(case, folder, kind, form="dp_reshardable"):
    """The error of a save where Megatron's writer lacks a package, and what is in the folder.

    kind: of the trainer. A load is tried too, which needs no such package.
    """
    trainer = kind(case)
    trainer.train(1)
    writer = megatron("dist_checkpointing.strategies.filesystem_async")
    writer.HAVE_PSUTIL = False
    try:
        trainer.template(form, True)
        error = raised_by(lambda: trainer.save(folder, form))
    finally:
        writer.HAVE_PSUTIL = True
    return error, [each.name for each in Path(folder).iterdir()]


def seeded_as_scripts_do(case):
    """Numbers that are drawn after Megatron's function for seeds, called as every script does."""
    make_groups(case)
    seed = megatron("tensor_parallel").model_parallel_cuda_manual_seed
    drawn = []
    for number in (1, 1, 2):
        seed(number)
        drawn.append(torch.randn(3).tolist())
    tracker = megatron("tensor_parallel").get_cuda_rng_tracker()
    return drawn, sorted(tracker.get_states())


def steps_of_formats(case):
    """Steps, and what the state is stored as."""
    trainer = Trainer(case)
    steps = trainer.train(3)
    (optimizer,) = trainer.optimizer.chained_optimizers
    shard = next(iter(optimizer.shards.values()))
    state = optimizer.fused.state[shard]
    dtypes = {name: getattr(tensor, "dtype", None) for name, tensor in state.items()}
    return {"steps": steps, "dtypes": dtypes, **seen(trainer)}
