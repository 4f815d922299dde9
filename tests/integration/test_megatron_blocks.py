"""Moments in blocks under Megatron's distributed optimizer, in 1, 2 and 3 processes over gloo."""

import importlib.util
import itertools

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import contextlib
import importlib
from pathlib import Path

import megatron_cases
import megatron_gpt
import torch.distributed as dist
from bits import assert_same_bits
from megatron_gpt import BETAS, EPS, Case, Trainer, hash_of
from mutants import mutant

from megaopt import FusedAdam

# Megatron's shards with moments in blocks, and the same steps of whole parameters without it.

SIZES = {"hidden": 106, "inner": 38, "clip_grad": 0.0}
"""Most weights have no whole number of blocks; those of 38 x 106 are small, by 68 elements. 2 ranks
and 3 cut blocks of 128. Without clipping, whose norm has other bits on other numbers of ranks."""
MOMENTS = ("exp_avg", "exp_avg_sq")


# --- steps


def magnitudes(numel):
    """By windows of 64, each of which is too small for a scale of the one before: halves of one
    block differ where they have scales of their own, and so do those of two blocks taken as one."""
    windows = torch.tensor([0.0, -15.0, -30.0, -45.0]).repeat_interleave(64)
    return 2.0 ** windows.repeat(-(-numel // 256))[:numel]


def gradient(step, place, shape):
    """The same whatever the number of ranks; place: of the parameter in the model."""
    generator = torch.Generator().manual_seed(100 * step + place)
    values = torch.randn(shape, generator=generator)
    return values * magnitudes(values.numel()).view(shape)


def lr_of(step, group):
    return 1e-2 / (1 + step) + 1e-4 * group


def take_steps(trainer, steps):
    params = list(trainer.chunk.module.parameters())
    for step in range(trainer.done, trainer.done + steps):
        for index, group in enumerate(trainer.optimizer.param_groups):
            group["lr"], group["weight_decay"] = lr_of(step, index), 0.1 * group["wd_mult"]
        trainer.step_given(gradient(step, n, param.shape) for n, param in enumerate(params))
    trainer.done += steps


def content_of(optimizer, param):
    """Weight and state of a parameter or shard, and what its moments stand for."""
    found = {"weight": param.detach().clone().view(-1)}
    for name, tensor in optimizer.state[param].items():
        found[name] = tensor.clone().view(-1)
    for name in MOMENTS:
        value = optimizer.get_unscaled_state(param, name)
        found[f"value of {name}"] = value.clone().view(-1)
    return found


def seen(trainer):
    """This rank's parts, by name: where they begin and what they have; all whole weights."""
    trainer.gather()
    (optimizer,) = trainer.optimizer.chained_optimizers
    parts = {}
    for model, shard in optimizer.shards.items():
        start = optimizer._get_model_param_range_map(model)["param"].start
        parts[trainer.name(model)] = start, content_of(optimizer.fused, shard)
    named = trainer.chunk.module.named_parameters()
    return {"parts": parts, "weights": {name: hash_of(param.data) for name, param in named}}


def train(case, steps):
    trainer = Trainer(case)
    take_steps(trainer, steps)
    return seen(trainer)


# --- the same without Megatron's optimizer


def plain_optimizer(case, trainer, **options):
    """Of whole copies of the parameters, and these by name."""
    (optimizer,) = trainer.optimizer.chained_optimizers
    order = [param for buffer in optimizer.buffers for param in buffer.params]
    groups = [{"params": [], "weight_decay": 0.1 * g["wd_mult"]} for g in optimizer.param_groups]
    params = {}
    for name, param in trainer.chunk.module.named_parameters():
        params[name] = torch.nn.Parameter(param.detach().clone())
        params[name].megaopt_whole_shape = tuple(param.shape)  # flat, as Megatron's shards are
        params[name].megaopt_number = next(i for i, each in enumerate(order) if each is param)
        groups[optimizer.model_param_group_index_map[param][0]]["params"].append(params[name])
    options = {"master_weights": True, "use_decoupled_grad": True, **case.options, **options}
    return FusedAdam(groups, betas=BETAS, eps=EPS, **options), params


def take_plain_steps(optimizer, params, first, steps):
    for step in range(first, first + steps):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = lr_of(step, index)
        for place, param in enumerate(params.values()):
            param.decoupled_grad = gradient(step, place, param.shape)
        optimizer.step()


def of_wholes(case, stops):
    """What each parameter has after so many steps, for each of `stops`."""
    optimizer, params = plain_optimizer(case, Trainer(case))
    found, done = {}, 0
    for stop in stops:
        take_plain_steps(optimizer, params, done, stop - done)
        found[stop] = {name: content_of(optimizer, param) for name, param in params.items()}
        done = stop
    return found


def exact(case, first):
    """The moments, in fp32, after one more step from the values that `first` steps leave."""
    before = of_wholes(case, (first,))[first]
    fp32 = dict.fromkeys((f"{name}_dtype" for name in MOMENTS), torch.float32)
    optimizer, params = plain_optimizer(case, Trainer(case), **fp32)
    optimizer.initialize_states()
    for name, param in params.items():
        for moment in MOMENTS:
            optimizer.set_scaled_state(param, moment, before[name][f"value of {moment}"])
    take_plain_steps(optimizer, params, first, 1)
    return {name: content_of(optimizer, param) for name, param in params.items()}


# --- checkpoints


def save(case, steps, folder, kind):
    trainer = Trainer(case)
    take_steps(trainer, steps)
    if kind == "one file":
        groups = trainer.optimizer.state_dict()
        trainer.optimizer.save_parameter_state(f"{folder}/state")
        if dist.get_rank() == 0:
            torch.save(groups, f"{folder}/groups")
        dist.barrier()
    else:
        trainer.save(Path(folder), kind)
    return seen(trainer)


def without_signs_of_zeros(function, *arguments):
    """What a function of megatron_gpt finds, where -0 is 0: moments in blocks that are stored again
    have no -0."""
    kept = megatron_gpt.hash_of
    megatron_gpt.hash_of = lambda tensor: kept(tensor + 0)
    try:
        return function(*arguments)
    finally:
        megatron_gpt.hash_of = kept


def load_and_train(case, done, steps, folder, kind):
    """What a fresh run has that loads a checkpoint, and after so many steps more."""
    trainer = Trainer(case)
    if kind == "one file":
        groups = torch.load(f"{folder}/groups", weights_only=False)
        trainer.optimizer.load_state_dict(groups)
        trainer.optimizer.load_parameter_state(f"{folder}/state")
        trainer.done = done
    else:
        trainer.load(folder, kind, done)
    loaded = seen(trainer)
    take_steps(trainer, steps)
    return {"loaded": loaded, "after": seen(trainer)}


# --- faults that are put in


@contextlib.contextmanager
def mutated(path, change, target, names, folder):
    """Within it, names of the module `target` stand for those of a changed copy of a source."""
    source = Path(importlib.import_module(path).__file__)
    module = mutant(source, change, Path(folder))
    owner = importlib.import_module(target)
    kept = {name: getattr(owner, name) for name in names}
    for name in names:
        setattr(owner, name, getattr(module, name))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def with_fault(fault, folder, function, *arguments):
    own = Path(folder) / str(dist.get_rank())
    own.mkdir(parents=True)
    with mutated(*fault, own):
        return function(*arguments)


BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3", "seed": 3}
NEAREST = {"exp_avg_dtype": "block_e4m3_nearest", "exp_avg_sq_dtype": "block_e5m3_nearest"}
BLOCKS64 = {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3", "seed": 3}
NEAREST64 = {
    "exp_avg_dtype": "block64_e4m3_nearest",
    "exp_avg_sq_dtype": "block64_e5m3_nearest",
}
KINDS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_reshardable")
EXACT_FROM = {"exp_avg": 2.0**-13, "exp_avg_sq": 2.0**-29}
"""Of a block's largest: what is not smaller is the whole's, however blocks are cut."""


def case_of(options, mode="main_shards", **settings):
    return Case(plug=mode, options=options, **{**SIZES, **settings})


@pytest.fixture(scope="module")
def whole(once):
    """What whole parameters have without Megatron after 2, 3 and 4 steps."""
    mode = "precision_aware"  # which takes all masters
    return lambda options: once(1, of_wholes, case_of(options, mode), (2, 3, 4))[0]


@pytest.fixture(scope="module")
def saved(once, tmp_path_factory):
    """A folder with what one rank saves after 2 steps."""
    folders = {}

    def run(options):
        folder = folders.setdefault(repr(options), tmp_path_factory.mktemp("saved"))
        once(1, save, case_of(options), 2, folder, "one file")
        return folder

    return run


def put_together(ranks, name):
    """All parts of a parameter, of which none overlap, one after another."""
    parts = sorted(
        (rank["parts"][name] for rank in ranks if name in rank["parts"]), key=lambda part: part[0]
    )
    ends = [start + content["weight"].numel() for start, content in parts]
    assert [start for start, _ in parts] == [0, *ends[:-1]]
    return {key: torch.cat([content[key] for _, content in parts]) for key in parts[0][1]}


def starts_of(ranks):
    return {start for rank in ranks for start, _ in rank["parts"].values()}


def assert_whole(ranks, expected, but=()):
    """Parts together are the whole to the bit; `but`: parts of names that may differ."""
    for name, content in expected.items():
        found = put_together(ranks, name)
        assert found.keys() == content.keys()
        for key, tensor in content.items():
            if not any(each in key for each in but):
                assert_same_bits(found[key], tensor, f"{name}, {key}")
    hashes = {name: hash_of(content["weight"]) for name, content in expected.items()}
    assert all(rank["weights"] == hashes for rank in ranks)


def assert_values(ranks, expected):
    """What moments stand for, masters and weights; codes and scales may be others."""
    for name, content in expected.items():
        found = put_together(ranks, name)
        for key, tensor in content.items():
            if key not in MOMENTS and not key.endswith("_scale"):
                assert torch.equal(found[key], tensor), f"{name}, {key}"


# --- steps


PADDED = {"pads_buckets": True, "overlap": False}
RUNS = {
    "padded": (BLOCKS64, "main_shards", PADDED),
    "nearest": (NEAREST64, "main_shards", {}),
    "nearest, padded": (NEAREST64, "precision_aware", PADDED),
    "precision_aware": (BLOCKS64, "precision_aware", {}),
    "remainders": (
        {**BLOCKS64, "master_weight_dtype": "remainder8_stochastic"},
        "precision_aware",
        PADDED,
    ),
}
QUICK = [("padded", 1), ("padded", 2), ("padded", 3), ("nearest", 2), ("precision_aware", 3)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(*run, marks=[] if run in QUICK else [pytest.mark.slow])
        for run in itertools.product(RUNS, (1, 2, 3))
    ],
)
def test_blocks_of_64_are_the_whole_parameters(once, whole, name, world):
    options, mode, settings = RUNS[name]
    found = once(world, train, case_of(options, mode, **settings), 3)
    assert_whole(found, whole(options)[3])
    assert {start % 64 for start in starts_of(found)} == {0}
    assert (len(starts_of(found)) > 1) == (world > 1)


def assert_within_bound(ranks, expected, fp32):
    """How many elements differ from the whole's; fails for one that has to be the same."""
    count = {"exp_avg": 0, "exp_avg_sq": 0}
    for name, content in expected.items():
        found = put_together(ranks, name)
        for moment in MOMENTS:
            key, value = f"value of {moment}", fp32[name][moment].abs()
            differs = found[key] != content[key]
            padded = torch.nn.functional.pad(value, (0, -value.numel() % 128)).view(-1, 128)
            largest = padded.amax(1).repeat_interleave(128)[: value.numel()]
            assert not (differs & (value >= EXACT_FROM[moment] * largest)).any(), (name, key)
            count[moment] += int(differs.sum())
    return count


@pytest.fixture(scope="module")
def differences(pools, once, whole, saved):
    """Of a step from a state that one rank saved and others have loaded, cut into their parts."""

    def run(options, world, fault=None, folder=None):
        case, expected = case_of(options), whole(options)
        (fp32,) = once(1, exact, case, 2)
        step = (load_and_train, case, 2, 1, saved(options), "one file")
        if fault:
            step = (with_fault, fault, folder, *step)
        found = pools(world)(*step)
        loaded, after = ([rank[key] for rank in found] for key in ("loaded", "after"))
        assert_values(loaded, expected[2])
        assert_whole(after, expected[3], but=MOMENTS)
        assert any(start % 128 for start in starts_of(after))
        return assert_within_bound(after, expected[3], fp32)

    return run


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, NEAREST),
        pytest.param(2, BLOCKS, marks=pytest.mark.slow),
        pytest.param(3, NEAREST, marks=pytest.mark.slow),
        (3, BLOCKS),
    ],
    ids=["2-nearest", "2-stochastic", "3-nearest", "3-stochastic"],
)
def test_cut_blocks_of_128_differ_in_small_values_alone(differences, world, options):
    """Values of a whole block go into its parts without a loss; a step's keep their own scales."""
    count = differences(options, world)
    assert all(count.values()), "no block is cut where that shows"


# --- faults that these tests have to notice

FAULTS = {
    "the first element is forgotten": (
        "megaopt.integration.megatron.distributed",
        ("self._get_model_param_range_map(model)[\"param\"].start\n            shard.meg",
         "0\n            shard.meg"),
        "megaopt.integration.megatron.distributed",
        ("MainShards",),
    ),
    "the whole shape is forgotten": (
        "megaopt.integration.megatron.distributed",
        ("shard.megaopt_whole_shape = tuple(model.shape)", "pass"),
        "megaopt.integration.megatron.distributed",
        ("MainShards",),
    ),
    "the scale of the neighbour": (
        "megaopt.state.tensors",
        ("view.state_shape(name), view.first_of(name)", "view.state_shape(name), 0"),
        "megaopt.state.access",
        ("get_unscaled",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_noticed(differences, tmp_path, fault):
    with pytest.raises(AssertionError) as noticed:
        differences(NEAREST, 2, fault, tmp_path)
    assert noticed.type is AssertionError, noticed.value  # no rank's own error


def test_a_forgotten_first_element_is_noticed_where_no_block_is_cut(pools, whole, tmp_path):
    """By the random bits."""
    fault = FAULTS["the first element is forgotten"]
    step = (with_fault, fault, tmp_path, train, case_of(BLOCKS64), 3)
    found = pools(2)(*step)
    with pytest.raises(AssertionError, match="differ"):
        assert_whole(found, whole(BLOCKS64)[3])


# --- checkpoints


def resume(pools, whole, folder, worlds, kind, mode="main_shards"):
    """Saved by some ranks, loaded by others: values are the whole run's, and go on as it does."""
    case, expected = case_of(BLOCKS64, mode), whole(BLOCKS64)
    assert_whole(pools(worlds[0])(save, case, 2, folder, kind), expected[2])
    step = (load_and_train, case, 2, 2, folder, kind)
    found = pools(worlds[1])(*step)
    assert_values([rank["loaded"] for rank in found], expected[2])
    assert_whole([rank["after"] for rank in found], expected[4])


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1)], ids=str)
def test_saved_on_some_ranks_goes_on_on_others(pools, whole, tmp_path, worlds):
    resume(pools, whole, tmp_path, worlds, "one file")


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize("mode", ["main_shards", "precision_aware"])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 2), (2, 3), (3, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint(pools, whole, tmp_path, kind, worlds, mode):
    resume(pools, whole, tmp_path, worlds, kind, mode)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "one file"])
def test_cut_blocks_are_saved_and_loaded_exactly(pools, tmp_path, kind):
    """By as many ranks: what goes on is what went straight on, with the same bits."""
    case = case_of(BLOCKS)
    straight = pools(2)(train, case, 4)
    saved = pools(2)(save, case, 2, tmp_path, kind)
    found = pools(2)(load_and_train, case, 2, 2, tmp_path, kind)
    for rank, own, end in zip(found, saved, straight, strict=True):
        for name, (_, content) in own["parts"].items():
            for key, tensor in content.items():
                if key not in MOMENTS and not key.endswith("_scale"):
                    assert torch.equal(rank["loaded"]["parts"][name][1][key], tensor), (name, key)
        for name, (_, content) in end["parts"].items():
            for key, tensor in content.items():
                assert_same_bits(rank["after"]["parts"][name][1][key], tensor, f"{name}, {key}")
        assert rank["after"]["weights"] == end["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "settings"),
    [("main_shards", {"experts": 2}), ("precision_aware", {"tensor_parallel": 2})],
    ids=str,
)
def test_training_goes_on_from_a_checkpoint(pools, tmp_path, mode, settings):
    """Forward and backward passes, clipping and buckets of Megatron's own."""
    case = Case(plug=mode, options=BLOCKS, hidden=64, **settings)

    def values(function, *arguments):
        return pools(2)(without_signs_of_zeros, function, *arguments)

    straight = values(megatron_gpt.train, case, 5)
    saved = values(megatron_gpt.train_and_save, case, tmp_path, KINDS[0], 3)
    back = values(megatron_gpt.load_and_train, case, tmp_path, KINDS[0], 3, 2)
    assert [each["loaded"] for each in back] == saved
    for name in ("weights", "states"):
        assert [each[name] for each in back] == [each[name] for each in straight]
    assert [each["steps"] for each in back] == [each["steps"][3:] for each in straight]
    assert values(megatron_gpt.train, Case(plug=mode, hidden=64, **settings), 5) != straight


# --- refusals

REFUSED = {
    "contract torch": (
        ("main_shards", NEAREST, ("option", "contract", "torch")),
        "exp_avg_dtype='block_e4m3_nearest', exp_avg_sq_dtype='block_e5m3_nearest' must not be "
        "given with contract='torch'",
    ),
    "fp16 masters": (
        ("precision_aware", BLOCKS, ("option", "master_weight_dtype", torch.float16)),
        "exp_avg_dtype='block_e4m3', exp_avg_sq_dtype='block_e5m3' must not be given beside "
        "master_weight_dtype=torch.float16",
    ),
    "two sizes": (
        ("main_shards", BLOCKS, ("option", "exp_avg_sq_dtype", "block64_e5m3")),
        "moments in blocks must have blocks of one size",
    ),
    "a format of the other moment": (
        ("main_shards", {}, ("option", "exp_avg_sq_dtype", "block_e4m3")),
        "exp_avg_sq_dtype must be one of block_e5m3",
    ),
}


@pytest.mark.parametrize(("asked", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(pools, asked, message):
    mode, options, change = asked
    ((error, unchanged),) = pools(1)(megatron_cases.error_of, case_of(options, mode), change)
    assert error.startswith(f"ValueError: {message}")
    assert unchanged
