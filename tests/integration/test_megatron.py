"""megaopt inside Megatron-Core, which runs here on the CPU, over gloo, in 1, 2 and 3 processes."""

import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


import megatron_cases as cases
from megatron_gpt import (
    Case,
    Trainer,
    build_model,
    build_optimizer,
    hash_of,
    load_and_train,
    make_groups,
    megatron,
    random_gradients,
    seen,
    train,
    train_and_save,
)
from megatron_gpt import optimizer_config as make_config

import megaopt
from megaopt.integration import megatron as ours
from megaopt.integration.megatron.choices import Choices

# --- what ranks do


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


MODES = ("main_shards", "precision_aware")
KINDS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_reshardable")
main_is_quick, aware_is_quick = (
    pytest.mark.parametrize(
        "mode", [quick, pytest.param(other, marks=pytest.mark.slow)], ids=[quick, other]
    )
    for quick, other in (MODES, MODES[::-1])
)
"""Both modes, of which one is slow."""


# --- the same bits as Megatron's own passes

SETTINGS = {
    "bf16": {},
    "bf16 gradients": {"fp32_grads": False},
    "without overlap": {"overlap": False},
    "weights gathered in the step": {"gathers_late": False},
    "a bucket a parameter": {"buckets": 1},
    "fp16": {"dtype": torch.float16},
    "fp16 gradients": {"dtype": torch.float16, "fp32_grads": False},
    "fp16 overflows": {"dtype": torch.float16, "initial_scale": 2.0**20},
    "fp32": {"dtype": torch.float32},
    "unclipped": {"clip_grad": 0.0},
    "zeros counted": {"counts_zeros": True, "fp32_grads": False},
    "Adam": {"adam_w_mode": False},
    "experts": {"experts": 2},
    "tensor parallel": {"tensor_parallel": 2},
}
PLACES = [(name, 2) for name in SETTINGS]
PLACES += [(name, world) for world in (1, 3) for name in ("bf16", "bf16 gradients")]
PLACES += [("a bucket a parameter", 3)]  # most ranks have nothing but padding of most buckets


# in both modes; the others are quick in one, and slow in the other
IN_BOTH = {("bf16", 2), ("fp16 overflows", 2), ("fp32", 2), ("tensor parallel", 2)}


def is_slow(place, mode):
    return place not in IN_BOTH and mode != MODES[PLACES.index(place) % 2]


@pytest.mark.parametrize(
    ("mode", "name", "world"),
    [
        pytest.param(mode, *place, marks=[pytest.mark.slow] * is_slow(place, mode))
        for mode in MODES
        for place in PLACES
    ],
)
@pytest.mark.sample(2)
def test_every_bit_is_megatrons(pools, once, mode, name, world):
    settings = SETTINGS[name]
    steps = 5 if "overflows" in name else 3
    expected = once(world, train, Case(**settings), steps)
    found = pools(world)(train, Case(plug=mode, **settings), steps)
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == steps
    updated = {step[1] for step in found[0]["steps"]}
    assert updated == ({True, False} if "overflows" in name else {True})


@main_is_quick
def test_clipped_gradients_rounded_as_megatron_rounds_them(pools, once, mode):
    bf16 = {"fp32_grads": False, "clip_grad": 0.1}
    rounding = Case(plug=mode, options={"round_scaled_grads": True}, **bf16)
    found = pools(2)(train, rounding, 3)
    assert found == once(2, train, Case(rounds_clipped=True, **bf16), 3)
    assert found != once(2, train, Case(**bf16), 3)


@pytest.mark.parametrize("chosen", [None, True, False])
@pytest.mark.parametrize("aware", [True, False])
def test_whether_it_rounds_is_chosen_or_the_configs(chosen, aware):
    """Megatron passes use_decoupled_grad where its config is precision-aware, and nothing else."""
    keys = {"use_decoupled_grad": True} if aware else {}
    group = {"params": [torch.nn.Parameter(torch.ones(3))]}
    choices = Choices(mode="precision_aware", round_scaled_grads=chosen)
    adam = choices.make_adam([group], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, **keys)
    assert adam.options.round_scaled_grads is (aware if chosen is None else chosen)


@aware_is_quick
def test_a_norm_that_is_nan_clips_nothing(pools, once, mode):
    """As in Megatron, where the host compares: elements with other gradients stay numbers."""
    settings = {"overlap": False, "clip_grad": 0.5}
    expected = once(2, step_with_a_nan, Case(**settings))
    assert pools(2)(step_with_a_nan, Case(plug=mode, **settings)) == expected
    norms, counts, _ = expected[0]
    assert norms[0] == "nan"
    assert 0 < sum(counts) < 9


def test_the_context_manager_makes_the_same(pools, once):
    found = pools(2)(train, Case(plug="main_shards", as_context=True), 3)
    assert found == once(2, train, Case(), 3)


@main_is_quick
def test_kernels_under_the_interpreter(pools, once, mode):
    found = pools(1)(train, Case(plug=mode, options={"backend": "triton"}), 2)
    assert found == once(1, train, Case(), 2)


@aware_is_quick
def test_sharding_moves_no_bit(pools, mode):
    case = Case(plug=mode, clip_grad=0.0, overlap=False)
    whole = pools(1)(step_given_gradients, case)[0]
    for world in (2, 3):
        assert pools(world)(step_given_gradients, case) == [whole] * world


# --- gradients


@main_is_quick
def test_gradients_are_read_where_they_lie(pools, mode):
    for fp32, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        case = Case(plug=mode, fp32_grads=fp32, clip_grad=0.1)
        for found in pools(2)(gradients_of, case):
            told = {"in_buffer", "bound_once", "left_alone", "changed", "clipped"}
            assert found == {"dtypes": {dtype}, **dict.fromkeys(told, True)}


@aware_is_quick
def test_a_norm_that_takes_16_bits_is_given_them(pools, once, mode):
    settings = {"fp32_grads": False}
    expected = once(2, train, Case(**settings), 3)
    found = pools(2)(norm_of_16_bits, Case(plug=mode, **settings))
    assert [each["steps"] for each in found] == [each["steps"] for each in expected]
    assert {dtype for each in found for dtype in each["dtypes"]} == {torch.bfloat16}


# --- what Megatron's own code, and users, do with main shards


def test_main_params_can_be_edited_in_place(pools, once):
    expected = once(2, edit_main_params, Case())
    assert pools(2)(edit_main_params, Case(plug="main_shards")) == expected
    assert expected[0]["norms"]


@pytest.mark.parametrize("with_state_dict", [False, True])
@main_is_quick
def test_weights_are_reloaded(pools, once, mode, with_state_dict):
    expected = once(2, reload_weights, Case(), with_state_dict)
    assert pools(2)(reload_weights, Case(plug=mode), with_state_dict) == expected


@aware_is_quick
def test_shards_that_moved_are_put_back(pools, once, mode):
    for dtype in (torch.bfloat16, torch.float32):
        expected = once(2, train, Case(dtype=dtype), 3)
        assert pools(2)(move_shards, Case(plug=mode, dtype=dtype)) == expected


# --- storage formats

FORMATS = {
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp8": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.uint8},
}


@pytest.mark.parametrize("name", FORMATS)
def test_moments_are_stored_as_asked(pools, name):
    own, other = (
        pools(2)(steps_of_formats, Case(plug=mode, options=FORMATS[name])) for mode in MODES
    )
    dtype = FORMATS[name]["exp_avg_dtype"]
    assert {own[0]["dtypes"][key] for key in ("exp_avg", "exp_avg_sq")} == {dtype}
    assert [each["steps"] for each in own] == [each["steps"] for each in other]
    assert [each["states"] for each in own] == [each["states"] for each in other]


DRAWN = {
    "exp_avg_dtype": "bfloat16_stochastic",
    "exp_avg_sq_dtype": "bfloat16_stochastic",
    "seed": 3,
}
BESIDE = {**DRAWN, "master_weight_dtype": "remainder8_stochastic"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [("main_shards", DRAWN), ("precision_aware", BESIDE)],
    ids=["main_shards", "precision_aware"],
)
def test_any_number_of_ranks_draws_the_same(pools, mode, options):
    """Without clipping: the norm's bits depend on the number of ranks, here as in Megatron."""
    case, other = (
        Case(plug=mode, options={**options, "seed": seed}, clip_grad=0.0) for seed in (3, 4)
    )
    found = [pools(ranks)(step_given_gradients, case)[0] for ranks in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert found[0] != pools(2)(step_given_gradients, other)[0]


@pytest.mark.slow
def test_remainders_are_whole_masters_to_checkpoints(pools, tmp_path):
    case = Case(plug="precision_aware", options={"store_param_remainders": True})
    assert pools(2)(steps_of_formats, case)[0]["dtypes"]["master_param"] == torch.int16
    saved = pools(2)(train_and_save, case, tmp_path / "a", "dp_reshardable")
    back = pools(2)(load_and_train, case, tmp_path / "a", "dp_reshardable")
    assert [each["loaded"] for each in back] == saved
    other = pools(3)(load_and_train, Case(plug="main_shards"), tmp_path / "a", "dp_reshardable")
    assert other[0]["loaded"]["states"] == saved[0]["states"]


# --- checkpoints


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        pytest.param(mode, kind, marks=[] if place == number else pytest.mark.slow)
        for number, mode in enumerate(MODES)
        for place, kind in enumerate(KINDS)
    ],
)
def test_resuming_equals_going_straight_on(pools, once, tmp_path, mode, kind):
    case = Case(plug=mode)
    straight = once(2, train, Case(), 4)
    saved = pools(2)(train_and_save, case, tmp_path / "a", kind)
    back = pools(2)(load_and_train, case, tmp_path / "a", kind)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]
    assert [each["states"] for each in back] == [each["states"] for each in straight]
    for world in (1, 3):
        for other in pools(world)(load_and_train, case, tmp_path / "a", kind):
            assert other["loaded"] == saved[0]


@pytest.mark.parametrize(("mode", "kind"), [*zip(MODES, KINDS[1:], strict=True)])
def test_each_instance_of_several_is_loaded(pools, tmp_path, mode, kind):
    pytest.importorskip("einops", reason="Megatron's groups of several instances need einops")
    case = Case(plug=mode, instances=2, overlap=False)
    saved = pools(2)(train_and_save, case, tmp_path / "a", kind)
    back = pools(2)(load_and_train, case, tmp_path / "a", kind)
    assert [each["loaded"] for each in back] == saved


@main_is_quick
def test_lr_may_wait_for_megatrons_scheduler(pools, once, tmp_path, mode):
    """config.lr is None, as by default: what is made, saved and loaded before the first step."""
    case, straight = Case(plug=mode, lr=None), once(2, train, Case(), 3)
    assert pools(2)(train, case, 3) == straight
    saved = pools(2)(train_and_save, case, tmp_path / "a", "dp_reshardable", 0)
    back = pools(2)(load_and_train, case, tmp_path / "a", "dp_reshardable", 0, 3)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"] for each in straight]


@aware_is_quick
def test_states_made_by_megatrons_hook_are_whole(pools, tmp_path, mode):
    """As its tests and NeMo make them before a save: then a checkpoint has masters too."""
    found = pools(2)(make_states_and_save, Case(plug=mode), tmp_path / "a")
    assert all(state == seen["states"] for seen in found for state in seen["first"])
    back = pools(2)(load_and_train, Case(plug=mode), tmp_path / "a", "dp_reshardable", 0)
    assert [each["loaded"]["states"] for each in back] == [each["states"] for each in found]


@pytest.mark.parametrize(("mode", "experts"), [*zip(MODES, (2, None), strict=True)])
def test_groups_never_stepped_are_saved_with_the_others_step(pools, tmp_path, mode, experts):
    case = Case(plug=mode, experts=experts)
    for found in pools(2)(save_groups_never_stepped, case, tmp_path / "a"):
        assert all(len(steps) > 1 and set(steps) == {1234} for steps in found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_hold_padding_alone(pools, tmp_path, mode):
    case = Case(plug=mode, buckets=1)
    saved = pools(3)(train_and_save, case, tmp_path / "a", "dp_reshardable")
    for world in (3, 2):
        back = pools(world)(load_and_train, case, tmp_path / "a", "dp_reshardable")
        assert all(each["loaded"] == saved[0] for each in back)


def test_modes_load_each_others(pools, tmp_path):
    saved = pools(2)(train_and_save, Case(plug=MODES[0]), tmp_path / "a", "dp_reshardable")
    back = pools(2)(load_and_train, Case(plug=MODES[1]), tmp_path / "a", "dp_reshardable")
    again = pools(2)(load_and_train, Case(plug=MODES[0]), tmp_path / "a", "dp_reshardable")
    assert back == again
    assert [each["loaded"] for each in back] == saved


@aware_is_quick
def test_weights_follow_their_masters_after_a_load(pools, tmp_path, mode):
    saved = pools(2)(train_and_save, Case(plug=mode), tmp_path / "a", "dp_reshardable")
    found = pools(2)(load_without_model, Case(plug=mode), tmp_path / "a", "dp_reshardable")
    assert found == saved


@main_is_quick
def test_checkpoints_in_megatrons_older_files(pools, once, tmp_path, mode):
    straight = once(2, train, Case(), 4)
    saved = pools(2)(save_legacy, Case(plug=mode), str(tmp_path / "a"))
    given = str(tmp_path / "a"), saved[0]["groups"], saved[0]["model"]
    back = pools(2)(load_legacy, Case(plug=mode), *given)
    assert [each["states"] for each in back] == [each["states"] for each in saved]
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]


# --- what it leaves behind, what it refuses


@aware_is_quick
def test_nothing_stays_patched(pools, mode):
    expected = {
        "changed": [],
        "config": [],
        "stock": "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "adam": False,
    }
    assert pools(1)(what_stays, Case(plug=mode)) == [expected]


WEIGHT = "module.decoder.final_layernorm.weight"
CHUNK = "DistributedDataParallel of Megatron's, got "
ERRORS = [
    (("given", "config", None), "config must be an OptimizerConfig of Megatron's, got None"),
    (("given", "model_chunks", []), f"model_chunks must be a list of at least one {CHUNK}[]"),
    (("without ddp", None, None), f"model_chunks[1] must be a {CHUNK}GPTModel"),
    (
        ("config", "optimizer", "soap"),
        "config.optimizer must be one of adam, lion, sgd, muon, dist_muon, got 'soap'",
    ),
    (
        ("config", "use_distributed_optimizer", False),
        "config.use_distributed_optimizer must be True, got False",
    ),
    (
        ("config", "optimizer_cpu_offload", True),
        "config.optimizer_offload_fraction must be 1.0 with optimizer_cpu_offload=True, ",
    ),
    (
        ("aware", "main_params_dtype", torch.float16),
        "config.main_params_dtype must be torch.float32 with mode='main_shards'",
    ),
    (("ddp", "use_megatron_fsdp", True), "use_megatron_fsdp must be False"),
    (
        ("ddp", "use_distributed_optimizer", False),
        "use_distributed_optimizer must be the same in OptimizerConfig and in "
        "DistributedDataParallelConfig, got True and False",
    ),
    (
        ("quantized", WEIGHT, None),
        f"parameter {WEIGHT!r} must be fp32, bf16, fp16, or an fp8 tensor of TransformerEngine's, "
        "got a Quantized",
    ),
    (("option", "mode", "fast"), "mode must be one of main_shards, precision_aware, got 'fast'"),
    (("option", "exp_avg_dtype", ""), "exp_avg_dtype must be one of torch.float32"),
    (
        ("option", "store_param_remainders", True),
        "store_param_remainders must be False with mode='main_shards'",
    ),
    (("version", None, "0.18.0"), "megatron-core 0.18.0 is not supported: 0.16.1 and 0.19.2 are"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_what_is_refused(pools, change, message):
    ((error, unchanged),) = pools(1)(cases.error_of, Case(plug="main_shards"), change)
    assert error.partition(": ")[2].startswith(message)
    assert unchanged


def test_a_save_without_what_megatrons_writer_needs_is_refused_at_once(pools, tmp_path):
    case = Case(plug="main_shards")
    for error, files in pools(2)(cases.save_without_psutil, case, tmp_path / "a", Trainer):
        assert error.startswith("ImportError: Megatron's writer of checkpoints needs psutil")
        assert files == []


def test_megatrons_seeds_are_set_on_the_cpu(pools):
    ((first, again, other), names), *_ = pools(1)(seeded_as_scripts_do, Case())
    assert first == again != other
    assert len(names) == 3


LION = SimpleNamespace(optimizer="lion")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("contract", "te", "'ieee'"), ("exp_avg_sq_dtype", torch.bfloat16, "None")],
)
def test_what_lion_does_not_have_is_refused(name, value, allowed):
    got = re.escape(repr(value))
    told = rf"^{name} must be {allowed} with config\.optimizer='lion'.*, got {got}$"
    with pytest.raises(ValueError, match=told):
        Choices(original_config=LION, **{name: value})


def test_other_releases_can_be_tried(pools):
    case = Case(plug="main_shards", options={"any_version": True})
    ((error, _),) = pools(1)(cases.error_of, case, ("version", None, "0.18.0"))
    assert error == "no error"


def test_importing_it_needs_no_megatron():
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from megaopt.integration.megatron import get_megatron_optimizer\n"
        "try:\n    get_megatron_optimizer(None, [])\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs megatron-core, of which 0.16.1 and 0.19.2 are supported" in done.stdout
