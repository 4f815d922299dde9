"""What ranks do with checkpoints of other formats; without a process group, the whole."""

import torch.distributed.checkpoint as dcp
from fsdp2_blocks import SHAPES
from fsdp2_ranks import build, content_of, load, options_of, said, snapshot, train
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


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
