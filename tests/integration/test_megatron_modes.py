"""Lion and SGD in Megatron's distributed optimizer, and its precision-aware fields beside fp8."""

import contextlib
import dataclasses
import importlib
from multiprocessing.reduction import ForkingPickler
from unittest import mock

import pytest
import torch
from fake_pinning import FakePinning
from how_to import needs
from megatron_gpt import (
    HAS_KEYS,
    Case,
    Trainer,
    build_model,
    hash_of,
    megatron,
    random_gradients,
    seen,
    train,
)
from torch.profiler import ProfilerActivity, profile

import megaopt
from megaopt.kernels.host_memory import pinned_by
from megaopt.params import codes as pieces

# Other rules than Adam, and Megatron's precision-aware fields, under its distributed optimizer.


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


# Bytes that Megatron's state dicts take beside the state, by the profiler's own count.

KIND = "dp_reshardable"


def most_bytes(function):
    """What it returns, and the most bytes that were allocated within it at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = function()
    events = profiled.profiler.kineto_results.events()
    found = [event for event in events if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(found, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return made, most


def on_card(function):
    """Calls it where what goes to the host takes no memory, as if that were another device's."""
    module = importlib.import_module("megaopt.integration.megatron.checkpoints")
    with mock.patch.object(module, "host_copy", lambda tensor: tensor[:0].clone()):
        return function()


def piece_of(numel):
    """Within it codes in blocks are decoded and encoded so many at a time."""
    return mock.patch.object(pieces, "PIECE", numel)


def bytes_of(case, folder):
    """Of the state, the largest bucket and shard in fp32; that saving, a fresh run's load take.

    in_place: whether that load reads into the state's own tensors.
    """
    with pinned_by(FakePinning()), piece_of(1024):
        return _bytes_of(case, folder)


def _bytes_of(case, folder):
    trainer = Trainer(case)
    trainer.train(1)
    (optimizer,) = trainer.optimizer.chained_optimizers
    state = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(optimizer))
    buckets = [bucket.grad_data.numel() for buf in optimizer.buffers for bucket in buf.buckets]

    saved = most_bytes(lambda: on_card(optimizer.get_parameter_state_dp_reshardable))[1]
    trainer.save(folder, KIND)
    other = Trainer(case)
    (fresh,) = other.optimizer.chained_optimizers
    with mock.patch.object(fresh, "_is_loading", True):
        first = most_bytes(lambda: on_card(fresh.get_parameter_state_dp_reshardable))[1]
    template = other.template(KIND, True)
    held = {tensor.data_ptr() for tensor in tensors_of(fresh)}
    read_into = {tensor.data_ptr() for tensor in nested_tensors(template["optimizer"])}
    read = megatron("dist_checkpointing").load(template, str(folder))
    loaded = most_bytes(lambda: other.optimizer.load_state_dict(read["optimizer"]))[1]
    return {
        "state": state,
        "bucket": 4 * max(buckets),
        "shard": 4 * max(shard.numel() for shard in optimizer.shards.values()),
        "save": saved,
        "template": first,
        "load": loaded,
        "in_place": held <= read_into,
    }


def tensors_of(optimizer):
    states = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    return [tensor for tensor in states if isinstance(tensor, torch.Tensor)]


def steps_beside_a_writer(case):
    """A step, a save by another process, which gets the tensors through a pipe, and a step."""
    with pinned_by(FakePinning()):
        trainer = Trainer(case)
        found = trainer.train(1)
        saved = nested_tensors(trainer.template(KIND, False)["optimizer"])
        values = [*map(hash_of, saved)]
        ForkingPickler.dumps(saved)  # moves them into memory that processes share
        found += trainer.train(1)
        return found, len(saved), values == [*map(hash_of, saved)]


def nested_tensors(value):
    """The tensors of a sharded state dict."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [tensor for each in value for tensor in nested_tensors(each)]
    data = getattr(value, "data", None)
    return [data] if isinstance(data, torch.Tensor) else []


pytestmark = needs("megatron")

MODES = ("main_shards", "precision_aware")


def case_of(name, mode, **more):
    settings = {"clip_grad": 0.0, "overlap": False, "config": {"optimizer": name}}
    return Case(plug=mode, **{**settings, **more})


@pytest.mark.skipif(not HAS_KEYS, reason="release 0.16 saves Adam's moments alone")
@pytest.mark.parametrize(
    ("name", "mode"), [("lion", "main_shards"), ("sgd", "precision_aware"), ("sgd", "main_shards")]
)
def test_other_rules_step_as_they_do_alone(pools, tmp_path, name, mode):
    keys = {"lion": ("exp_avg",), "sgd": ("momentum_buffer",)}[name]
    expected, _ = pools(2)(alone, case_of(name, mode), name)
    for found in pools(2)(plugged, case_of(name, mode), tmp_path / "a"):
        assert found["keys"] == keys
        assert found["weights"] == found["loaded"] == expected
        assert found["same"]


AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
DELAYED = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"


@pytest.mark.parametrize("delayed", [True, False])
def test_precision_aware_with_masters_of_megatrons(pools, delayed):
    """As beside fp8 parameters; with delayed scaling it has gradients clipped in their dtype."""
    options = {"exp_avg_dtype": torch.bfloat16, "round_scaled_grads": delayed}
    settings = {"plug": "main_shards", "clip_grad": 0.2, "fp32_grads": False}
    config = {**AWARE, DELAYED: delayed}
    found = pools(2)(train_aware, Case(config=config, **settings))
    assert found == pools(2)(train_aware, Case(options=options, **settings))
    assert found[0]["dtype"] == torch.bfloat16
    assert found[0]["rounds"] is delayed


BF16 = torch.bfloat16
STATES = {
    "fp32": {},
    "bf16": {"options": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}},
    "blocks": {"options": {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"}},
    "host": {"config": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=[pytest.mark.slow] * ((place + number) % 2))
        for number, mode in enumerate(MODES)
        for place, name in enumerate(STATES)
    ],
)
def test_saves_and_loads_take_the_state_and_a_bucket_at_most(pools, tmp_path, mode, name):
    """Megatron issue 7288: a resume made the state twice. Decoded values go to the host.

    Decoding and encoding takes another three fp32 copies of one shard at most, and some scales.
    """
    case = Case(plug=mode, hidden=64, inner=128, buckets=20000, **STATES[name])
    for found in pools(2)(bytes_of, case, tmp_path / "a"):
        is_fp32 = name in ("fp32", "host")
        most = found["bucket"] if is_fp32 else 4 * found["shard"] + 64
        assert found["in_place"] is is_fp32
        assert found["save"] <= most
        assert found["template"] <= found["state"] + most
        assert found["load"] <= most


@pytest.mark.parametrize("mode", MODES)
def test_an_asynchronous_save_leaves_states_in_pinned_memory(pools, mode):
    """And what is written is the state at the save, whatever is stepped meanwhile."""
    settings = {"plug": mode, "overlap": False}
    straight = pools(2)(train, Case(**settings), 2)
    found = pools(2)(steps_beside_a_writer, Case(**settings, **STATES["host"]))
    for (steps, count, same), expected in zip(found, straight, strict=True):
        assert steps == expected["steps"]
        assert count > 9
        assert same
