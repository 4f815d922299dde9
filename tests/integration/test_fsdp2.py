"""DTensor parameters: sharded steps are whole steps, and what N ranks saved M ranks load."""

from unittest import mock

import fsdp2_ranks
import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from fsdp2_ranks import (
    assert_same_on_all,
    build,
    give,
    gradients,
    mesh_of,
    snapshot,
    split_like,
    train,
    trained,
    whole,
)
from runs import BF16, FP32, MASTER, REMAINDERS, assert_same, values
from torch.distributed._functional_collectives import AsyncCollectiveTensor, reduce_scatter_tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megaopt import FusedAdam
from megaopt.kernels.step.reference import ReferencePlan

# --- what ranks do


LAYERS = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (5, 6), "2.bias": (5,)}
LAYERS |= {"3.weight": (5,), "3.bias": (5,)}


def with_tensor_parallel(options, steps):
    """FSDP2 over tensor parallelism, 2 x 2: meshes of one and two dimensions, strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layers = [torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5)]
    model = torch.nn.Sequential(*layers)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    for param in model.parameters():  # each element's place in the whole tensor
        local = param.detach()
        places = torch.arange(param.numel(), dtype=FP32).view(param.shape)
        if isinstance(param, DTensor):
            places = split_like(param, places)
        local.copy_(places)
    fully_shard(model, mesh=mesh["data"])
    params = dict(model.named_parameters())
    places = {name: param.to_local().long() for name, param in params.items()}

    def part(name, value):
        own = value.flatten()[places[name].flatten()].view(places[name].shape)
        own = own.contiguous()
        like = params[name]
        given = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        return DTensor.from_local(own, like.device_mesh, like.placements, **given)

    for index, (name, param) in enumerate(params.items()):
        param.detach().copy_(part(name, values(LAYERS[name], index)))
    optimizer = FusedAdam(params.values(), **options)
    for step in range(steps):
        grads = gradients(step, LAYERS.values())
        for (name, param), grad in zip(params.items(), grads, strict=True):
            param.grad = part(name, grad)
        optimizer.step(clip_norm=0.5)
    return snapshot(optimizer), optimizer.grad_norm


def losses(replicas, steps, options):
    """bf16 weights made of fp32 ones that stay as masters; every rank has the same batches."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3)]
    model = torch.nn.Sequential(*layers)
    if dist.is_initialized():
        mesh = mesh_of(replicas)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    optimizer = FusedAdam(model.parameters(), master_weights=masters, **options)
    found = []
    for step in range(steps):
        loss = model(values((4, 6), step, BF16)).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step(clip_norm=0.5)
        optimizer.zero_grad()
    return found, snapshot(optimizer)


def kinds_of_state(options, replicas):
    """Whether each state tensor is a DTensor of the parameter's mesh and placements."""
    model, optimizer = build(options, replicas)
    train(model, optimizer, 1)
    return [
        isinstance(tensor, DTensor)
        and tensor.placements == param.placements
        and tensor.device_mesh == param.device_mesh
        and tensor.shape == param.shape
        and tensor.stride() == param.stride()
        for param in model.parameters()
        for tensor in optimizer.state[param].values()
        if tensor is not None
    ]


def look_before_the_first_step(options, steps, poison):
    """What get_optimizer_state_dict leaves behind, and what training then comes to."""
    model, optimizer = build(options)
    if poison:
        with torch.no_grad():
            for param in model.parameters():
                flat = param.to_local().view(-1)
                flat[:1], flat[1:2] = float("nan"), -0.0
                flat[2:3], flat[3:4] = float("inf"), 1e-40
    before = [param.to_local().clone() for param in model.parameters()]
    lrs = [group["lr"] for group in optimizer.param_groups]
    saved = get_optimizer_state_dict(model, optimizer)
    after = [param.to_local().clone() for param in model.parameters()]
    state = snapshot(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == lrs
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, steps)
    names = {name: sorted(own) for name, own in saved["state"].items()}
    return before, after, state, snapshot(optimizer), names


def warm_up_from_zero(options, shapes, row):
    """The first step has lr=0, and gradients that are 0 but for one row; then a second step."""
    model, optimizer = build(options, shapes=shapes)
    params = list(model.parameters())
    for lr in (0.0, 0.5):
        for group in optimizer.param_groups:
            group["lr"] = lr
        grads = [torch.zeros(shape) for shape in shapes]
        grads[0][row] = 1.0
        give(params, grads)
        optimizer.step()
    return snapshot(optimizer)


def gradients_of_0(options):
    model, optimizer = build(options)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return snapshot(optimizer)


def clipped(options, steps, replicas, beside):
    """Steps that clip; and the norms. With a plain parameter, the same on all ranks, beside."""
    model, optimizer = build(options, replicas)
    if beside:
        plain = torch.nn.Parameter(values((9,), 70))
        optimizer.add_param_group({"params": [plain]})
    norms = []
    for step in range(steps):
        shapes = [tuple(param.shape) for param in model.parameters()]
        give(model.parameters(), gradients(step, shapes, next(model.parameters()).dtype))
        if beside:
            plain.grad = values((9,), 90 + step)
        optimizer.step(clip_norm=1.0)
        norms.append(optimizer.grad_norm.clone())
    return snapshot(optimizer), norms


def one_infinity(options, place):
    """An infinity in one element of one tensor, which one rank holds."""
    model, optimizer = build({**options, "nonfinite": "skip"})
    train(model, optimizer, 1)
    before = snapshot(optimizer)
    grads = gradients(1)
    grads[4].view(-1)[place] = float("inf")
    give(model.parameters(), grads)
    optimizer.step()
    return before, snapshot(optimizer)


def without_gradients_here(options):
    """Only the last parameters have gradients, of which some ranks hold nothing."""
    model, optimizer = build(options, shapes=[(1, 4), (1,)])
    train(model, optimizer, 2, clip_norm=0.5)
    return snapshot(optimizer), optimizer.grad_norm


def scaled_by_a_grad_scaler(options, overflow_on, step_unscales):
    """torch.amp.GradScaler over DTensors: an infinity in one row of one gradient."""
    model, optimizer = build(options)
    optimizer.step_unscales = step_unscales
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    counts = []
    for step in range(3):
        grads = [grad * scaler.get_scale() for grad in gradients(step)]
        if step == 1:
            grads[0][overflow_on] = float("inf")
        give(model.parameters(), grads)
        scaler.step(optimizer)
        scaler.update()
        counts.append(optimizer.param_groups[0]["step"])
    return snapshot(optimizer), counts, scaler.get_scale()


def unscaled_by_a_step(options, transposed):
    """The gradients that steps under a scale leave, and the scaled ones."""
    model, optimizer = build({**options, "write_unscaled_grads": True})
    optimizer.grad_scale, seen = torch.tensor(256.0), []
    for step in range(2):
        given = [grad * 256.0 for grad in gradients(step)]
        give(model.parameters(), given)
        if transposed:
            shard = model.p0.grad._local_tensor
            model.p0.grad._local_tensor = shard.t().contiguous().t()
        optimizer.step()
        seen.append([whole(param.grad) for param in model.parameters()])
    return snapshot(optimizer), seen


def moved(options):
    """Shards in new memory, some of them transposed, between steps; what was left stays."""
    model, optimizer = build(options)
    train(model, optimizer, 1)
    left = []
    for param in model.parameters():
        for own in (param, *optimizer.state[param].values()):
            if own is not None:
                left.append((own._local_tensor, own._local_tensor.clone()))
                own._local_tensor = own._local_tensor.clone()
    shard = model.p0._local_tensor
    model.p0._local_tensor = shard.t().contiguous().t()
    train(model, optimizer, 2, first=1)
    assert all(torch.equal(was, copy) for was, copy in left)
    return snapshot(optimizer)


def beside_plain_ones(options):
    """DTensors and plain parameters in one optimizer; and the launches of each step."""
    mesh, launch_alone = mesh_of(), ReferencePlan.step
    wholes = [values(shape, i) for i, shape in enumerate([(5, 3), (7,), (4,)])]
    given = [
        distribute_tensor(wholes[0], mesh, [Replicate()], src_data_rank=None),
        wholes[1],
        distribute_tensor(wholes[2], mesh, [Replicate()], src_data_rank=None),
    ]
    params = [torch.nn.Parameter(value) for value in given]
    optimizer = FusedAdam(params, **options)
    launches = []
    for step in range(3):
        give(params, gradients(step, [tuple(param.shape) for param in params]))
        with mock.patch.object(ReferencePlan, "step", autospec=True) as launch:
            launch.side_effect = launch_alone
            optimizer.step()
        launches.append(launch.call_count)
    return snapshot(optimizer), launches


def read_and_set(options):
    """Values read, and set again into another optimizer; what they are, and its state."""
    model, optimizer = build(options)
    train(model, optimizer, 2)
    other_model, other = build(options, seed=50)
    read = {}
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        pairs = zip(model.parameters(), other_model.parameters(), strict=True)
        for index, (param, own) in enumerate(pairs):
            value = optimizer.get_unscaled_state(param, name)
            assert value.placements == param.placements
            assert value.device_mesh == param.device_mesh
            other.set_scaled_state(own, name, value.clone())
            read[f"{name} {index}"] = whole(value)
    for own in other.param_groups:
        own["step"] = 2
    # an fp32 master sets no weight before the next step
    train(other_model, other, 1, first=2)
    train(model, optimizer, 1, first=2)
    return read, snapshot(other), snapshot(optimizer)


def gradients_that_are_on_their_way(options):
    """Each rank has half of every gradient; collectives that nobody has waited for add them up."""
    mesh, shapes = mesh_of(), [(4, 3), (6,)]
    params = [torch.nn.Parameter(split_like_rows(mesh, s, i)) for i, s in enumerate(shapes)]
    optimizer = FusedAdam(params, **options)
    for step in range(3):
        for param, grad in zip(params, gradients(step, shapes), strict=True):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
            half = grad / dist.get_world_size()
            if step:  # the batches are made with a tensor that is there
                local = reduce_scatter_tensor(half, "sum", 0, mesh)
                assert type(local) is AsyncCollectiveTensor
                param.grad._local_tensor = local
        optimizer.step(clip_norm=1.0)
    return snapshot(optimizer)


def split_like_rows(mesh, shape, seed):
    return distribute_tensor(values(shape, seed), mesh, [Shard(0)], src_data_rank=None)


HYPER = {"lr": 0.01, "weight_decay": 0.1}
DRAWN = "bfloat16_stochastic"
KINDS = {
    "fp32": {},
    "adam_l2": {"adam_w_mode": False},
    "bf16": {"weights": BF16},
    "masters": {"weights": BF16, **MASTER},
    "external": {"external": True},
    "remainders": {"weights": BF16, **REMAINDERS},
    "bf16_moments": {"weights": BF16, **MASTER, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "capturable": {"capturable": True},
    "stochastic": {
        "weights": BF16,
        "weight_rounding": "stochastic",
        "master_weights": False,
        "exp_avg_dtype": DRAWN,
        "exp_avg_sq_dtype": DRAWN,
        "seed": 7,
    },
    "24_bits": {
        "weights": BF16,
        "master_weights": True,
        "master_weight_dtype": "remainder8_stochastic",
    },
}
KINDS = {name: {**HYPER, **options} for name, options in KINDS.items()}
# ranks and, of these, rows with copies of one another's shards
LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}

all_kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
all_layouts = pytest.mark.parametrize(("world", "replicas"), LAYOUTS.values(), ids=LAYOUTS)


# shards of columns draw by their elements' places too
TENSOR_PARALLEL = {
    "nearest": HYPER,
    "stochastic": {**HYPER, "exp_avg_dtype": DRAWN, "exp_avg_sq_dtype": DRAWN},
}


@all_layouts
@all_kinds
@pytest.mark.sample(3)
def test_sharded_steps_are_whole_steps(on_ranks, options, world, replicas):
    found = on_ranks(world, trained, options, 3, replicas)
    assert_same_on_all(found, trained(options, 3))


OTHER_RULES = {
    "lion": {"optimizer": "FusedLion", "weights": BF16, **MASTER},
    "sgd": {"optimizer": "FusedSGD"},
    "sgd_nesterov": {"optimizer": "FusedSGD", "momentum": 0.9, "nesterov": True, "weights": BF16},
    "amsgrad": {"amsgrad": True, "maximize": True, "weights": BF16, **REMAINDERS},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", OTHER_RULES.values(), ids=OTHER_RULES)
def test_sharded_steps_of_other_rules_are_whole_steps(on_ranks, options, world):
    options = {**HYPER, **options}
    found = on_ranks(world, trained, options, 3)
    assert_same_on_all(found, trained(options, 3))


@all_layouts
def test_state_is_sharded_as_its_parameter(on_ranks, world, replicas):
    for options in (KINDS["masters"], KINDS["remainders"], KINDS["external"]):
        for kinds in on_ranks(world, kinds_of_state, options, replicas):
            assert len(kinds) == 3 * len(fsdp2_ranks.SHAPES)
            assert all(kinds)


# --- torch.distributed.checkpoint


@pytest.mark.sample(5)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(
    "worlds", [(1, 2), (2, 3), (3, 1), (2, 2)], ids=lambda w: f"{w[0]}to{w[1]}"
)
@pytest.mark.parametrize("kind", ["fp32", "masters", "remainders", "external", "capturable"])
def test_saved_on_some_ranks_loads_on_others(on_ranks, tmp_path, kind, worlds, flat):
    options, folder = KINDS[kind], str(tmp_path / "checkpoint")
    on_ranks(worlds[0], fsdp2_ranks.save, options, 2, folder, flat)
    found = on_ranks(worlds[1], fsdp2_ranks.load_and_train, options, 2, 2, folder, flat)
    for loaded, after in found:
        assert_same(loaded, trained(options, 2))
        assert_same(after, trained(options, 4))


@pytest.mark.parametrize("flat", [False, True])
def test_counts_of_parameters_are_saved_on_some_ranks_and_load_on_others(on_ranks, tmp_path, flat):
    options, folder = {**HYPER, "step_counts": "parameter"}, str(tmp_path / "checkpoint")
    on_ranks(2, fsdp2_ranks.save, options, 2, folder, flat)
    for loaded, after in on_ranks(1, fsdp2_ranks.load_and_train, options, 2, 2, folder, flat):
        assert_same(loaded, trained(options, 2))
        assert_same(after, trained(options, 4))


@pytest.mark.parametrize("kind", ["fp32", "masters"])
def test_full_state_dicts(on_ranks, kind):
    found = on_ranks(2, fsdp2_ranks.through_full_state, KINDS[kind], 2, 2)
    assert_same_on_all(found, trained(KINDS[kind], 4))


INERT = {
    **{name: (KINDS[name], False) for name in KINDS},
    "decoupled": ({**KINDS["remainders"], "use_decoupled_grad": True}, False),
    "eps_0": ({**HYPER, "eps": 0.0}, False),
    "no_numbers": ({**HYPER, "eps": 0.0}, True),
    "no_numbers_remainders": ({**KINDS["remainders"]}, True),
}


@pytest.mark.parametrize(("options", "poison"), INERT.values(), ids=INERT)
def test_looking_at_the_state_before_the_first_step_changes_nothing(on_ranks, options, poison):
    """torch's get_optimizer_state_dict steps with zero gradients and lr=0, to make the state."""
    expected = None if poison else trained(options, 2)
    for found in on_ranks(2, look_before_the_first_step, options, 2, poison):
        before, after, state, then, names = found
        for one, other in zip(after, before, strict=True):
            assert_same_bits(one, other)
        assert state["steps"] == [0]
        for own in state["states"]:
            for name in ("exp_avg", "exp_avg_sq"):
                assert not own[name].any()
        assert all(names.values())
        if not poison:
            assert_same(then, expected)


def test_a_real_first_step_with_lr_0_is_counted_on_all_ranks(on_ranks):
    """Gradients are 0 on some ranks, and one rank has nothing at all."""
    found = on_ranks(3, warm_up_from_zero, HYPER, [(2, 3)], 1)
    assert_same_on_all(found, warm_up_from_zero(HYPER, [(2, 3)], 1))
    assert found[0]["steps"] == [2]


def test_a_first_step_with_gradients_of_0_decays_the_weights(on_ranks):
    expected = gradients_of_0(HYPER)
    assert_same_on_all(on_ranks(2, gradients_of_0, HYPER), expected)
    assert not torch.equal(expected["weights"][0], build(HYPER)[0].p0)


# --- the norm


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside_plain"])
@all_layouts
def test_clip_norm_is_that_of_whole_tensors(on_ranks, world, replicas, beside):
    options = KINDS["capturable" if beside else "fp32"]
    found = on_ranks(world, clipped, options, 3, replicas, beside)
    expected = clipped(options, 3, 1, beside)
    assert all(norm > 1 for norm in expected[1])
    assert_same_on_all(found, expected)


@pytest.mark.parametrize("place", [0, 1199], ids=["first_rank", "last_rank"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(on_ranks, place):
    for before, after in on_ranks(2, one_infinity, HYPER, place):
        assert_same(after, before)


def test_ranks_that_hold_nothing_take_part_in_the_norm(on_ranks):
    found = on_ranks(3, without_gradients_here, HYPER)
    assert_same_on_all(found, [*without_gradients_here(HYPER)])


@pytest.mark.parametrize("row", [0, 4], ids=["first_rank", "last_rank"])
@pytest.mark.parametrize("step_unscales", [False, True])
def test_grad_scaler_skips_on_all_ranks(on_ranks, row, step_unscales):
    found = on_ranks(2, scaled_by_a_grad_scaler, HYPER, row, step_unscales)
    model, optimizer = build(HYPER)
    train(model, optimizer, 1)
    train(model, optimizer, 1, first=2)
    for own, counts, scale in found:
        assert_same(own, snapshot(optimizer))
        assert counts == [1, 1, 2]
        assert scale == 128.0


@pytest.mark.parametrize("transposed", [False, True])
def test_unscaled_gradients_are_written_into_shards(on_ranks, transposed):
    """A power of two as scale: what is unscaled is what it was before."""
    model, optimizer = build(HYPER)
    train(model, optimizer, 2)
    expected = [fsdp2_ranks.gradients(step) for step in range(2)]
    for state, seen in on_ranks(2, unscaled_by_a_step, HYPER, transposed):
        assert_same(state, snapshot(optimizer))
        assert_same(seen, expected)


# --- tensors, backends, models


@pytest.mark.parametrize("kind", ["fp32", "remainders"])
def test_shards_that_move_between_steps(on_ranks, kind):
    found = on_ranks(2, moved, KINDS[kind])
    assert_same_on_all(found, trained(KINDS[kind], 3))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gradients_that_are_still_being_made_are_waited_for(on_ranks, backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is off beside a GPU")
    options = {**HYPER, "backend": backend}
    found = on_ranks(2, gradients_that_are_on_their_way, options)
    model, optimizer = build(HYPER, shapes=[(4, 3), (6,)])
    train(model, optimizer, 3, clip_norm=1.0)
    assert_same_on_all(found, snapshot(optimizer))


def test_plain_and_replicated_parameters_share_the_launch(on_ranks):
    params = [torch.nn.Parameter(values(s, i)) for i, s in enumerate([(5, 3), (7,), (4,)])]
    optimizer = FusedAdam(params, **HYPER)
    for step in range(3):
        fsdp2_ranks.give(params, fsdp2_ranks.gradients(step, [(5, 3), (7,), (4,)]))
        optimizer.step()
    found = on_ranks(2, beside_plain_ones, HYPER)
    assert_same_on_all(found, [snapshot(optimizer), [1, 1, 1]])


@pytest.mark.parametrize("kind", ["masters", "remainders", "bf16_moments"])
def test_values_read_and_set(on_ranks, kind):
    model, optimizer = build(KINDS[kind])
    train(model, optimizer, 2)
    expected = {
        f"{name} {index}": optimizer.get_unscaled_state(param, name).clone()
        for name in ("exp_avg", "exp_avg_sq", "master_param")
        for index, param in enumerate(model.parameters())
    }
    for read, other, straight in on_ranks(3, read_and_set, KINDS[kind]):
        assert_same(read, expected)
        assert_same(other, straight)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU")
@pytest.mark.parametrize("kind", ["masters", "remainders"])
def test_triton_steps_shards(on_ranks, kind):
    options = {**KINDS[kind], "backend": "triton"}
    found = on_ranks(2, clipped, options, 2, 1, True)
    assert_same_on_all(found, clipped(KINDS[kind], 2, 1, True))


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (4, 2)], ids=["1", "2", "2x2"])
def test_a_model_trains_as_without_fsdp(on_ranks, world, replicas):
    """Means of equal gradients on 2 or 4 ranks are exact."""
    options = {**HYPER, "exp_avg_dtype": BF16}
    found = on_ranks(world, losses, replicas, 4, options)
    assert_same_on_all(found, losses(1, 4, options))


@pytest.mark.parametrize("options", TENSOR_PARALLEL.values(), ids=TENSOR_PARALLEL)
def test_fsdp_over_tensor_parallel(on_ranks, options):
    """Every element is stepped once, and counts once in the norm, copies included."""
    shapes = list(LAYERS.values())
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, 3, clip_norm=0.5)
    found = on_ranks(4, with_tensor_parallel, options, 3)
    assert_same_on_all(found, [snapshot(optimizer), optimizer.grad_norm])


def test_shards_on_the_cpu_of_a_mesh_of_gpus_stay_there():
    """What FSDP2 offloads; where there is no GPU, moving a shard to the mesh's device fails."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)

    def sharded(tensor):
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensor(tensor, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)

    plain = torch.nn.Parameter(values((5, 3), 0).to(BF16))
    own = torch.nn.Parameter(sharded(plain.detach().clone()))
    steppers = [FusedAdam([param], **HYPER, **MASTER) for param in (own, plain)]
    for step in range(3):
        grad = values((5, 3), step + 1).to(BF16)
        own.grad, plain.grad = sharded(grad), grad.clone()
        for optimizer in steppers:
            optimizer.step()
    (found,), (expected,) = (optimizer.state.values() for optimizer in steppers)
    assert_same({name: value.to_local() for name, value in found.items()}, dict(expected))
    assert_same(own.to_local(), plain)
