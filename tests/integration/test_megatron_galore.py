"""GaLoreAdamW inside Megatron-Core: flat shards, on 1 to 3 ranks, have the bits of one process."""

import importlib.util
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import contextlib
from unittest import mock

import megatron_gpt
import torch.distributed as dist
from fsdp2_ranks import raised_by
from megatron_gpt import Case, Trainer, random_gradients
from megatron_muon import run_the_page
from runs import assert_same
from slow_cases import names_but
from unfused_torch import BETAS, EPS

from megaopt import GaLoreAdamW
from megaopt.kernels.galore import rule
from megaopt.kernels.matrix import bucket
from megaopt.lab.regression.megatron.optimizer import leaves
from megaopt.params.view import EMBEDDING

# GaLoreAdamW in Megatron's distributed optimizer, and alone on whole weights: what runs leave.

KEPT = ("projection", "captured_energy")
MOMENTS = ("exp_avg", "exp_avg_sq")


def galore_case(own=None, options=None, **settings):
    """Of a GPT whose matrices are of 32 rows and columns, or more."""
    given = {"rank": 4, "update_proj_gap": 4, **(own or {})}
    settings = {"overlap": False, "clip_grad": 0.0, **settings}
    return Case("main_shards", options={"galore": given, **(options or {})}, **settings)


def grads_of(step, params):
    return [grad.bfloat16() for grad in random_gradients(step, params)]


def train(trainer, steps, first=0):
    for step in range(first, first + steps):
        trainer.step_given(grads_of(step, trainer.chunk.module.parameters()))


def stepped(case, steps=10):
    trainer = Trainer(case)
    train(trainer, steps)
    return snapshot(trainer)


def parts_of_matrices(case):
    """Of each matrix of which this rank has elements, how large a part they are."""
    (leaf,) = leaves(Trainer(case).optimizer)
    pairs = leaf.shards.items()
    return [shard.numel() / model.numel() for model, shard in pairs if model.dim() == 2]


def clipped(case, steps=5):
    """The same, and by what gradients were to be multiplied."""
    trainer, factors = Trainer(case), []
    for step in range(steps):
        grads = grads_of(step, trainer.chunk.module.parameters())
        _, norm, _ = trainer.step_given(grads)
        factors.append(torch.tensor([case.clip_grad / (norm + 1e-6)]))
    return snapshot(trainer), factors


def saved(case, steps, folder, form):
    """What is saved of a run."""
    trainer = Trainer(case)
    train(trainer, steps)
    trainer.save(folder, form)
    return snapshot(trainer)


def gone_on(case, first, steps, folder, form):
    """What is loaded into a run that had gone another way, and what steps then make of it."""
    trainer = Trainer(case)
    train(trainer, 1, 20)
    trainer.load(folder, form, first)
    loaded = snapshot(trainer)
    train(trainer, steps, first)
    return loaded, snapshot(trainer)


def snapshot(trainer):
    """For each weight, whole: itself, its master and its moments; what this rank keeps."""
    trainer.gather()
    own, kept = {}, {}
    models = dict(trainer.chunk.module.named_parameters())
    for leaf in leaves(trainer.optimizer):
        shards = [shard for group in leaf.fused.param_groups for shard in group["params"]]
        names = {id(leaf.shards.get(model)): name for name, model in models.items()}
        for shard in shards:
            state = leaf.fused.state[shard]
            name = names.get(id(shard)) or name_of_empty(shard, models)
            kept[name] = {key: state[key].clone() for key in KEPT if key in state}
            master = state["master_param"]
            parts = {"master": shard if master is None else master}
            parts |= {key: state[key] for key in MOMENTS}
            own[name] = {key: part.detach().clone().view(-1) for key, part in parts.items()}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {
        name: {
            "weight": model.detach().clone(),
            **{key: torch.cat([rank[name][key] for rank in ranks]) for key in own[name]},
            **kept[name],
        }
        for name, model in models.items()
    }


def name_of_empty(shard, models):
    """The weight of which this rank has nothing: it is in the same place of memory."""
    memory = shard.untyped_storage().data_ptr()
    (name,) = [
        name for name, model in models.items()
        if model.untyped_storage().data_ptr() == memory
        and model.storage_offset() == shard.storage_offset()
    ]  # fmt: skip
    return name


def alone(case, steps=10, factors=None):
    """The same of GaLoreAdamW without Megatron, of the same weights; factors: clip coefficients."""
    trainer = Trainer(case)
    module, options = trainer.chunk.module, dict(case.options)
    (leaf,) = leaves(trainer.optimizer)
    order = [param for buffer in trainer.chunk.buffers for param in buffer.params]
    models, groups = dict(module.named_parameters()), []
    params = {name: torch.nn.Parameter(model.detach().clone()) for name, model in models.items()}
    for name, model in models.items():
        is_matrix = model.dim() == 2 and not getattr(model, EMBEDDING, False)
        decay = leaf.param_groups[leaf.model_param_group_index_map[model][0]]["weight_decay"]
        numbers = [next(i for i, each in enumerate(order) if each is model)]
        groups.append({"params": [params[name]], "weight_decay": decay, "param_numbers": numbers})
        if not is_matrix:
            groups[-1]["rank"] = None
    optimizer = GaLoreAdamW(
        groups, lr=case.lr, betas=BETAS, eps=EPS, dtype=torch.float32, use_decoupled_grad=True,
        **options.pop("galore"), **options,
    )  # fmt: skip
    for step in range(steps):
        for param, grad in zip(params.values(), grads_of(step, params.values()), strict=True):
            param.decoupled_grad = grad.float() if case.fp32_grads else grad
        optimizer.step(clip_coefficient=None if factors is None else factors[step])
    found = {}
    for name, param in params.items():
        state = optimizer.state[param]
        master = state["master_param"]
        flat = {"master": param if master is None else master}
        flat |= {key: state[key] for key in MOMENTS}
        found[name] = {
            "weight": param.detach(),
            **{key: value.detach().view(-1) for key, value in flat.items()},
            **{key: state[key] for key in KEPT if key in state},
        }
    return found


PLACES = {
    "exchange": (bucket, "unpacked"),
    "refresh": (rule, "refreshed"),
    "update": (rule, "projected_back"),
}
CHANGED = {
    "gap": {"update_proj_gap": 1},
    "rank": {"rank": None},
    "a rank that saves nothing": {"rank": 1000},
    "lr": {"lr": 0.5},
    "a number for parameters": {"params": 5},
}
EDITED = {
    "no tensor": lambda params: params.__setitem__(0, "weight"),
    "a parameter less": lambda params: params.__delitem__(0),
}
"""What becomes of the parameters of the first group that is stepped, Megatron's or ours."""


@contextlib.contextmanager
def changed_groups(groups, values):
    kept = [dict(group) for group in groups]
    for group in groups:
        group.update(values)
    try:
        yield
    finally:
        for group, own in zip(groups, kept, strict=True):
            group.update(own)


@contextlib.contextmanager
def edited(params, edit):
    kept = list(params)
    edit(params)
    try:
        yield
    finally:
        params[:] = kept


def said_of(kind, case, steps=3):
    """The error of a step in which the last rank does something else, and what was before and is.

    kind: it lacks a "gradient", or fails in the "exchange", in a "refresh" or at an "update"; or
    its groups are CHANGED or EDITED.
    steps: taken before.
    """
    trainer = Trainer(case)
    train(trainer, steps)
    (leaf,) = leaves(trainer.optimizer)
    leaf.fused.initialize_states()
    before = snapshot(trainer)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    trainer.chunk.zero_grad_buffer()
    params = list(trainer.chunk.module.parameters())
    for param, grad in zip(params, grads_of(steps, params), strict=True):
        param.main_grad.copy_(grad)
    trainer.optimizer.prepare_grads()
    shard = next(iter(leaf.shards.values()))
    failing = contextlib.nullcontext()
    if is_last and kind == "gradient":
        failing = mock.patch.object(shard, "decoupled_grad", None)
    elif is_last and kind in CHANGED:
        failing = changed_groups(trainer.optimizer.param_groups, CHANGED[kind])
    elif is_last and kind in EDITED:
        failing = edited(leaf.fused.param_groups[0]["params"], EDITED[kind])
    elif is_last:
        failing = mock.patch.object(*PLACES[kind], side_effect=RuntimeError("no memory"))
    with failing:
        error = raised_by(trainer.optimizer.step_with_ready_grads)
    after = snapshot(trainer)
    train(trainer, 1, steps)
    return error, before, after, snapshot(trainer)


def error_of(case, folder=None, form=None):
    """The error of making the optimizer, or of loading into it."""

    def made():
        trainer = Trainer(case)
        if folder is not None:
            trainer.load(folder, form, 0)

    return raised_by(made) or "no error"


DRAWN = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
CASES = {
    "left": galore_case({"proj_type": "left", "rank": 15}, fp32_grads=False),
    "right": galore_case({"proj_type": "right"}),
    "std, by svd": galore_case({"refresh": "svd", "stagger": False}),
    "fp32 weights": galore_case(
        {"proj_type": "reverse_std", "precision": "bf16"}, dtype=torch.float32
    ),
    "drawn moments": galore_case({"proj_type": "left"}, DRAWN),
    "scaled, of one bucket": galore_case({"rank": 7, "scale": 0.25}, buckets=None),
}
QUICK = ("left-2", "drawn moments-3")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, id=f"{name}-{world}",
                     marks=[] if f"{name}-{world}" in QUICK else [pytest.mark.slow])
        for name in CASES for world in (1, 2, 3)
    ],
)  # fmt: skip
def test_shards_have_the_bits_of_one_process(pools, once, name, world):
    """Weights, masters, moments, projections and their energies, over refreshes."""
    (expected,) = once(1, alone, CASES[name])
    for found in pools(world)(stepped, CASES[name]):
        assert_same(found, expected)


@pytest.mark.parametrize("case", [CASES["left"], CASES["fp32 weights"]])
def test_three_ranks_have_parts_of_matrices(pools, case):
    """Else the test above would step whole ones."""
    assert all(min(parts) < 1 for parts in pools(3)(parts_of_matrices, case))


@pytest.mark.slow
@pytest.mark.parametrize("grads", [True, False], ids=["fp32 gradients", "bf16 gradients"])
def test_shards_are_clipped_by_megatrons_norm(pools, grads):
    """As one process that is told the coefficients."""
    case = galore_case(clip_grad=0.5, fp32_grads=grads)
    ranks = pools(3)(clipped, case)
    factors = ranks[0][1]
    assert all(factor < 1 for factor in factors)
    (expected,) = pools(1)(alone, case, len(factors), factors)
    for found, told in ranks:
        assert told == factors
        assert_same(found, expected)


# --- checkpoints

FORMS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_reshardable")


@pytest.mark.parametrize(
    ("worlds", "form"),
    [
        ((2, 3), "dp_reshardable"),
        *(
            pytest.param((some, others), form, marks=pytest.mark.slow)
            for form in FORMS for some, others in ((1, 2), (2, 3), (3, 1))
            if (some, others, form) != (2, 3, "dp_reshardable")
        ),
    ],
    ids=str,
)  # fmt: skip
def test_it_resumes_on_another_number_of_ranks(pools, once, tmp_path, worlds, form):
    """Between refreshes, into a run of other projections: what is loaded, and what then follows."""
    case, folder = CASES["left"], tmp_path / "saved"
    (straight,) = once(1, alone, case)
    kept = pools(worlds[0])(saved, case, 6, folder, form)
    for loaded, after in pools(worlds[1])(gone_on, case, 6, 4, folder, form):
        assert_same(loaded, kept[0])
        assert_same(after, straight)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "left"])
def test_all_kinds_resume(pools, once, tmp_path, name):
    case, folder = CASES[name], tmp_path / "saved"
    (straight,) = once(1, alone, case)
    pools(3)(saved, case, 6, folder, FORMS[0])
    for _, after in pools(2)(gone_on, case, 6, 4, folder, FORMS[0]):
        assert_same(after, straight)


LAYOUTS = {
    "experts": {"experts": 2, "fp32_grads": False},
    "pipeline": {"pipeline": 2},
    "overlap": {"overlap": True, "as_context": True},
    "a loss scale": {"dtype": torch.float16, "fp32_grads": False},
    "frozen": {"frozen": "linear_fc1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_equals_going_straight_on(pools, tmp_path, name):
    """Losses, norms, weights and states of training, whatever Megatron's layout."""
    case = galore_case({"update_proj_gap": 2}, clip_grad=1.0, **LAYOUTS[name])
    straight, form = pools(2)(megatron_gpt.train, case, 5), FORMS[0]
    saved = pools(2)(megatron_gpt.train_and_save, case, tmp_path / "a", form, 3)
    back = pools(2)(megatron_gpt.load_and_train, case, tmp_path / "a", form, 3)
    assert [each["loaded"] for each in back] == saved
    for name in ("steps", "weights", "states"):
        found = [each[name] for each in straight]
        assert [each[name] for each in back] == [
            own[3:] if name == "steps" else own for own in found
        ]
    assert any(updated for _, updated, *_ in straight[0]["steps"])


# --- ranks that fail

DIFFER = "ranks that hold parts of the same parameters must step the same"
FAILED = "another rank that steps the same parameters failed in this step"
WRONG = {
    "gradient": (DIFFER, DIFFER),
    "gap": (DIFFER, DIFFER),
    "rank": (DIFFER, "ValueError: parameter "),
    "exchange": (FAILED, "RuntimeError: no memory"),
    "refresh": (FAILED, "RuntimeError: no memory"),
    "update": (FAILED, "RuntimeError: no memory"),
}


@pytest.mark.parametrize("kind", names_but(WRONG, ("gap", "rank", "refresh")))
def test_ranks_that_differ_or_fail_change_nothing_on_any(pools, once, kind):
    """And all go on with the next step as if there had been none."""
    assert_all_refuse(pools, once, kind, *WRONG[kind], steps=3)


NO_LIST = (
    "group 0: params must be the list of parameters that Megatron's distributed optimizer made, "
    "got 5"
)
APART = {
    "gap": DIFFER,
    "rank": DIFFER,
    "a rank that saves nothing": DIFFER,
    "lr": DIFFER,
    "a number for parameters": NO_LIST,
    "no tensor": "parameter 0 of group 0 must be a tensor, got 'weight'",
    "a parameter less": DIFFER,
}
LATER = {
    "a number for parameters": APART["a number for parameters"],
    "no tensor": APART["no tensor"],
    "a parameter less": "master_weights must have one entry for each of the 27 parameters",
}


@pytest.mark.parametrize("kind", APART)
def test_groups_that_differ_before_the_first_step_change_nothing(pools, once, kind):
    assert_all_refuse(pools, once, kind, DIFFER, APART[kind], steps=0)


@pytest.mark.parametrize("kind", LATER)
def test_groups_that_differ_later_change_nothing(pools, once, kind):
    assert_all_refuse(pools, once, kind, DIFFER, LATER[kind], steps=2)


def assert_all_refuse(pools, once, kind, elsewhere, there, steps):
    case = CASES["std, by svd"]
    case = replace(case, options={"galore": {**case.options["galore"], "update_proj_gap": 3}})
    (straight,) = once(1, alone, case, steps + 1)
    for rank, (error, before, after, then) in enumerate(pools(3)(said_of, kind, case, steps)):
        assert (there if rank == 2 else elsewhere) in error
        assert_same(after, before)
        assert_same(then, straight)


def test_the_code_of_the_page_runs(pools):
    (found,) = pools(1)(run_the_page, galore_case(), "GaLore")
    assert found["kinds"] == ["ShardGaLore"]
    assert found["steps"][0][0] != found["steps"][1][0]


# --- what is refused

REFUSED = {
    "rank left out": ({"galore": {}}, "galore must be None or a dict with 'rank', and of rank, up"),
    "others' names": ({"galore": {"rank": 4, "lr": 1.0}}, "galore must be None or a dict with 'ra"),
    "rank": ({"galore": {"rank": 0}}, "group 0: rank must be None or a whole number >= 1, got 0"),
    "moments": (
        {"exp_avg_dtype": torch.float16},
        "exp_avg_dtype must be a format without scales w",
    ),
    "contract": ({"contract": "te"}, "contract must be 'ieee' with galore, got 'te'"),
    "mode": ({"mode": "precision_aware"}, "mode must be 'main_shards' with galore, got 'precision"),
    "captured": ({"capturable": True}, "capturable must be None or False with galore, got True"),
}
OF_CONFIG = {
    "offload": (
        {"config": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
        "config.optimizer_cpu_offload must be False with galore, got True",
    ),
    "Adam": ({"adam_w_mode": False}, "config.decoupled_weight_decay must be True with galore, got"),
    "tensor parallel": (
        {"tensor_parallel": 2}, "config.tensor_model_parallel_size must be 1 with galore, got 2: e"
    ),
    "instances": ({"instances": 2}, "num_distributed_optimizer_instances must be 1 with galore"),
    "Muon": (
        {"config": {"optimizer": "muon"}}, "galore must be None with config.optimizer='muon', got"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        *((options, {}, told) for options, told in REFUSED.values()),
        *(({}, settings, told) for settings, told in OF_CONFIG.values()),
    ],
    ids=[*REFUSED, *OF_CONFIG],
)
def test_what_is_refused(pools, options, settings, message):
    case = galore_case(**settings)
    case = replace(case, options={**case.options, **options})
    world = max(case.tensor_parallel, case.instances)
    for error in pools(world)(error_of, case):
        assert error.startswith(f"ValueError: {message}")


@pytest.mark.parametrize("other", [{"galore": {"rank": 5, "update_proj_gap": 4}}, {}])
def test_moments_of_other_projections_are_refused(pools, tmp_path, other):
    """Adam's too; and its optimizer refuses GaLore's."""
    case, folder = CASES["right"], tmp_path / "saved"
    told = "ValueError: rank and proj_type of a checkpoint's groups must be those of galore"
    pools(2)(saved, case, 1, folder, FORMS[0])
    for error in pools(2)(error_of, replace(case, options=other), folder, FORMS[0]):
        assert error.startswith(told)
