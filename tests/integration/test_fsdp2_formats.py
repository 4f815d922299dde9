"""Checkpoints of other formats: refused before anything is written, or changed into one's own."""

import re

import fsdp2_blocks
import pytest
import torch.distributed.checkpoint as dcp
from fsdp2_blocks import BLOCKS, SHAPES
from fsdp2_ranks import build, content_of, load, options_of, said, snapshot, train
from runs import BF16, MASTER, REMAINDERS, assert_same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

# What ranks do with checkpoints of other formats; without a process group, the whole.


def running(options):
    """A run of other weights, after steps of other gradients than those of a checkpoint."""
    model, optimizer = build(options, shapes=SHAPES, seed=50)
    train(model, optimizer, 2, first=7)
    return model, optimizer


def goes_on(options):
    """What a run comes to that never tried to load."""
    model, optimizer = running(options)
    train(model, optimizer, 2, first=9)
    return snapshot(optimizer)


def goes_on_after_a_load(options, folder, flat, partial):
    """What is said of the checkpoint, and what the run comes to that tried to load it."""
    model, optimizer = running(options)
    content, said = content_of(model, optimizer, options_of(flat)), "it loads"
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    try:
        dcp.load(content, checkpoint_id=folder, planner=planner)
        set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options_of(flat))
    except dcp.CheckpointException as error:
        said = str(error)
    train(model, optimizer, 2, first=9)
    return said, snapshot(optimizer)


def says_of_frozen(options, folder, flat, at_save, running):
    """What a rank says of a load where a parameter is frozen that one rank alone has."""
    model, optimizer = build(options)
    train(model, optimizer, 2)
    model.p2.requires_grad_(not at_save)
    given = options_of(flat)
    dcp.save(optimizer_of(model, optimizer, given), checkpoint_id=folder)
    other, target = build(options, seed=50)
    train(other, target, 3 if running else 0)
    other.p2.requires_grad_(False)
    content = optimizer_of(other, target, given)
    dcp.load(content, checkpoint_id=folder)
    own = content["optimizer"]
    return said(lambda: set_optimizer_state_dict(other, target, own, options=given))


def always_frozen(options, folder):
    """What a rank says of a load where a parameter never had a gradient."""
    runs = [build(options, seed=seed) for seed in (0, 50)]
    for model, optimizer in runs:
        model.p2.requires_grad_(False)
        optimizer.initialize_states()
    given = options_of(False)
    dcp.save(optimizer_of(*runs[0], given), checkpoint_id=folder)
    content = optimizer_of(*runs[1], given)
    set_model_state_dict(runs[1][0], get_model_state_dict(runs[0][0]))
    dcp.load(content, checkpoint_id=folder)
    set_optimizer_state_dict(*runs[1], content["optimizer"], options=given)
    return "it loads"


def optimizer_of(model, optimizer, given):
    return {"optimizer": get_optimizer_state_dict(model, optimizer, options=given)}


def changed(saved, own, folder, flat, steps):
    """A checkpoint, into an optimizer of its formats, and from that into one of others."""
    model, optimizer = load(saved, folder, flat, SHAPES)
    return into(own, model, optimizer, steps)


def into(own, model, optimizer, steps):
    """Steps of a model whose optimizer's state was changed into other formats."""
    options = {name: value for name, value in own.items() if name != "weights"}
    other = type(optimizer)(model.parameters(), **options)
    other.load_state_dict(optimizer.to_torch_state_dict(drop_masters=True))
    for param in model.parameters():
        if "master_weights" in options:
            value = optimizer.get_unscaled_state(param, "master_param")
            other.set_scaled_state(param, "master_param", value)
    at_once = snapshot(other)
    train(model, other, steps, first=2)
    return at_once, snapshot(other)


HYPER = {"lr": 0.01, "weight_decay": 0.1, "weights": BF16}
KINDS = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "blocks": BLOCKS,
    "blocks of 64": {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"},
    "4 bits": {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"},
    "masters": MASTER,
    "remainders": REMAINDERS,
    "24 bits": {"master_weights": True, "master_weight_dtype": "remainder8"},
}
KINDS = {name: {**HYPER, **options} for name, options in KINDS.items()}
WORLDS = [(None, 2), (2, None), (2, 3), (None, None)]  # of None: a process without ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def on(on_ranks):
    def run(world, what, *given):
        return [what(*given)] if world is None else on_ranks(world, what, *given)

    return run


UNLIKE = [
    *(("fp32", "blocks"), ("blocks", "fp32"), ("blocks", "blocks of 64"), ("blocks", "4 bits")),
    *(("fp32", "bf16"), ("masters", "fp32"), ("fp32", "remainders"), ("remainders", "masters")),
    ("masters", "24 bits"),
]


@pytest.mark.parametrize(
    ("saved", "own", "worlds", "flat"),
    [
        pytest.param(*names, worlds, flat, marks=[pytest.mark.slow] * is_slow)
        for place, names in enumerate(UNLIKE)
        for number, worlds in enumerate(WORLDS)
        for flat in (False, True)
        for is_slow in [(number, flat) != (place % 4, place % 3 == 0)]
    ],
    ids=str,
)
@pytest.mark.thirds
@pytest.mark.sample(2)
def test_what_is_refused_was_never_loaded(on, tmp_path, saved, own, worlds, flat):
    """Also with what is missing left out: the run goes on with the bits of one that did not try."""
    folder, options = str(tmp_path / "checkpoint"), KINDS[own]
    on(worlds[0], fsdp2_blocks.save, KINDS[saved], 2, folder, flat)
    (expected, *_) = on(worlds[1], goes_on, options)
    for partial in (False, True):
        load = (goes_on_after_a_load, options, folder, flat, partial)
        for message, found in on(worlds[1], *load):
            assert re.search("Size mismatch|Missing key", message), message
            assert_same(found, expected)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(
    ("at_save", "running"),
    [(True, False), (True, True), (False, True)],
    ids=["the checkpoint has it", "both have it", "the optimizer has it"],
)
def test_a_frozen_parameters_state_is_lost_on_no_rank(on, tmp_path, at_save, running, flat):
    """All ranks raise, also those without an element of it."""
    given = (KINDS["masters"], str(tmp_path / "checkpoint"), flat, at_save, running)
    for message in on(2, says_of_frozen, *given):
        assert re.search("parameter 2 of group 0: requires_grad must be True .*got False", message)


def test_a_parameter_frozen_on_all_ranks_from_the_first_loads(on, tmp_path):
    options = {**KINDS["masters"], "makes_states": "all"}
    for message in on(2, always_frozen, options, str(tmp_path / "checkpoint")):
        assert message == "it loads"


@pytest.mark.sample(2)
@pytest.mark.parametrize("worlds", WORLDS[:3], ids=str)
@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("fp32", "blocks"),
        ("blocks", "fp32"),
        ("blocks", "4 bits"),
        ("masters", "24 bits"),
    ],
)
@pytest.mark.sample(2)
def test_states_are_changed_into_other_formats(on, tmp_path, saved, own, worlds):
    """Read, split anew and stored again: the bits of one process that saved nothing."""
    folder, (saved, own) = str(tmp_path / "checkpoint"), (KINDS[saved], KINDS[own])
    on(worlds[0], fsdp2_blocks.save, saved, 2, folder, True)
    model, optimizer = build(saved, shapes=SHAPES)
    train(model, optimizer, 2)
    expected = into(own, model, optimizer, 2)
    for found in on(worlds[1], changed, saved, own, folder, True, 2):
        assert_same(found, expected)
