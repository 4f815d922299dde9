"""What ranks do with checkpoints of other formats; without a process group, the whole."""

import torch.distributed.checkpoint as dcp
from fsdp2_blocks import SHAPES
from fsdp2_ranks import build, content_of, options_of, snapshot, train
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict


def save(options, folder, flat):
    model, optimizer = build(options, shapes=SHAPES)
    train(model, optimizer, 2)
    dcp.save(content_of(model, optimizer, options_of(flat)), checkpoint_id=folder)


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


def changed(saved, own, folder, flat, steps):
    """A checkpoint, into an optimizer of its formats, and from that into one of others."""
    model, optimizer = build({**saved, "lr": 77.0}, shapes=SHAPES, seed=50)
    content, given = content_of(model, optimizer, options_of(flat)), options_of(flat)
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=given)
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
