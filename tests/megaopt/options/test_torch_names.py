"""Arguments and keys of groups that torch's users write: taken, refused by name, or let through."""

import functools

import pytest
import torch
from handling import both_backends, refused, train_all
from runs import FP32, MASTER, assert_same, assert_same_run, parameters, snapshot, train

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW
from megaopt.integration import bitsandbytes, flashoptim, torchao

SHAPES = [(3, 4), (5,)]

WITHOUT_EFFECT = [
    *({"fused": value} for value in (None, True, False)),
    *({"foreach": value} for value in (None, True, False)),
    {"maximize": False},
    {"differentiable": False},
    {"maximize": False, "foreach": None, "differentiable": False, "fused": True},
]


@pytest.mark.parametrize("options", WITHOUT_EFFECT, ids=str)
def test_torchs_options_without_effect_are_taken(options):
    """As arguments, and as keys of a group."""
    expected = FusedAdam(parameters(SHAPES), **MASTER)
    train(expected, 2)
    as_arguments = FusedAdam(parameters(SHAPES), **options, **MASTER)
    as_keys = FusedAdam([{"params": parameters(SHAPES), **options}], **MASTER)
    train_all((as_arguments, as_keys), 2)
    assert_same_run(as_arguments, expected)
    assert_same(snapshot(as_keys)["weights"], snapshot(expected)["weights"])
    assert_same(snapshot(as_keys)["states"], snapshot(expected)["states"])


UNKNOWN = {
    "learning_rate": r"argument 'learning_rate' must be one of lr, betas, eps, .*, got 0.5$",
    "wieght_decay": r"argument 'wieght_decay' must be one of lr, .*, weight_decay, .*, got 0.5$",
    "direct_casts": r"argument 'direct_casts' must be one of lr, .*, direct_cast, .*, got 0.5$",
}


@pytest.mark.parametrize(("name", "message"), UNKNOWN.items(), ids=UNKNOWN)
def test_unknown_arguments_are_refused_by_name(name, message):
    with pytest.raises(TypeError, match=message):
        FusedAdam(parameters(SHAPES), **{name: 0.5})


MISTAKES = {
    "learning_rate": "lr",
    "LR": "lr",
    "weightdecay": "weight_decay",
    "wieght_decay": "weight_decay",
    "weight_decy": "weight_decay",
    "epsilon": "eps",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "bias_corection": "bias_correction",
    "esp": "eps",
}


OF_GALORE = {
    "rnak": "rank",
    "Rank": "rank",
    "ranks": "rank",
    "rak": "rank",
    "sclae": "scale",
    "projtype": "proj_type",
    "update_prog_gap": "update_proj_gap",
    "precison": "precision",
    "proj-type": "proj_type",
    "update-proj-gap": "update_proj_gap",
}
SPELLED = [(FusedAdam, *pair) for pair in MISTAKES.items()]
SPELLED += [(GaLoreAdamW, *pair) for pair in OF_GALORE.items()]


@pytest.mark.parametrize(("kind", "key", "meant"), SPELLED)
def test_misspelled_keys_of_a_group_are_hinted_at(kind, key, meant):
    """A group of GaLoreAdamW would train AdamW without a projection. They are kept all the same."""
    message = rf"'{key}' is kept, .* got 0.5: did you mean '{meant}'\? groups here have lr, betas, "
    first, second, third = parameters([*SHAPES, (3,)])
    with pytest.warns(UserWarning, match=f"group 1: {message}") as said:
        optimizer = kind([{"params": [first]}, {"params": [second], key: 0.5}])
    assert said[0].filename == __file__
    optimizer.add_param_group({"params": [third], key: 0.5})  # which is said once
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group.get(key) for group in optimizer.param_groups] == [None, 0.5, 0.5]
    optimizer = kind([first])
    with pytest.warns(UserWarning, match=f"group 1: {message}"):
        optimizer.add_param_group({"params": [second], key: 0.5})


@pytest.mark.parametrize(
    "group",
    [{"momentum": 0.9}, {"nesterov": True}, {"use_muon": True}, {"rank": 8, "proj_type": "std"}],
    ids=str,
)
def test_keys_of_other_optimizers_of_the_package_are_kept_and_named(group):
    key, value = next(iter(group.items()))
    message = f"group 0: '{key}' is kept, and no step reads it, got {value}: it asks for another "
    with pytest.warns(UserWarning, match=message) as said:
        optimizer = FusedAdam([{"params": [p], **group} for p in parameters(SHAPES)], **MASTER)
    assert len(said) == 1
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(own.items() >= group.items() for own in optimizer.param_groups)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"differentiable": True}, "group 0: differentiable must be False, got True"),
        (
            {"decoupled_weight_decay": False},
            "group 0: decoupled_weight_decay must be adam_w_mode, True, got False",
        ),
    ],
    ids=str,
)
def test_keys_of_torchs_groups_that_ask_for_another_optimizer_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        FusedAdam([{"params": parameters(SHAPES), **group}])


def one_edit_away(key):
    """With a letter missing, doubled, another, or two that changed places; in other cases."""
    found = {key.upper(), key.capitalize(), f"{key}s", f"_{key}", key.replace("_", "-")}
    for i in range(len(key)):
        found |= {key[:i] + key[i + 1 :], key[: i + 1] + key[i:], f"{key[:i]}q{key[i + 1 :]}"}
        found.add(key[:i] + key[i : i + 2][::-1] + key[i + 2 :])
    return sorted(found - {key, *OTHERS})


SHORT = ("lrs", "llr", "lrr", "rl", "Lr", "ep", "es", "ps", "esp", "epss", "eps_", "Eps")
LONG = (
    *("betas", "weight_decay", "bias_correction", "rank", "update_proj_gap", "scale", "proj_type"),
    *("param_numbers", "state_device", "seed", "momentum", "amsgrad", "maximize"),
)
KINDS = {
    **{kind.__name__: kind for kind in (FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW)},
    **{f"torchao {kind.__name__}": kind for kind in (torchao.AdamW8bit, torchao._AdamW)},
    **{f"bitsandbytes {kind.__name__}": kind for kind in (bitsandbytes.Adam, bitsandbytes.Lion)},
    "flashoptim FlashAdamW": flashoptim.FlashAdamW,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sample(2)
def test_misspelled_keys_of_any_optimizer_are_hinted_at(kind):
    """What is near a key that it does not have is nobody's."""
    options = kind(parameters([(3,)])).options
    own = (*options.names_but_step, "param_numbers", "state_device", "amsgrad", "maximize")
    for meant in (key for key in (*LONG, "lr", "eps") if key in own):
        found = SHORT[:5] if meant == "lr" else SHORT[5:] if meant == "eps" else None
        for key in found or one_edit_away(meant):
            with pytest.warns(UserWarning, match=f"group 0: '{key}' is kept, .*did you mean"):
                kind([{"params": parameters([(3,)]), key: 3}])


NEAR = {"rho": 0.05, "scaler": 1, "scales": [1], "ranks": 2, "seeds": [3], "sclae": 4}


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion, FusedMuon, FusedSGD])
def test_keys_that_are_nobodys_are_kept_saved_and_loaded(kind):
    """Near an option of another optimizer, or beside the option that they are near."""
    name = next(name for name in ("betas", "weight_decay") if name in kind(parameters()).defaults)
    own = {"lr": 0.5, "lrs": [1.0], name: kind(parameters()).defaults[name], f"{name}3": 0.9}
    optimizer, other = (kind([{"params": parameters(SHAPES), **NEAR, **own}]) for _ in range(2))
    train(optimizer, 1)
    for group in other.param_groups:
        group.update(dict.fromkeys(NEAR, None))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0].items() >= {**NEAR, **own}.items()


# As they stand in groups of Megatron-Core, NeMo, torch's schedulers and optimizers, transformers,
# timm, DINOv2, DeepSpeed, Lightning, torchao, bitsandbytes and Prodigy when an optimizer is made of
# them.
OTHERS = (
    *("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config", "max_lr"),
    *("min_lr", "pre_wd_mult", "pre_lr_mult", "start_wd", "end_wd", "is_vision_model_param"),
    *("initial_lr", "base_momentum", "max_momentum", "swa_lr", "base_lr", "name", "group_name"),
    *("lr_scale", "weight_decay_mult", "no_weight_decay", "initial_weight_decay", "is_last_layer"),
    *("lr_multiplier", "wd_multiplier", "layer_id", "module_name", "moe", "steps"),
    *("param_names", "capturable", "warmup_steps", "bias", "beta_schedule", "step_size", "gamma"),
    *("names", "param_name", "layer", "layers", "wd", "lr_decay", "decay", "is_expert", "ema", "d"),
    *("alpha", "centered", "clip_threshold", "decay_rate", "relative_step", "scale_parameter"),
    *(
        "warmup_init",
        "max_unorm",
        "num_steps",
        "step_sizes",
        "prox_type",
        "prox_freq",
        "initial_wd",
    ),
    *("weight_decay_saved", "adjust_lr_fn", "ns_coefficients", "history_size", "quant_bits", "k"),
    *("t_alpha", "cumu_lr", "npack", "group_type", "master_bytewidth", "factored_frac", "d_coef"),
    *("d0", "growth_rate", "use_bias_correction", "safeguard_warmup", "slice_p", "score_type"),
    *("lr_mul", "lr_multi", "lr_group", "is_adapter", "tags", "group", "id", "idx", "op", "tp"),
    *("initial_wd", "lambda", "momenta"),
)


def test_keys_of_other_libraries_are_let_through():
    params = parameters(SHAPES)
    group = {"params": params, **dict.fromkeys(OTHERS, 0.5), "param_names": ["a", "b"]}
    group |= {"use_muon": False, "rank": None}
    optimizer = FusedAdam([group], **MASTER)
    assert {name: optimizer.param_groups[0][name] for name in OTHERS}["swa_lr"] == 0.5
    expected = FusedAdam(parameters(SHAPES), **MASTER)
    train_all((optimizer, expected), 2)
    assert_same(snapshot(optimizer)["states"], snapshot(expected)["states"])


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_what_torch_and_its_schedulers_leave_in_groups_makes_an_optimizer(name):
    """Of torch's optimizer, and of ours."""
    is_adamw = name == "AdamW"
    theirs = getattr(torch.optim, name)(parameters(SHAPES, FP32), lr=0.1)
    ours = FusedAdam(parameters(SHAPES, FP32), lr=0.1, adam_w_mode=is_adamw)
    for optimizer in (theirs, ours):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
        torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
        made = FusedAdam(optimizer.param_groups, adam_w_mode=is_adamw)
        assert made.param_groups[0]["swa_lr"] == 0.05
        assert made.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(FusedAdam, "betas"), (FusedLion, "betas"), (GaLoreAdamW, "betas"), (FusedMuon, "momentum"),
     (functools.partial(FusedSGD, momentum=0.5), "momentum")],
)  # fmt: skip
def test_schedulers_cycle_what_is_the_momentum(kind, name):
    optimizer = kind(parameters(SHAPES, FP32), lr=0.1)
    before = dict(optimizer.param_groups[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    train(optimizer, 1)
    schedule.step()
    (group,) = optimizer.param_groups
    assert {key for key in before if group[key] != before[key]} == {"lr", "step", name}


def test_a_group_of_torchs_adam_does_not_become_adamw_in_silence():
    groups = torch.optim.Adam(parameters(SHAPES, FP32)).param_groups
    with pytest.raises(ValueError, match="decoupled_weight_decay must be adam_w_mode, True"):
        FusedAdam(groups)


# --- lr that a schedule sets


NO_LR = "lr must be a finite number >= 0 in fp32, got None"


def without_lr(**options):
    first, second = parameters(SHAPES)
    return FusedAdam([{"params": [first]}, {"params": [second], "lr": None}], **options, **MASTER)


@both_backends
def test_a_group_may_wait_for_its_lr(backend):
    """Megatron's have none until its scheduler's first step."""
    optimizer = without_lr(backend=backend)
    with refused(optimizer, f"^group 1: {NO_LR}$"):
        train(optimizer, 1)
    optimizer.param_groups[1]["lr"] = 0.5
    first, second = parameters(SHAPES)
    expected = FusedAdam([{"params": [first]}, {"params": [second], "lr": 0.5}], **MASTER)
    train_all((optimizer, expected), 2)
    assert_same_run(optimizer, expected)


def test_all_groups_may_wait_for_their_lr():
    optimizer = FusedAdam(parameters(SHAPES), lr=None, **MASTER)
    assert optimizer.param_groups[0]["lr"] is None
    with refused(optimizer, f"group 0: {NO_LR}"):
        train(optimizer, 1)


def test_an_lr_that_is_not_there_is_saved_and_loaded():
    source = without_lr()
    source.initialize_states()
    target = FusedAdam([{"params": [param]} for param in parameters(SHAPES)], **MASTER)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[1]["lr"] is None
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


def test_capturable_needs_its_lr_at_once():
    with pytest.raises(ValueError, match=f"group 0: {NO_LR}"):
        FusedAdam(parameters(SHAPES), lr=None, capturable=True)
    optimizer = FusedAdam(parameters(SHAPES), capturable=True)
    saved = FusedAdam(parameters(SHAPES), lr=None)
    train(optimizer, 1)
    with refused(optimizer, f"group 0: {NO_LR}"):
        optimizer.load_state_dict(saved.state_dict())
