"""Muon inside Megatron-Core, which runs here on the CPU, over gloo, in 1, 2 and 3 processes."""

import importlib.util
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import copy
import importlib
import warnings
from functools import partial

import megatron_gpt
import torch.distributed as dist
from fsdp2_ranks import raised_by
from megatron_cases import save_without_psutil
from megatron_gpt import (
    HAS_KEYS,
    Case,
    build_chunks,
    hash_of,
    make_groups,
    megatron,
    random_gradients,
    seen,
)
from megatron_muon import MuonTrainer, build, run_the_page
from slow_cases import names_but

from megaopt.lab.regression.megatron.optimizer import leaves

# --- what ranks do


def muon_config(**more):
    """What a Case's config says to take Muon."""
    return {"optimizer": "muon", "use_distributed_optimizer": False, **more}


def layer_wise(**more):
    name = (
        {"use_layer_wise_distributed_optimizer": True} if HAS_KEYS else {"optimizer": "dist_muon"}
    )
    return muon_config(**name, **more)


def cut(**more):
    """Matrices are in shards of the ordinary distributed optimizer."""
    return {"config": muon_config(**{**more, "use_distributed_optimizer": True}), "shards": True}


train = partial(megatron_gpt.train, kind=MuonTrainer)


train_and_save = partial(megatron_gpt.train_and_save, kind=MuonTrainer)


load_and_train = partial(megatron_gpt.load_and_train, kind=MuonTrainer)


def step_given_gradients(case, steps=3):
    """What a run has whose gradients are the same on any number of ranks."""
    trainer = MuonTrainer(case)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    return seen(trainer)


def step_clipped(case, factors=(1.0, 1.0, 1.0)):
    """What a run has, and by what its gradients, which are multiplied before, are to be clipped."""
    trainer, found = MuonTrainer(case), []
    for step, factor in enumerate(factors):
        grads = random_gradients(step, trainer.chunk.module.parameters())
        _, norm, _ = trainer.step_given([grad * factor for grad in grads])
        found.append(torch.tensor(case.clip_grad / (norm + 1e-6)).item())
    return seen(trainer), found


def matrices_made(case, steps=2):
    """What a run has, and for each of Muon's weights among how many ranks the work is divided."""
    trainer = MuonTrainer(case)
    for step in range(steps):
        trainer.step_given(random_gradients(step, trainer.chunk.module.parameters()))
    muons = [leaf.fused for leaf in leaves(trainer.optimizer) if hasattr(leaf.fused, "describe")]
    return seen(trainer), [each.ranks for muon in muons for each in muon.describe()]


def names_owned(case):
    """The weights that this rank steps."""
    return [name for name, *_ in MuonTrainer(case).parts()]


def load_weights_first(case):
    """A step of a run, and the same of one into which the run before it was loaded."""
    trainer, other = MuonTrainer(case), MuonTrainer(case)
    trainer.train(2)
    other.chunk.module.load_state_dict(trainer.chunk.module.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    other.done = trainer.done
    return [(each.step(), seen(each)) for each in (trainer, other)]


PATCHED = ("", ".layer_wise_optimizer", *(() if HAS_KEYS else (".muon",)))
"""Modules of Megatron's optimizers in which names stand for ours while one is made."""


def mark(layer):
    layer.mlp.linear_fc1.weight.use_muon = False


def take_another_attention(layer):
    layer.self_attention.__class__ = type("Other", (torch.nn.Module,), {})


def take_other_rows(layer):
    layer.self_attention.linear_qkv.weight = torch.nn.Parameter(torch.zeros(40, 32))


def fuse_experts(layer):
    """As 0.16's GroupedMLP has them."""
    layer.mlp.num_local_experts = 2
    layer.mlp.register_parameter("weight1", layer.mlp.linear_fc1.weight)


CHANGES = {
    each.__name__: each for each in (mark, take_another_attention, take_other_rows, fuse_experts)
}
"""What is done to the first layer before its optimizer is made."""


def error_of(case, change=None):
    """The error of making the optimizer, and which names of Megatron's are others after it."""
    modules = [importlib.import_module(f"megatron.core.optimizer{name}") for name in PATCHED]
    before = [dict(vars(module)) for module in modules]
    _, chunks = prepared(case)
    if change is not None:
        CHANGES[change](chunks[0].module.decoder.layers[0])
    error = raised_by(lambda: build(case, chunks)) or "no error"
    left = [
        name
        for module, kept in zip(modules, before, strict=True)
        for name, value in kept.items()
        if vars(module)[name] is not value
    ]
    return error, left


def prepared(case):
    make_groups(case)
    return build_chunks(case)


def warnings_of(case):
    """What is told while the optimizer is made."""
    _, chunks = prepared(case)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        build(case, chunks)
    return [str(each.message) for each in told if "muon" in str(each.message)]


def shapes_of(case, sizes):
    """The matrices of each parameter of Muon's, where the first layer's MLP says its sizes."""
    _, chunks = prepared(case)
    chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.muon_split_sizes = sizes
    (muon, *_) = leaves(build(case, chunks))
    return [list(each.matrices) for each in muon.fused.describe()]


def step_parts(case, steps=3):
    """A hash of each whole weight and its moments after steps of given whole gradients."""
    trainer = MuonTrainer(case)
    group = megatron("parallel_state").get_tensor_model_parallel_group()
    params = list(trainer.chunk.module.parameters())
    for step in range(steps):
        grads = [
            own_part(torch.randn(whole_shape(param, group), generator=generator), param, group)
            for number, param in enumerate(params)
            for generator in [torch.Generator().manual_seed(100 * step + number)]
        ]
        trainer.step_given(grads)
    return joined(trainer)


def save_parts(case, folder, form):
    """The same of a training, which is saved."""
    trainer = MuonTrainer(case)
    trainer.train(2)
    trainer.save(folder, form)
    return joined(trainer)


def load_parts(case, folder, form):
    """The same of what is loaded."""
    trainer = MuonTrainer(case)
    trainer.load(folder, form, 2)
    return joined(trainer)


def joined(trainer):
    """A hash of each whole weight and its moments, of the parts of all ranks."""
    rank = megatron("parallel_state").get_tensor_model_parallel_rank()
    params = dict(trainer.chunk.module.named_parameters())
    own = [(name.partition(" of ")[0], tensors) for name, _, _, tensors in trainer.parts()]
    own += [(name, {"weight": param.detach().view(-1)}) for name, param in params.items()]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (rank, own))
    parts = {}
    for other, held in gathered:
        for name, tensors in held:
            for key, tensor in tensors.items():
                parts.setdefault((name, key), {})[other] = tensor.view(params[name].shape)
    return {
        place: hash_of(together([own[i] for i in sorted(own)], params[place[0]]))
        for place, own in sorted(parts.items())
    }


def together(parts, param):
    dim = getattr(param, "partition_dim", -1)
    return parts[0] if dim < 0 else torch.cat(parts, dim)


def whole_shape(param, group):
    shape, dim = list(param.shape), getattr(param, "partition_dim", -1)
    if dim >= 0:
        shape[dim] *= group.size()
    return shape


def own_part(tensor, param, group):
    dim = getattr(param, "partition_dim", -1)
    return tensor if dim < 0 else tensor.chunk(group.size(), dim)[group.rank()]


NESTEROV = "muon_nesterov" if HAS_KEYS else "muon_use_nesterov"
OTHERS = {
    NESTEROV: True,
    "muon_momentum": 0.8,
    "muon_scale_mode": "unit_rms_norm",
    "muon_num_ns_steps": 3,
}
ON_OWNERS = {"config": layer_wise()}
DUPLICATED = {"config": muon_config(muon_tp_mode="duplicated")}
SETTINGS = {
    "bf16": {},
    "bf16 gradients": {"fp32_grads": False, "clip_grad": 0.1},
    "unclipped": {"clip_grad": 0.0},
    "zeros counted": {"counts_zeros": True, "fp32_grads": False},
    "fp32": {"dtype": torch.float32},
    "reduced in the backward pass": {"overlap": True, "gathers_late": False},
    "query groups": {"heads": 4, "groups": 2},
    "QKV as one": {"config": muon_config(muon_split_qkv=False)},
    "other numbers": {"config": muon_config(**OTHERS)},
    "matched": {"config": muon_config(muon_extra_scale_factor=0.2)},
    "Adam": {"adam_w_mode": False},
    "decoupled lr": {"decoupled_lr": 0.5},
    "experts": {"experts": 2},
    "pipeline": {"pipeline": 2},
    "virtual pipeline": {"pipeline": 2, "virtual": 2},
    "tensor parallel": {"tensor_parallel": 2},
    "duplicated": {"tensor_parallel": 2, **DUPLICATED},
    "duplicated, query groups": {"tensor_parallel": 2, "heads": 4, "groups": 2, **DUPLICATED},
    "on owners": ON_OWNERS,
    "on owners, bf16 gradients": {"fp32_grads": False, "counts_zeros": True, **ON_OWNERS},
    "experts on owners": {"experts": 2, **ON_OWNERS},
}


def case_of(plug=None, **settings):
    own = {"shards": False, "overlap": False, "config": muon_config(), **settings}
    return Case(plug=plug, **{"options": {"contract": "eo"} if plug else {}, **own})


LAID_OUT = {"shards": True, "lays_out": True}
if HAS_KEYS:
    SETTINGS |= {
        "a norm of their own": {"mtp": True, "fp32_grads": False, "clip_grad": 0.1},
        "in buffers of owners": {**LAID_OUT, "config": layer_wise()},
        "in buffers of owners, gathered late": {
            **LAID_OUT, "overlap": True, "config": layer_wise(overlap_param_gather=True),
        },
    }  # fmt: skip


QUICK = ("query groups", "experts", "duplicated", "in buffers of owners")


@pytest.mark.parametrize("name", names_but(SETTINGS, QUICK))
def test_contract_eo_has_every_bit_of_megatrons_own(pools, once, name):
    expected = once(2, train, case_of(**SETTINGS[name]), 3)
    found = pools(2)(train, case_of("main_shards", **SETTINGS[name]), 3)
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == 3
    kinds = {frozenset(state) for state in found[0]["states"].values()}
    assert kinds == {
        frozenset({"param", "momentum_buffer"}), frozenset({"param", "exp_avg", "exp_avg_sq"})
    }  # fmt: skip


@pytest.mark.parametrize("contract", names_but(("ieee", "eo"), ("ieee",)))
def test_owners_and_shards_move_no_bit(pools, contract):
    """Without clipping: the norm adds up in other orders."""
    one = case_of("main_shards", clip_grad=0.0, options={"contract": contract})
    owned, shards = replace(one, config=layer_wise()), replace(one, **cut())
    (whole,) = pools(1)(step_given_gradients, one)
    runs = ((2, one), (2, owned), (3, owned), (1, shards), (2, shards), (3, shards))
    for world, case in runs:
        assert pools(world)(step_given_gradients, case) == [whole] * world


DIVIDED = {
    "bf16 gradients": (2, {"fp32_grads": False, "options": {}}, {2}),
    "fp32": (3, {"dtype": torch.float32, "options": {}}, {3}),
    "eo, clipped": (2, {"clip_grad": 0.1}, {2}),
    "experts": (2, {"experts": 2, "options": {}}, {1, 2}),
    "experts that all have": (3, {"experts": 2, "options": {}}, {3}),
    "tensor parallel": (4, {"tensor_parallel": 2, "options": {}}, {2}),
    "pipeline": (4, {"pipeline": 2, "options": {}}, {2}),
    "context parallel": (2, {"context": 2, "options": {}}, {2}),
}


@pytest.mark.parametrize("name", names_but(DIVIDED, ("bf16 gradients", "experts")))
def test_data_parallel_ranks_divide_the_work_and_move_no_bit(pools, name):
    """Of experts those that have the same ones."""
    world, settings, ranks = DIVIDED[name]
    case = case_of("main_shards", **settings)
    alone = replace(case, options={**case.options, "divides_matrices": False})
    found = pools(world)(matrices_made, case)
    expected = pools(world)(matrices_made, alone)
    assert [own for own, _ in found] == [own for own, _ in expected]
    assert {each for _, own in found for each in own} == ranks
    assert {each for _, own in expected for each in own} == {1}


def test_owners_of_weights_know_no_copies(pools):
    for _, ranks in pools(2)(matrices_made, case_of("main_shards", **ON_OWNERS)):
        assert {*ranks} == {1}


AS_WHOLES = (
    "bf16",
    *(("a norm of their own",) if HAS_KEYS else ()),
    "bf16 gradients",
    "fp32",
    "query groups",
    "QKV as one",
    "other numbers",
    "decoupled lr",
    "experts",
    "virtual pipeline",
    "tensor parallel",
)


@pytest.mark.parametrize("name", names_but(AS_WHOLES, ("bf16 gradients", "experts")))
def test_shards_train_as_whole_matrices(pools, name):
    """Losses, weights and states; without clipping, as above, and all groups at one lr."""
    own = {**SETTINGS[name], "clip_grad": 0.0, "lr_apart": 0.0, "options": {}}
    case = case_of("main_shards", **own)
    found = pools(2)(train, replace(case, overlap=True, **cut(**case.config)), 3)
    for one, other in zip(found, pools(2)(train, case, 3), strict=True):
        assert [step[:2] for step in one["steps"]] == [step[:2] for step in other["steps"]]
        assert one["weights"] == other["weights"]
        assert one["states"] == other["states"]


def test_shards_are_clipped_by_megatrons_norm(pools):
    """As gradients that were multiplied before."""
    case = case_of("main_shards", clip_grad=0.1, options={}, **cut())
    clipped, factors = pools(2)(step_clipped, case)[0]
    assert all(factor < 1 for factor in factors)
    (multiplied, _), _ = pools(2)(step_clipped, replace(case, clip_grad=0.0), factors)
    assert multiplied == clipped


def test_owners_have_whole_weights_of_their_own(pools):
    """Else the test above could compare copies."""
    found = pools(3)(names_owned, case_of("main_shards", config=layer_wise()))
    names = [name for own in found for name in own]
    assert all(found)
    assert len(names) == len(set(names))


WHOLES = {"bf16": {}, "fp32": {"dtype": torch.float32}, "query groups": SETTINGS["query groups"]}


@pytest.mark.parametrize("name", names_but(WHOLES, ("query groups",)))
def test_tensor_parallel_ranks_step_whole_matrices(pools, name):
    """With the bits of one that has all of them."""
    case = case_of("main_shards", clip_grad=0.0, options={}, **DUPLICATED, **WHOLES[name])
    (whole,) = pools(1)(step_parts, case)
    for found in pools(2)(step_parts, replace(case, tensor_parallel=2)):
        assert found == whole
    for found in pools(2)(step_parts, replace(case, tensor_parallel=2, config=muon_config())):
        assert found != whole  # blockwise


@pytest.mark.slow
def test_owners_step_what_tensor_parallel_ranks_share(pools):
    """On four ranks: two of each kind."""
    case = case_of("main_shards", clip_grad=0.0, options={}, **DUPLICATED)
    (whole,) = pools(1)(step_parts, case)
    owned = replace(case, tensor_parallel=2, config=layer_wise(muon_tp_mode="duplicated"))
    for own in (replace(case, tensor_parallel=2), owned):
        for found in pools(4)(step_parts, own):
            assert found == whole


# --- checkpoints

FORM = "dp_reshardable"


SAVED = {"on all": {}, "on owners": ON_OWNERS, "in shards": cut()}
SHARED = {
    "tensor_parallel": 2,
    "options": {},
    "fp32_grads": False,
    "clip_grad": 0.1,
    "counts_zeros": True,
    **DUPLICATED,
}
if HAS_KEYS:
    SAVED["in buffers of owners"] = {**LAID_OUT, **ON_OWNERS}


@pytest.mark.parametrize("name", names_but(SAVED, ("in shards",)))
def test_resuming_equals_going_straight_on(pools, once, tmp_path, name):
    case = case_of("main_shards", **SAVED[name])
    straight = once(2, train, case, 4)
    saved = pools(2)(train_and_save, case, tmp_path / "a", FORM)
    back = pools(2)(load_and_train, case, tmp_path / "a", FORM)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]
    assert [each["states"] for each in back] == [each["states"] for each in straight]
    for world in (1, 3):
        for other in pools(world)(load_and_train, case, tmp_path / "a", FORM):
            assert other["loaded"] == saved[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dp_zero_gather_scatter", "fully_reshardable"])
def test_shards_are_saved_in_all_of_megatrons_formats(pools, tmp_path, form):
    case = case_of("main_shards", **cut())
    saved = pools(2)(train_and_save, case, tmp_path / "a", form)
    for world in (1, 2, 3):
        for other in pools(world)(load_and_train, case, tmp_path / "a", form):
            assert other["loaded"] == saved[0]


def test_what_tensor_parallel_ranks_share_is_saved(pools, tmp_path):
    case = case_of("main_shards", **SHARED)
    straight = pools(2)(train, case, 3)
    saved = pools(2)(train_and_save, case, tmp_path / "a", FORM)
    back = pools(2)(load_and_train, case, tmp_path / "a", FORM, 2, 1)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]
    assert [each["states"] for each in back] == [each["states"] for each in straight]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DUPLICATED, {"config": layer_wise(muon_tp_mode="duplicated")}])
def test_tensor_parallel_parts_are_loaded_on_other_numbers_of_ranks(pools, tmp_path, layout):
    two = case_of("main_shards", tensor_parallel=2, options={}, **layout)
    one = replace(two, tensor_parallel=1)
    saved = pools(2)(save_parts, two, tmp_path / "a", FORM)[0]
    for world, case in ((1, one), (2, one), (2, two), (4, two)):
        assert pools(world)(load_parts, case, tmp_path / "a", FORM) == [saved] * world
    saved = pools(2)(save_parts, one, tmp_path / "b", FORM)[0]
    assert pools(2)(load_parts, two, tmp_path / "b", FORM) == [saved] * 2


@pytest.mark.slow
def test_shards_of_tensor_parallel_parts_are_loaded_on_one_rank(pools, tmp_path):
    """In the one format of the distributed optimizer's that knows matrices."""
    two = case_of("main_shards", tensor_parallel=2, options={}, **cut())
    form = "fully_reshardable"
    saved = pools(2)(save_parts, two, tmp_path / "a", form)[0]
    (found,) = pools(1)(load_parts, replace(two, tensor_parallel=1), tmp_path / "a", form)
    assert found == saved


def test_what_megatrons_own_saved_is_loaded(pools, once, tmp_path):
    straight = once(2, train, case_of(), 4)
    saved = pools(2)(train_and_save, case_of(), tmp_path / "a", FORM)
    back = pools(2)(load_and_train, case_of("main_shards"), tmp_path / "a", FORM)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]
    assert [each["states"] for each in back] == [each["states"] for each in straight]


def test_weights_may_be_loaded_before_their_optimizer(pools):
    """Megatron-LM does so: masters that come afterwards are not those of the weights before."""
    case = case_of("main_shards", options={})
    for straight, back in pools(2)(load_weights_first, case):
        assert back == straight


# --- what is refused

REFUSED = {
    "coefficients": ({"muon_coefficient_type": "aol"}, "config.muon_coefficient_type must be one"),
    "scale": ({"muon_scale_mode": "rms"}, "config.muon_scale_mode must be one of spectral, unit_"),
    "extra": ({"muon_extra_scale_factor": 0.5}, "config.muon_extra_scale_factor must be 1.0, or"),
    "steps": ({"muon_num_ns_steps": 0}, "config.muon_num_ns_steps must be a whole number from 1"),
    "precision": ({"muon_fp32_matmul_prec": "high"}, "config.muon_fp32_matmul_prec must be medium"),
    "mode": ({"muon_tp_mode": "distributed"}, "config.muon_tp_mode must be one of blockwise, dupl"),
    "momentum": ({"muon_momentum": 1.0}, "config.muon_momentum must be a number >= 0 and < 1"),
    "nesterov": ({NESTEROV: 1}, f"config.{NESTEROV} must be one of True, False, got 1"),
    "split": ({"muon_split_qkv": None}, "config.muon_split_qkv must be one of True, False"),
    "loss scale": ({"loss_scale": 8.0}, "config.loss_scale must be None with config.optimizer="),
    "offload": ({"optimizer_cpu_offload": True}, "config.optimizer_cpu_offload must be False with"),
}
SAME = "use_distributed_optimizer must be the same in config and DistributedDataParallel, and False"
OF_CASES = {
    "shards of the config alone": ({"config": cut()["config"]}, SAME),
    "shards of DDP alone": ({"shards": True}, SAME),
    "shards on owners": (
        {"shards": True, "config": {**layer_wise(), "use_distributed_optimizer": True}}, SAME
    ),
    "Adam in shards": (
        {"adam_w_mode": False, **cut()}, "config.decoupled_weight_decay must be True with config.o"
    ),
    "instances": (
        {"instances": 2, "shards": True}, "num_distributed_optimizer_instances must be 1 with Muon"
    ),
    "fp16": ({"dtype": torch.float16}, "config.fp16 must be False with config.optimizer='muon'"),
    "fp32 on owners": (
        {"dtype": torch.float32, **ON_OWNERS}, "config.bf16 must be True with config.optimizer="
    ),
    "contract": ({"options": {"contract": "te"}}, "contract must be one of ieee, eo, got 'te'"),
    "aware": ({"plug": "precision_aware"}, "mode must be main_shards, got 'precision_"),
    "moments": (
        {"options": {"exp_avg_dtype": torch.bfloat16}}, "exp_avg_dtype must be one of None, torch."
    ),
    "eo without Muon": (
        {"shards": True, "options": {"contract": "eo"}, "config": {}}, "contract must be 'ieee', 't"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"config": muon_config(**more)}, told) for more, told in REFUSED.values()),
        *OF_CASES.values(),
    ],
    ids=[*REFUSED, *OF_CASES],
)
def test_what_is_refused(pools, settings, message):
    plug = settings.get("plug", "main_shards")
    case = case_of(**{**settings, "plug": plug})
    for error, left in pools(case.instances)(error_of, case):
        assert error.startswith(f"ValueError: {message}")
        assert left == []


def test_parts_of_tensor_parallel_ranks_are_told_of(pools):
    case = case_of("main_shards", tensor_parallel=2)
    for told in pools(2)(warnings_of, case):
        assert any("'blockwise' makes each tensor-parallel rank's part" in each for each in told)
    assert pools(1)(warnings_of, case_of("main_shards")) == [[]]


def test_shards_of_tensor_parallel_parts_are_made_orthogonal_by_themselves(pools):
    case = case_of("main_shards", tensor_parallel=2, **cut(muon_tp_mode="duplicated"))
    for error, left in pools(2)(error_of, case):
        assert error.startswith(
            "ValueError: config.muon_tp_mode must be 'blockwise' beside use_dis"
        )
        assert left == []


def test_a_parameter_that_megatron_would_give_to_muon_all_the_same(pools):
    ((error, _),) = pools(1)(error_of, case_of("main_shards"), "mark")
    told = "must not be marked use_muon=False, which Megatron's releases up to 0.19 do not know"
    assert told in error


@pytest.mark.parametrize("own", [{}, ON_OWNERS], ids=["on all", "on owners"])
def test_a_save_without_what_megatrons_writer_needs_is_refused_at_once(pools, tmp_path, own):
    case = case_of("main_shards", **own)
    for error, _ in pools(2)(save_without_psutil, case, tmp_path / "a", MuonTrainer):
        assert error.startswith("ImportError: Megatron's writer of checkpoints needs psutil")


def test_the_context_manager_makes_the_same(pools, once):
    found = pools(2)(train, case_of("main_shards", as_context=True), 3)
    assert found == once(2, train, case_of(), 3)


@pytest.mark.slow
def test_the_context_manager_makes_the_same_of_shards(pools):
    case = case_of("main_shards", **cut())
    assert pools(2)(train, replace(case, as_context=True), 3) == pools(2)(train, case, 3)


def test_the_code_of_the_page_runs(pools):
    (found,) = pools(1)(run_the_page, case_of("main_shards"))
    assert found["kinds"] == ["ShardMuon", "ShardAdam"]
    assert found["steps"][0][1] is True
    assert found["steps"][0][0] != found["steps"][1][0]


def test_a_gate_beside_its_weight_may_be_split(pools):
    """A parameter says its own sizes."""
    shapes = pools(1)(shapes_of, case_of("main_shards"), (40, 24))[0]
    assert [(40, 32), (24, 32)] in shapes
    assert [(32, 32)] * 3 in shapes


GATED = {"heads": 4, "groups": 2, "gated": True}
WAYS = {"on all": {}, "on owners": ON_OWNERS, "in shards": cut()}


@pytest.mark.parametrize("way", WAYS)
def test_attentions_gate_is_a_matrix_of_its_own(pools, way):
    """Beside q, which has as many rows; k and v have half of them."""
    case = case_of("main_shards", **GATED, **WAYS[way], options={})
    apart = [(32, 32), (32, 32), (16, 32), (16, 32)]
    shapes = [shape for own in pools(2)(shapes_of, case, None) for shape in own]
    assert apart in shapes
    assert [(96, 32)] not in shapes


def test_gated_attention_has_the_same_bits_in_all_ways(pools):
    cases = [
        case_of("main_shards", clip_grad=0.0, **GATED, **own, options={}) for own in WAYS.values()
    ]
    whole, *others = (pools(2)(step_given_gradients, case) for case in cases)
    assert others == [whole] * 2
    as_one = replace(cases[0], config=muon_config(muon_split_qkv=False))
    assert pools(2)(step_given_gradients, as_one) != whole


UNKNOWN = {
    "take_another_attention": "its parts are not known, as its Other is not Megatron's SelfAtt",
    "take_other_rows": "of [16, 16, 16] rows (num_attention_heads=2",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", UNKNOWN)
def test_qkv_weights_of_unknown_parts_are_refused(pools, change, way):
    ((error, left),) = pools(1)(error_of, case_of("main_shards", **WAYS[way]), change)
    assert error.startswith("ValueError: config.muon_split_qkv must be False with parameter 'modul")
    assert UNKNOWN[change] in error
    assert left == []


def test_experts_that_are_fused_into_one_weight_are_refused(pools):
    ((error, left),) = pools(1)(error_of, case_of("main_shards"), "fuse_experts")
    assert "weight1' must be one matrix with Muon, got 2 experts' in one" in error
    assert left == []
