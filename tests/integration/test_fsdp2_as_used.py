"""FSDP2 as it is used: by the gradients that it makes, steps have the bits of one process."""

import fsdp2_uses
import pytest
import torch.distributed.checkpoint as dcp
from fsdp2_ranks import assert_same_on_all, whole
from fsdp2_uses import OPTIMIZERS, USES, Alone, content_of, load, snapshots, started, stepped
from runs import BF16, FP32, assert_same

from megaopt import (
    cast_model,
    get_fp32_model_state_dict,
)

# --- what ranks do


def cast_beside_one(use, kind, device="cpu", **keep):
    """Steps of a model that cast_model casts to bf16 before its first forward; its weights' dtypes.

    The process beside it loads the masters, which have the values before the cast.
    """
    run = started(use, kind, device)
    before = {name: whole(param) for name, param in run.model.named_parameters()}
    cast_model(run.model, BF16, optimizer=run.optimizers[0], **keep)
    masters = get_fp32_model_state_dict(run.model, run.optimizers[0])
    assert_same(whole(dict(masters)), before, "masters")
    alone = Alone(kind, run)
    alone.optimizers[0].load_state_dict(whole(run.optimizers[0].state_dict()))
    stepped(run, alone, range(4))
    return {name: param.dtype for name, param in run.model.named_parameters()}


def saved_by(use, kind, folder):
    """What the optimizer has after two steps, when it is saved."""
    run = started(use, kind)
    stepped(run, Alone(kind, run), range(2))
    dcp.save(content_of(run, None), checkpoint_id=folder)
    return snapshots(run.optimizers)


def loaded_by(use, kind, folder):
    """What another run has of it; then it steps beside one process that loads its state dict."""
    run = started(use, kind, seed=1)
    load(run, folder, None)
    loaded, alone = snapshots(run.optimizers), Alone(kind, run)
    for plain, sharded in zip(alone.optimizers, run.optimizers, strict=True):
        plain.load_state_dict(whole(sharded.state_dict()))
    stepped(run, alone, range(2, 4))
    return loaded


EXHAUSTIVE = pytest.mark.exhaustive


def cases(quick):
    """All optimizers under each use; but for those that are named beside it they are exhaustive."""
    return [
        pytest.param(use, kind, marks=[] if kind in kinds else [EXHAUSTIVE])
        for use, kinds in quick.items()
        for kind in OPTIMIZERS
    ]


def assert_has_the_bits_of_one_process(on_ranks, use, kind):
    for untouched in on_ranks(USES[use].ranks, fsdp2_uses.stepped_beside_one, use, kind):
        assert not untouched


LAYERS = {
    "layers": ("adam", "muon"),
    "root alone": ("adam",),
    "norms apart": (),
    "not resharded": ("lion",),
    "resharded over 2": ("muon",),
    "columns": ("galore",),
    "tied": ("muon",),
    "left out": ("adam", "galore"),
}


@pytest.mark.parametrize(("use", "kind"), cases(LAYERS))
def test_layers_and_the_root(on_ranks, use, kind):
    """However they are split and gathered; some get no gradients in some steps."""
    assert_has_the_bits_of_one_process(on_ranks, use, kind)


PRECISION = {
    "mixed": ("adam",),
    "mixed, bf16": ("muon",),
    "micro-batches": ("lion",),
    "micro-batches, bf16": ("adam",),
}


@pytest.mark.parametrize(("use", "kind"), cases(PRECISION))
def test_mixed_precision_and_micro_batches(on_ranks, use, kind):
    assert_has_the_bits_of_one_process(on_ranks, use, kind)


MESHES = {
    "copies": ("muon", "galore"),
    "copies, micro-batches": ("adam",),
    "tensor parallel": ("muon", "galore"),
    "tensor parallel, bf16": ("adam",),
    "sequence parallel": ("muon", "lion"),
}


@pytest.mark.parametrize(("use", "kind"), cases(MESHES))
def test_meshes_of_two_dimensions(on_ranks, use, kind):
    assert_has_the_bits_of_one_process(on_ranks, use, kind)


EXPERTS = {
    "experts": ("muon", "adam"),
    "experts, bf16": ("galore",),
    "sharded experts": ("muon",),
    "uneven experts": ("adam",),
}


@pytest.mark.parametrize(("use", "kind"), cases(EXPERTS))
def test_experts_on_a_mesh_of_their_own(on_ranks, use, kind):
    assert_has_the_bits_of_one_process(on_ranks, use, kind)


@pytest.mark.parametrize(
    ("use", "kind"), cases({"compiled layers": ("adam",), "compiled": ("muon",)})
)
def test_compiled_models(on_ranks, use, kind):
    assert_has_the_bits_of_one_process(on_ranks, use, kind)


@pytest.mark.parametrize(
    ("use", "kind", "keep"),
    [
        ("layers", "muon", {"keep": ()}),
        ("sequence parallel", "lion", {"keep": ()}),
        ("norms apart", "galore", {}),
    ],
    ids=["layers", "sequence parallel", "norms apart"],
)
def test_models_that_are_cast(on_ranks, use, kind, keep):
    for dtypes in on_ranks(USES[use].ranks, cast_beside_one, use, kind, **keep):
        for name, dtype in dtypes.items():
            assert dtype == (FP32 if "norm" in name and not keep else BF16)


SAVED = {
    "layers": ("adam", True),
    "copies": ("galore", True),
    "sequence parallel": ("muon", False),
    "experts, bf16": ("lion", False),
    "uneven experts": ("muon", True),
    "compiled layers": ("galore", False),
}
"""The optimizer, and whether the run goes on while it is saved."""


@pytest.mark.parametrize(
    ("use", "kind", "is_async"),
    [
        pytest.param(use, kind, is_async, marks=[] if quick == (kind, is_async) else [EXHAUSTIVE])
        for use, quick in SAVED.items()
        for kind in OPTIMIZERS
        for is_async in (False, True)
    ],
)
def test_a_run_goes_on_from_a_checkpoint(on_ranks, tmp_path, use, kind, is_async):
    run_again = fsdp2_uses.resumed_beside_one
    folder = str(tmp_path / "saved")
    for straight, resumed in on_ranks(USES[use].ranks, run_again, use, kind, folder, is_async):
        assert_same(resumed, straight)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(("use", "kind"), cases({"layers": ("muon",), "copies": ()}))
def test_two_optimizers_share_a_checkpoint(on_ranks, tmp_path, use, kind, flat):
    several = {"several": True, "flat": flat}
    run_again = fsdp2_uses.resumed_beside_one
    folder = str(tmp_path / "saved")
    for straight, resumed in on_ranks(USES[use].ranks, run_again, use, kind, folder, **several):
        assert_same(resumed, straight)


MOVES = {
    "layers": ("copies", "muon"),
    "columns": ("tensor parallel", "galore"),
    "compiled layers": ("sequence parallel", "adam"),
    "tensor parallel, bf16": ("mixed, bf16", "muon"),
}


@pytest.mark.parametrize(("before", "after", "kind"), [(b, *rest) for b, rest in MOVES.items()])
def test_what_one_use_saved_another_loads(on_ranks, tmp_path, before, after, kind):
    folder = str(tmp_path / "saved")
    saved = on_ranks(USES[before].ranks, saved_by, before, kind, folder)
    loaded = on_ranks(USES[after].ranks, loaded_by, after, kind, folder)
    assert_same_on_all(loaded, saved[0])
