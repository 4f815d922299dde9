"""Ranks whose settings or parameters are not the same: all raise, and nothing has changed on any.

None is left waiting in a collective that another does not enter.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp2_ranks import (
    Bare,
    give,
    gradients,
    mesh_of,
    odd_step,
    raised_by,
    sharded,
    snapshot,
    train,
    whole,
)
from runs import assert_same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt import FusedMuon, GaLoreAdamW

# What ranks do.

SHAPES = [(24, 10), (7, 9), (9,), (6, 30)]


def built(make, options, replicas=1):
    """A model of DTensors, and its optimizer in two groups, each with a matrix or more."""
    model = sharded(Bare(SHAPES), replicas)
    params = list(model.parameters())
    return model, make([{"params": params[:2]}, {"params": params[2:]}], **options)


def one_matrix(make, options, replicas=1):
    """The same, of a matrix and a vector."""
    model = sharded(Bare([(24, 10), (9,)]), replicas)
    return model, make([{"params": [param]} for param in model.parameters()], **options)


def meshes_apart(make, options, replicas=1):
    """The same, of which the first matrix alone is on a mesh of its own, of all ranks too."""
    model, params = Bare(SHAPES), []
    for index, param in enumerate(model.parameters()):
        mesh = mesh_of() if index else init_device_mesh("cpu", (1, dist.get_world_size()))
        place = [Shard(0)] if index else [Replicate(), Shard(0)]
        params.append(distribute_tensor(param.detach(), mesh, place, src_data_rank=None))
        setattr(model, f"p{index}", torch.nn.Parameter(params[-1]))
    params = list(model.parameters())
    first = {"params": params[:1], "param_numbers": [0]}
    return model, make([first, {"params": params[1:], "param_numbers": [1, 2, 3]}], **options)


def others(group, values):
    """Options of a group are others."""
    group.update(values)


def no_tensor(group, _):
    group["params"][0] = "weight"


def removed(group, _):
    for name in ("params", "param_numbers"):
        del group.get(name, [0])[0]


def turned(group, _):
    group["params"].reverse()


def no_list(group, value):
    group["params"] = value


def without(group, _):
    del group["params"]


def marked(group, name):
    setattr(group["params"][0], name, True)


@contextlib.contextmanager
def edited(optimizer, number, edit, value):
    """Within it a group is another."""
    group = optimizer.param_groups[number]
    lists = {name: list(group[name]) for name in ("params", "param_numbers") if name in group}
    kept, params = dict(group), lists["params"]
    counts = isinstance(value, dict) and "step" in value
    edit(group, value)
    try:
        yield
    finally:
        for param in params:
            vars(param).pop(value if isinstance(value, str) else "", None)
        step = kept["step"] if counts else group["step"]
        group.clear()
        group.update({**kept, **lists, "step": step})


def said_of(make, options, changes, steps=0, replicas=1, build=built):
    """As odd_step, of one in which some ranks have others.

    Args:
        make: the optimizer's class.
        options: of it.
        changes: for each such rank the number of a group, its edit and the value.
        steps: taken before.
        replicas: rows of the mesh.
        build: makes model and optimizer.
    """
    own = changes.get(dist.get_rank())

    def oddity(optimizer):
        return edited(optimizer, *own) if own else contextlib.nullcontext()

    return odd_step(*build(make, options, replicas), steps, oddity)


def trained(make, options, steps, replicas=1, build=built):
    """What the same has after steps in which all ranks agree."""
    model, optimizer = build(make, options, replicas)
    train(model, optimizer, steps)
    return snapshot(optimizer)


def said_of_a_norm(make, options):
    """The error of a first step in which the last rank alone clips."""
    model, optimizer = built(make, options)
    give(model.parameters(), gradients(0, SHAPES))
    norm = 1.0 if dist.get_rank() == dist.get_world_size() - 1 else None
    return raised_by(lambda: optimizer.step(clip_norm=norm))


def going_together(make, options):
    """Weights after steps before the last of which all ranks take the first parameter out.

    And those of a run whose first parameter has no gradient from then on.
    """
    found = []
    for is_removed in (True, False):
        model, optimizer = meshes_apart(make, options)
        train(model, optimizer, 2)
        if is_removed:
            optimizer.param_groups[0].update(params=[], param_numbers=[])
        for step in (2, 3):
            give(model.parameters(), gradients(step, SHAPES))
            model.p0.grad = None
            optimizer.step()
        found.append(whole([param.detach() for param in model.parameters()]))
    return found


DIFFER = "ranks that hold parts of the same parameters must step the same"
RANKED = {"lr": 0.01, "rank": 3, "update_proj_gap": 2}
KINDS = {
    "left": (GaLoreAdamW, {**RANKED, "proj_type": "left", "seed": 2**64 - 1}),
    "right": (GaLoreAdamW, {**RANKED, "proj_type": "auto"}),
    "saves nothing": (GaLoreAdamW, {**RANKED, "rank": 1000}),
    "muon": (FusedMuon, {"momentum_buffer_dtype": "bfloat16_stochastic"}),
}
OF_ALL = {
    "lr": 0.5,
    "lr of 0": {"lr": 0.0},
    "betas": (0.5, 0.999),
    "eps": 1e-3,
    "weight_decay": 0.3,
    "seed": 2**64 - 2,
    "step": 5,
    "param_numbers": [3, 4],
}
OTHERS = {
    GaLoreAdamW: {
        **OF_ALL,
        "rank": 4,
        "a rank that saves nothing": {"rank": 999},
        "no rank": {"rank": None},
        "update_proj_gap": 3,
        "scale": 0.25,
        "proj_type": "reverse_std",
        "bias_correction": False,
    },
    FusedMuon: {
        **OF_ALL,
        "adam_eps": 1e-3,
        "momentum": 0.5,
        "nesterov": False,
        "ns_steps": 3,
        "ns_coefficients": "quintic",
        "adjust_lr_fn": "spectral",
        "use_muon": False,
        "split_sizes": [1],
    },
}
PARAMETERS = {
    "a text in its place": (no_tensor, None, "parameter 0 of group 0 must be a tensor"),
    "removed": (removed, None, DIFFER),
    "turned": (turned, None, DIFFER),
    "a number": (no_list, 5, "group 0: params must be a list of tensors, got 5"),
    "not there": (without, None, "group 0: params must be a list of tensors, got None"),
}


def assert_all_refuse(on_ranks, world, kind, changes, there=DIFFER, **named):
    """Each rank says so, nothing has changed, and the next step is as if there had been none."""
    make, options = KINDS[kind]
    found = on_ranks(world, said_of, make, options, changes, **named)
    steps, agreeing = named.pop("steps", 0), {"build": built, "replicas": 1, **named}
    straight = on_ranks(world, trained, make, options, steps + 1, **agreeing)
    for rank, (error, before, after, then) in enumerate(found):
        assert (there if rank in changes else DIFFER) in error
        assert_same(after, before)
        assert_same(then, straight[rank])


def changed(kind, name):
    """The edit of a group by which one of OTHERS gets into it."""
    value = OTHERS[KINDS[kind][0]][name]
    return others, value if isinstance(value, dict) else {name: value}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (make, _) in KINDS.items() for name in OTHERS[make]]
)
@pytest.mark.sample(3)
def test_options_that_differ_before_the_first_step(on_ranks, kind, name):
    assert_all_refuse(on_ranks, 2, kind, {1: (0, *changed(kind, name))})


def test_the_message_says_what_each_rank_has(on_ranks):
    make, options = KINDS["left"]
    changes = {1: (0, others, {"rank": 1000})}
    for rank, (error, *_) in enumerate(on_ranks(2, said_of, make, options, changes)):
        assert f"{DIFFER}, got rank of group 0: 3 on rank 0, 1000 on rank 1; " in error
        assert f"(this is rank {rank})" in error


@pytest.mark.parametrize("name", OTHERS[FusedMuon])
def test_two_of_three_ranks_may_differ_from_the_first(on_ranks, name):
    edit = changed("muon", name)
    assert_all_refuse(on_ranks, 3, "muon", {0: (1, *edit), 2: (1, *edit)})


@pytest.mark.parametrize("name", ["rank", "update_proj_gap", "a rank that saves nothing", "lr"])
@pytest.mark.parametrize("kind", ["left", "right"])
def test_copies_of_shards_differ(on_ranks, kind, name):
    """Ranks of one row of a mesh agree with one another, and not with those that have copies."""
    edit = (0, *changed(kind, name))
    assert_all_refuse(on_ranks, 4, kind, {2: edit, 3: edit}, replicas=2)


@pytest.mark.parametrize("options", [{"update_proj_gap": 3}, {"rank": None}], ids=str)
def test_copies_of_shards_differ_in_a_later_step(on_ranks, options):
    there = DIFFER if "rank" not in options else "state 'exp_avg'"
    edit = (0, others, options)
    assert_all_refuse(on_ranks, 4, "left", {2: edit, 3: edit}, there, replicas=2, steps=2)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("edit", PARAMETERS)
@pytest.mark.parametrize("kind", ["left", "muon"])
@pytest.mark.sample(2)
def test_parameters_that_differ(on_ranks, kind, edit, steps):
    function, value, there = PARAMETERS[edit]
    assert_all_refuse(on_ranks, 2, kind, {1: (0, function, value)}, there, steps=steps)


@pytest.mark.parametrize("kind", ["left", "muon"])
def test_a_parameter_is_marked_as_an_embedding(on_ranks, kind):
    change = (0, marked, "is_embedding_or_output_parameter")
    assert_all_refuse(on_ranks, 2, kind, {1: change})


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("edit", ["a text in its place", "removed", "a number"])
def test_the_only_parameter_of_a_mesh_is_gone(on_ranks, edit, steps):
    """The others of its ranks wait there for this one."""
    function, value, there = PARAMETERS[edit]
    changes = {1: (0, function, value)}
    assert_all_refuse(on_ranks, 2, "left", changes, there, steps=steps, build=meshes_apart)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", ["left", "muon"])
def test_the_only_matrix_is_gone(on_ranks, kind, steps):
    """One rank has a vector left, which needs nobody; the others wait with the matrix."""
    changes = {1: (0, removed, None)}
    assert_all_refuse(on_ranks, 2, kind, changes, steps=steps, build=one_matrix)


def test_one_rank_clips(on_ranks):
    """The norm would be found by all."""
    make, options = KINDS["right"]
    for error in on_ranks(2, said_of_a_norm, make, options):
        assert DIFFER in error


def test_all_ranks_may_change_together(on_ranks):
    """Parameters go, also the only one of a mesh: the others' steps are as without it."""
    make, options = KINDS["left"]
    for found, expected in on_ranks(2, going_together, make, options):
        assert_same(found, expected)
