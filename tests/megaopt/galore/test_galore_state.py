"""GaLoreAdamW's states: saved, loaded, copied, set; and what it refuses."""

import copy
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from bits import assert_same_bits
from handling import copy_weights, refused, train_all
from interpreted import interpreted, marks_of
from runs import BF16, FP32, assert_same, copied, params_of, snapshot, through_a_file, train, values

import megaopt
from megaopt import FusedAdam, GaLoreAdamW
from megaopt.float8 import Float8Weight
from megaopt.kernels import backends

SHAPES = [(24, 10), (6, 30), (9,)]
RANKED = {"rank": 3, "update_proj_gap": 3, "scale": 0.25}
KINDS = {
    "fp32": {},
    "masters": {"dtype": FP32, "weight_decay": 0.1, "stagger": False},
    "svd": {"refresh": "svd", "proj_type": "left", "kernel": "torch"},
    "hybrid": {"kernel": "hybrid", "store_param_remainders": True, "dtype": FP32},
    "grouped": {"kernel": "grouped", "precision": "bf16", "dtype": FP32},
    "fused": {"kernel": "fused", "precision": "bf16", "exp_avg_sq_dtype": "bfloat16_stochastic"},
    "drawn": {
        "weight_rounding": "stochastic", "seed": 5, "exp_avg_dtype": "block_e4m3",
        "exp_avg_sq_dtype": "block_e5m3",
    },
}  # fmt: skip


def galore(shapes=SHAPES, weights=BF16, **options):
    params = [torch.nn.Parameter(values(shape, i, weights)) for i, shape in enumerate(shapes)]
    return GaLoreAdamW(params, **{**RANKED, **options})


def cases(values, quick):
    """Each kind with each of some values; those that are not in `quick` are slow."""
    return [
        pytest.param(
            options, value, id=f"{kind}-{name}",
            marks=[*marks_of(options), *([] if (kind, name) in quick else [pytest.mark.slow])],
        )
        for kind, options in KINDS.items() for name, value in values.items()
    ]  # fmt: skip


WHEN = {"before all": 0, "between": 2, "at a refresh": 3}
QUICK = [("fp32", "before all"), ("masters", "at a refresh"), ("hybrid", "at a refresh")]
QUICK += [(kind, "between") for kind in ("masters", "svd", "drawn")]


@pytest.mark.parametrize(("options", "saved_after"), cases(WHEN, QUICK))
def test_resumed_is_straight(options, saved_after):
    large = (1366, 5) if "exp_avg_dtype" in options else (30, 10)  # whose moments are in blocks
    shapes = [large, (24, 10), (9,)]
    straight, before = galore(shapes, **options), galore(shapes, **options)
    train(straight, 5)
    train(before, saved_after)
    after = galore(shapes, **{**options, "seed": 99})
    copy_weights(before, after)
    after.load_state_dict(through_a_file(before.state_dict()))
    train(after, 5 - saved_after, first=saved_after)
    assert_same(snapshot(after), snapshot(straight))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda own: pickle.loads(pickle.dumps(own))}


@pytest.mark.parametrize(
    ("options", "copied"), cases(COPIES, [("masters", "deepcopy"), ("hybrid", "pickle")])
)
def test_copies_go_on_with_the_same_bits(options, copied):
    optimizer = galore(**options)
    train(optimizer, 2)
    twin = copied(optimizer)
    train_all((optimizer, twin), 2, first=2)
    assert_same(snapshot(twin), snapshot(optimizer))


def test_a_group_takes_rank_and_side_from_the_state_dict():
    """As lr and all numbers of a group; states are those of the saved rank."""
    before, after = galore([(12, 12)], proj_type="left"), galore([(12, 12)], rank=None)
    train(before, 4)
    copy_weights(before, after)
    after.load_state_dict(before.state_dict())
    train_all((before, after), 3, first=4)
    assert_same(snapshot(after), snapshot(before))


def test_a_load_does_not_take_a_groups_rank_away():
    target, source = (galore([(16, 8)], rank=rank) for rank in (4, None))
    train(source, 1)
    with refused(target, "group 0: rank of the state dict must be .*, 4, by which .*, got None"):
        target.load_state_dict(source.state_dict())
    source.load_state_dict(target.state_dict())
    assert source.param_groups[0]["rank"] == 4


def test_a_projection_is_a_tensor_of_its_own():
    """No view that keeps the factors of an SVD alive, and in files."""
    optimizer = galore(refresh="svd")
    train(optimizer, 1)
    for param in params_of(optimizer)[:2]:
        projection = optimizer.state[param]["projection"]
        assert projection.untyped_storage().nbytes() == projection.numel() * 4


def test_states_can_be_made_read_and_set_ahead():
    optimizer, straight = galore(), galore()
    optimizer.initialize_states()
    matrix = params_of(optimizer)[0]
    assert optimizer.get_unscaled_state(matrix, "exp_avg").shape == (24, 3)
    train_all((optimizer, straight), 2)
    assert_same(snapshot(optimizer), snapshot(straight))
    moment = values((24, 3), 7)
    optimizer.set_scaled_state(matrix, "exp_avg", moment)
    assert_same_bits(optimizer.get_unscaled_state(matrix, "exp_avg"), moment)
    with pytest.raises(ValueError, match=r"exp_avg must be real numbers .* \(24, 3\), got"):
        optimizer.set_scaled_state(matrix, "exp_avg", values((24, 10), 7))


def test_a_deleted_projection_is_made_anew():
    optimizer = galore(update_proj_gap=100)
    train(optimizer, 3)
    state = optimizer.state[params_of(optimizer)[0]]
    old = state.pop("projection")
    train(optimizer, 1, first=3)
    assert not torch.equal(state["projection"], old)


@pytest.mark.parametrize("kernel", ["torch", pytest.param("hybrid", marks=interpreted)])
def test_the_layout_of_a_projection_shows_in_no_bit(kernel):
    optimizer, straight = galore(kernel=kernel), galore(kernel=kernel)
    train_all((optimizer, straight), 2)
    for param in params_of(optimizer)[:2]:
        state = optimizer.state[param]
        state["projection"] = state["projection"].mT.contiguous().mT
    train_all((optimizer, straight), 2, first=2)
    assert_same(snapshot(optimizer)["weights"], snapshot(straight)["weights"])


# --- refusals


LEFT_OUT = object()
NUMBERS_OF_A_GROUP = ("update_proj_gap", "rank", "proj_type", "scale", "seed", "betas")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("projection", torch.zeros(3, 9), r"'projection' .* shape \(3, 10\), got a torch.float32"),
        ("projection", torch.zeros(3, 10, dtype=torch.int32), "'projection' .* got a torch.int32"),
        ("projection", torch.full((3, 10), torch.nan), "'projection' .* must be finite numbers"),
        ("projection", torch.eye(3, 10) / 0, "'projection' of the state dict must be finite"),
        ("projection", "x", "'projection' of the state dict must be real numbers"),
        ("exp_avg", torch.zeros(24, 10), r"'exp_avg' .*float32 of shape \(24, 3\), got"),
        ("captured_energy", torch.zeros(1), r"'captured_energy' .* of shape \(\), got"),
        ("captured_energy", torch.tensor(2.0), r"'captured_energy' .* 0 to 1, got tensor\(2"),
        ("captured_energy", torch.tensor(-0.1), r"'captured_energy' .* 0 to 1, got tensor\(-0\.1"),
        ("captured_energy", torch.tensor(torch.nan), r"'captured_energy' .* got tensor\(nan"),
        *(
            (name, LEFT_OUT, f"the state dict has no '{name}'")
            for name in ("projection", "captured_energy", "exp_avg")
        ),
        *(
            (name, LEFT_OUT, f"group 0 of the state dict must have .* none of {name}")
            for name in NUMBERS_OF_A_GROUP
        ),
    ],
)
def test_state_dicts_that_do_not_fit_are_refused(name, value, message):
    """Moments of one projection mean nothing under another."""
    optimizer = galore()
    train(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    place = saved["param_groups" if name in NUMBERS_OF_A_GROUP else "state"][0]
    place[name] = value
    if value is LEFT_OUT:
        del place[name]
    train(optimizer, 1, first=2)
    with refused(optimizer, message):
        optimizer.load_state_dict(saved)


def write_a_moment(optimizer):
    optimizer.set_scaled_state(params_of(optimizer)[0], "exp_avg", values((24, 3), 7))


def write_masters(optimizer):
    model = torch.nn.ParameterList(params_of(optimizer))
    saved = megaopt.get_fp32_model_state_dict(model, optimizer)
    megaopt.set_fp32_model_state_dict(model, optimizer, saved)


@pytest.mark.parametrize("write", [write_a_moment, write_masters], ids=lambda each: each.__name__)
def test_states_without_a_projection_yet_load(write):
    """What was written before a first step; it says itself that there is no projection."""
    kind = {"dtype": FP32}
    optimizer, other = galore(**kind), galore(**kind)
    write(optimizer)
    state = optimizer.state[params_of(optimizer)[0]]
    assert state
    assert "projection" not in state
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_all((optimizer, other), 2)
    assert_same(snapshot(other), snapshot(optimizer))


def of_galore_torch():
    """A state dict as its AdamW makes one, which knows no captured energy."""
    basis = torch.linalg.qr(values((10, 3), 1))[0].mT.contiguous()
    moments = {"exp_avg": values((24, 3), 2), "exp_avg_sq": values((24, 3), 3).square()}
    numbers = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
    projecting = {"rank": 3, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    group = {"params": [0], **numbers, **projecting, "correct_bias": False}
    state = {"step": 2, **moments, "projector": SimpleNamespace(ortho_matrix=basis)}
    return {"state": {0: state}, "param_groups": [group]}


def test_states_of_galore_torch_load():
    """tests/integration/test_galore_torch.py has its own, where it is installed."""
    optimizer = galore([(24, 10)], FP32)
    (param,), saved = params_of(optimizer), of_galore_torch()
    optimizer.load_state_dict(saved)
    group, state = optimizer.param_groups[0], saved["state"][0]
    assert (group["step"], group["scale"], group["bias_correction"]) == (2, 0.25, False)
    assert_same_bits(optimizer.state[param]["exp_avg"], state["exp_avg"])
    train(optimizer, 1)
    assert_same_bits(optimizer.state[param]["projection"], state["projector"].ortho_matrix)
    del state["projector"]
    with pytest.raises(ValueError, match="the state dict has no 'projection'"):
        optimizer.load_state_dict(saved)


def test_fused_adam_refuses_the_state_of_projections():
    optimizer = galore()
    train(optimizer, 1)
    with pytest.raises(ValueError, match=r"captured_energy|projection"):
        FusedAdam(params_of(optimizer)).load_state_dict(optimizer.state_dict())


WRONG = [
    ({"rank": 0}, "rank must be None or a whole number >= 1, got 0"),
    ({"rank": -3}, "rank must be None or a whole number >= 1, got -3"),
    ({"rank": 2.0}, r"rank must be None or a whole number >= 1, got 2\.0"),
    ({"rank": "x"}, "rank must be None or a whole number >= 1, got 'x'"),
    ({"rank": True}, "rank must be None or a whole number >= 1, got True"),
    ({"update_proj_gap": 0}, "update_proj_gap must be a whole number >= 1, got 0"),
    ({"update_proj_gap": None}, "update_proj_gap must be a whole number >= 1, got None"),
    ({"scale": -1.0}, r"scale must be a finite number >= 0 in fp32, got -1\.0"),
    ({"scale": "x"}, "scale must be a finite number >= 0 in fp32, got 'x'"),
    ({"proj_type": "full"}, "proj_type must be one of std, .*auto, got 'full'"),
    ({"proj_type": None}, "proj_type must be one of std, .*auto, got None"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_numbers_that_are_not_allowed(options, message):
    """At once, in a group that is added, and when a group is changed between steps."""
    with pytest.raises(ValueError, match=f"group 0: {message}|{message}"):
        galore(**options)
    optimizer = galore()
    train(optimizer, 1)
    added = [torch.nn.Parameter(values(shape, 9)) for shape in SHAPES]
    with refused(optimizer, message):
        optimizer.add_param_group({"params": added, **options})
    optimizer.param_groups[0].update(options)
    with refused(optimizer, message):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kernel": "tritn"},
            "kernel must be one of auto, torch, compiled, hybrid, grouped, fused, got 'tritn'",
        ),
        (
            {"kernel": "fused", "exp_avg_dtype": "block_e4m3", "backend": "triton"},
            "exp_avg_dtype must not have scales with kernel='fused', which steps moments tile by "
            "tile, got block_e4m3; kernel='grouped' takes it",
        ),
        (
            {"kernel": "fused", "exp_avg_sq_dtype": torch.float16, "backend": "triton"},
            "exp_avg_sq_dtype must not have scales with kernel='fused'",
        ),
        ({"precision": "fp16"}, "precision must be one of ieee, tf32, bf16, got 'fp16'"),
        ({"precision": None}, "precision must be one of ieee, tf32, bf16, got None"),
        ({"precision": True}, "precision must be one of ieee, tf32, bf16, got True"),
        (
            {"kernel": "hybrid", "master_weights": True, "master_weight_dtype": torch.float16},
            "master_weight_dtype must not have a scale .* kernel='hybrid'.* got torch.float16",
        ),
        ({"refresh": "qr"}, "refresh must be one of subspace, svd, got 'qr'"),
        ({"stagger": 1}, "stagger must be one of True, False, got 1"),
    ],
    ids=str,
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        galore(**options)


def test_a_kernel_that_does_not_run_is_refused(monkeypatch):
    monkeypatch.setattr(backends.Triton, "why_not", lambda self, device: "it is not there")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = r"torch.compile needs a C\+\+ compiler"
    for kernel, why in {"hybrid": "it is", "fused": "it is", "compiled": missing}.items():
        reason = f"kernel='{kernel}' does not work for parameter 0 of group 0 on cpu: {why}"
        with pytest.raises(RuntimeError, match=reason):
            galore(kernel=kernel)
    train(galore(), 1)  # "auto" takes another


@pytest.mark.parametrize("change", [{"rank": 2}, {"proj_type": "left"}], ids=str)
def test_a_rank_cannot_change_under_its_moments(change):
    optimizer = galore()
    train(optimizer, 1)
    optimizer.param_groups[0].update(change)
    with refused(optimizer, r"state 'exp_avg' is torch.float32 of shape \(24, 3\)"):
        optimizer.step()


NOT_OF_GROUPS = {
    "kernel": ("hybrid", "kernel must be 'auto', .* got 'hybrid'"),
    "precision": ("bf16", "precision must be 'ieee', .* got 'bf16'"),
    "refresh": ("svd", "refresh must be 'subspace', .* got 'svd'"),
    "stagger": (False, "stagger must be True, .* got False"),
    "correct_bias": (False, "correct_bias must be left out: .* bias_correction, got False"),
}


@pytest.mark.parametrize("name", NOT_OF_GROUPS)
def test_what_holds_for_all_groups_cannot_change_in_one(name):
    value, message = NOT_OF_GROUPS[name]
    optimizer = galore()
    train(optimizer, 2)
    optimizer.param_groups[0][name] = value
    with refused(optimizer, f"group 0: {message}"):
        optimizer.step()
    message = message.split(",")[0]
    with pytest.raises(ValueError, match=f"group 0: {message}"):
        GaLoreAdamW([{"params": params_of(galore()), name: value}], **RANKED)


def test_gap_and_scale_may_change():
    optimizer, straight = galore(), galore()
    train_all((optimizer, straight), 1)
    optimizer.param_groups[0].update(update_proj_gap=50, scale=0.0, weight_decay=0.0)
    weights = copied(params_of(optimizer)[:2])
    train(optimizer, 2, first=1)
    assert_same(params_of(optimizer)[:2], weights)


def test_sparse_gradients_are_refused():
    optimizer = galore(weights=FP32)
    matrix = params_of(optimizer)[0]
    matrix.grad = values(matrix.shape, 0).to_sparse()
    with pytest.raises(ValueError, match=r"layout must be torch.strided, got torch.sparse_coo"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("wrong", [torch.zeros(2, 10), torch.zeros(3, 10).double(), 5], ids=str)
def test_a_projection_that_was_exchanged_is_refused(wrong):
    optimizer = galore()
    train(optimizer, 2)
    optimizer.state[params_of(optimizer)[0]]["projection"] = wrong
    with refused(optimizer, r"parameter 0 of .*: state 'projection' is .*allowed"):
        train(optimizer, 1, first=2)


def test_parameters_that_have_no_rows_are_refused():
    flat = torch.nn.Parameter(values((100,), 0))
    flat.megaopt_whole_shape, flat.megaopt_first_element = (20, 30), 40
    with pytest.raises(ValueError, match="None beside its parameter 0, a flat part of a matrix"):
        GaLoreAdamW([flat], rank=3)
    weight = Float8Weight.from_values(values((128, 128), 0), "current")
    with pytest.raises(ValueError, match="None beside its parameter 0, a Float8Weight: only plain"):
        GaLoreAdamW([weight], rank=3, dtype=FP32)
