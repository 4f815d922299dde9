"""Other rules than Adam, and Megatron's precision-aware fields, under its distributed optimizer."""

import contextlib
import dataclasses
from unittest import mock

from megatron_gpt import Trainer, build_model, hash_of, megatron, random_gradients, seen

import megaopt


def step_given_gradients(case, steps=3):
    """The weights after steps whose gradients are the same whatever the number of ranks."""
    trainer = Trainer(case)
    for group in trainer.optimizer.param_groups:
        group.update(lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    return trainer


def plugged(case, folder):
    """Weights and states, before and after a checkpoint; then as loaded, and one step on."""
    trainer = step_given_gradients(case)
    keys = trainer.optimizer.chained_optimizers[0].optimizer_state_keys
    trainer.save(folder, "dp_reshardable")
    other = Trainer(case)
    other.load(folder, "dp_reshardable", 3)
    return {
        "keys": keys,
        "weights": trainer.weights(),
        "loaded": other.weights(),
        "same": moments_of(trainer) == moments_of(other),
    }


def moments_of(trainer):
    """Hashes of this rank's moments and masters."""
    (optimizer,) = trainer.optimizer.chained_optimizers
    found = map(optimizer._get_main_param_and_optimizer_states, optimizer.model_param_gbuf_map)
    return [{key: hash_of(tensor) for key, tensor in tensors.items()} for tensors in found]


def alone(case, name):
    """The same steps of the whole model by the fused optimizer itself."""
    Trainer(dataclasses.replace(case, plug=None, config={}))  # for Megatron's groups
    _, chunk = build_model(case)
    params = list(chunk.module.parameters())
    cls, more = {
        "lion": (megaopt.FusedLion, {"betas": (0.95, 0.98)}),
        "sgd": (megaopt.FusedSGD, {"momentum": 0.9}),
    }[name]
    settings = {"lr": 1e-2, "weight_decay": 0.1, "master_weights": True}
    optimizer = cls(params, use_decoupled_grad=True, **settings, **more)
    for step in range(3):
        for param, grad in zip(params, random_gradients(step, params), strict=True):
            param.decoupled_grad = grad
        optimizer.step()
    return {name: hash_of(p.data) for name, p in chunk.module.named_parameters()}


@contextlib.contextmanager
def as_with_te():
    """Megatron asks for TransformerEngine's version where its config is precision-aware."""
    factory = megatron("optimizer")
    with mock.patch.object(factory, "is_te_min_version", return_value=False):
        yield


def train_aware(case):
    """Steps of a config that is precision-aware with fp8: masters are Megatron's."""
    with as_with_te():
        trainer = Trainer(case)
        steps = trainer.train(3)
        (optimizer,) = trainer.optimizer.chained_optimizers
        state = next(iter(optimizer.fused.state.values()))
        return {
            "steps": steps,
            "dtype": state["exp_avg"].dtype,
            "rounds": optimizer.fused.options.round_scaled_grads,
            **seen(trainer),
        }
