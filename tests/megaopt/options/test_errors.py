"""Bad options, numbers and parameters are refused at once, by name, and nothing has changed."""

import math

import pytest
import torch
from attacks import Before
from handling import both_modes, refused, train_all
from runs import BF16, FP16, FP32, MASTER, assert_same, parameters, snapshot, train

from megaopt import FusedAdam, FusedSGD

NAN, INF = math.nan, math.inf
SHAPES = [(3, 4), (5,)]

# --- at construction

CHOICES = {
    "amsgrad": (1, "one of True, False, got 1"),
    "adam_w_mode": ("no", "one of True, False, got 'no'"),
    "backend": ("cuda", "one of auto, triton, reference, got 'cuda'"),
    "capturable": (1, "one of True, False, got 1"),
    "contract": ("fast", "one of ieee.*, got 'fast'"),
    "differentiable": (True, "False, got True$"),
    "direct_cast": ("yes", "one of None, True, False, got 'yes'"),
    "dtype": (BF16, "one of None, torch.float32, got torch.bfloat16"),
    "exp_avg_sq_dtype": (torch.float64, "one of torch.float32.*, got torch.float64"),
    "foreach": ("yes", "None, True or False, got 'yes'$"),
    "fused": (torch.ones(2), "None, True or False, got .*tensor"),
    "makes_states": ("torch", "one of .*, got 'torch'"),
    "maximize": (1, "one of True, False, got 1$"),
    "nonfinite": ("ignore", "one of propagate, skip, error, got 'ignore'"),
    "step_counts": ("torch", "one of .*, got 'torch'"),
    "store_param_remainders": (None, "one of True, False, got None"),
    "use_decoupled_grad": (torch.ones(2), "one of True, False, got a torch.float32 tensor of shap"),
    "write_unscaled_grads": ("yes", "one of True, False, got 'yes'"),
}
OPTIONS = {
    **{name: ({name: value}, f"^{name} must be {told}") for name, (value, told) in CHOICES.items()},
    "contract_in_a_list": ({"contract": []}, r"contract must be one of ieee.*, got \[\]"),
    "error_that_nothing_waits_for": (
        {"nonfinite": "error", "capturable": True},
        r"nonfinite must be 'propagate' or 'skip' with capturable=True, .*, got 'error'",
    ),
    "master_weight_dtype": (
        {"master_weights": True, "master_weight_dtype": BF16},
        r"master_weight_dtype must be one of torch.float32, torch.float16, remainder16, "
        r"remainder8, remainder8_stochastic, kahan, kahan_stochastic, got torch.bfloat16$",
    ),
    "exp_avg_dtype": (
        {"exp_avg_dtype": torch.int8},
        r"exp_avg_dtype must be one of torch.float32, torch.bfloat16, torch.float16, "
        r"torch.float8_e4m3fn, bfloat16_stochastic, block_e4m3, block_e4m3_nearest, "
        r"block64_e4m3, block64_e4m3_nearest, block_int8, block_int8_nearest, block64_int8, "
        r"block64_int8_nearest, block32_e3m0, block32_e3m0_nearest, got torch.int8$",
    ),
    "fp8_moments_under_contract_torch": (
        {"exp_avg_dtype": torch.float8_e4m3fn, "contract": "torch"},
        r"exp_avg_dtype must be one of torch.float32, torch.bfloat16, torch.float16 with "
        r"contract='torch', got torch.float8_e4m3fn: torch's optimizers keep no scales",
    ),
    "fp8_moments_by_name_under_contract_torch": (
        {"exp_avg_dtype": "scaled_float8_e4m3", "contract": "torch"},
        r"exp_avg_dtype must be one of .*torch.float16 with contract='torch', got scaled_float8",
    ),
    "scales_under_contract_torch": (
        {"exp_avg_sq_dtype": "scaled_float16", "contract": "torch"},
        r"exp_avg_sq_dtype must be one of .*torch.float16 .*, got scaled_float16",
    ),
    "fp8_of_the_other_kind": (
        {"exp_avg_dtype": torch.float8_e5m2},
        r"exp_avg_dtype must be one of .*torch.float8_e4m3fn, bfloat16_.*, got torch.float8_e5m2",
    ),
    "dtype_against_master_weight_dtype": (
        {"dtype": FP32, "master_weight_dtype": FP16},
        r"master_weight_dtype must be torch.float32, .*got torch.float16; .*master_weights=True",
    ),
    "dtype_against_no_masters": (
        {"dtype": FP32, "master_weights": False},
        r"master_weights must be True, None or a list with dtype=torch.float32, .*, got False",
    ),
    "remainders_without_masters": (
        {"store_param_remainders": True},
        r"store_param_remainders=True needs masters.*master_weights=True",
    ),
    "remainders_of_fp16_masters": (
        {
            "store_param_remainders": True,
            "master_weights": True,
            "master_weight_dtype": FP16,
        },
        r"master_weight_dtype must be torch.float32 with store_param_remainders=True, .*float16",
    ),
}

NUMBER = "must be a finite number >= 0 in fp32, got"
DECAY = "must be a number >= 0 and < 1, got"
HYPER = {
    "lr_negative": ({"lr": -1e-3}, rf"lr {NUMBER} -0\.001"),
    "lr_nan": ({"lr": NAN}, rf"lr {NUMBER} nan"),
    "lr_inf": ({"lr": INF}, rf"lr {NUMBER} inf"),
    "lr_inf_in_fp32": ({"lr": 1e39}, rf"lr {NUMBER} 1e\+39"),
    "lr_text": ({"lr": "fast"}, rf"lr {NUMBER} 'fast'"),
    "lr_a_bool": ({"lr": True}, rf"lr {NUMBER} True"),
    "lr_a_numeric_text": ({"lr": "1e-3"}, rf"lr {NUMBER} '1e-3'"),
    "lr_below_0_in_fp64_alone": ({"lr": -1e-60}, rf"lr {NUMBER} -1e-60"),
    "lr_too_large_for_fp64": ({"lr": 10**400}, rf"lr {NUMBER} 10+\.\.\."),
    "lr_too_long_to_print": ({"lr": 10**5000}, rf"lr {NUMBER} (10+\.\.\.|a value of type int)"),
    "lr_complex": ({"lr": 1j}, rf"lr {NUMBER} 1j"),
    "lr_tensor_complex": ({"lr": torch.tensor(1j)}, rf"lr {NUMBER} tensor\("),
    "lr_on_meta": ({"lr": torch.ones((), device="meta")}, rf"lr {NUMBER} .* on meta"),
    "lr_sparse": ({"lr": torch.ones(1).to_sparse()}, rf"lr {NUMBER} tensor\("),
    "eps_text": ({"eps": "0"}, rf"eps {NUMBER} '0'"),
    "bias_correction": ({"bias_correction": 1}, r"bias_correction must be one of .*got 1"),
    "betas_in_a_set": ({"betas": {0.9, 0.99}}, r"betas must be two numbers, got \{0\.9"),
    "betas_in_a_tensor": ({"betas": torch.ones(2)}, r"betas must be two numbers, got a torch"),
    "lr_tensor_nan": ({"lr": torch.tensor(NAN)}, rf"lr {NUMBER} tensor\(nan\)"),
    "lr_tensor_of_two": ({"lr": torch.ones(2)}, r"lr must be a finite .*tensor of shape \(2,\)"),
    "eps_negative": ({"eps": -1.0}, rf"eps {NUMBER} -1\.0"),
    "eps_nan": ({"eps": NAN}, rf"eps {NUMBER} nan"),
    "weight_decay_negative": ({"weight_decay": -0.1}, rf"weight_decay {NUMBER} -0\.1"),
    "weight_decay_nan": ({"weight_decay": NAN}, rf"weight_decay {NUMBER} nan"),
    "beta1_one": ({"betas": (1.0, 0.9)}, rf"betas\[0\] {DECAY} 1\.0"),
    "beta2_one": ({"betas": (0.9, 1.0)}, rf"betas\[1\] {DECAY} 1\.0"),
    "beta1_negative": ({"betas": (-0.1, 0.9)}, rf"betas\[0\] {DECAY} -0\.1"),
    "beta2_nan": ({"betas": (0.9, NAN)}, rf"betas\[1\] {DECAY} nan"),
    "three_betas": ({"betas": (0.9, 0.9, 0.9)}, r"betas must be two numbers, got \(0\.9, 0"),
    "one_beta": ({"betas": 0.9}, r"betas must be two numbers, got 0\.9"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        FusedAdam(parameters(SHAPES), **options)


OF_GROUPS = {
    **HYPER,
    "contract": ({"contract": []}, "contract must be 'ieee', "),
    "maximize": ({"maximize": torch.ones(2)}, "maximize must be False, got a torch"),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("adam_w_mode", False), ("contract", "te"), ("maximize", True), ("exp_avg_dtype", BF16)],
)
def test_what_one_group_cannot_choose_is_refused_when_it_is_assigned_later(name, value):
    optimizer = FusedAdam(parameters(SHAPES))
    train(optimizer, 2)
    optimizer.param_groups[0][name] = value
    with refused(optimizer, f"group 0: {name} must be"):
        optimizer.step()


@both_modes
@pytest.mark.parametrize(("bad", "message"), OF_GROUPS.values(), ids=OF_GROUPS)
def test_a_refused_group_leaves_no_trace(bad, message, capturable):
    """Neither in the optimizer nor in the dict that was given."""
    first, second = parameters(SHAPES)
    given = {"params": [first]}
    with pytest.raises(ValueError, match="group 1: " + message):
        FusedAdam([given, {"params": [second], **bad}], capturable=capturable)
    assert [*given] == ["params"]
    optimizer = FusedAdam([first], capturable=capturable)
    train(optimizer, 1)
    group = {"params": iter([second]), **bad}
    before, given = Before(optimizer), dict(group)
    with pytest.raises(ValueError, match="group 1: " + message):
        optimizer.add_param_group(group)
    before.assert_same()
    assert group.keys() == given.keys()
    assert all(group[name] is given[name] for name in given)
    train(optimizer, 1)


PARAMS = {
    "none": (None, TypeError, r"params must be tensors, .*pairs or groups, got None"),
    "a_number": (3, TypeError, r"params must be tensors, .*, got 3"),
    "a_model": (
        torch.nn.Sequential(torch.nn.Linear(2, 3)),
        TypeError,
        r"params must be tensors, .*, got a Sequential: pass its parameters\(\)$",
    ),
    "a_pair_of_many_lines": (
        [(1, torch.nn.Sequential(torch.nn.ReLU()))],
        TypeError,
        r"params\[0\] must be .* pair, got \(1, Sequential\( \(0\): ReLU\(\) \)\)$",
    ),
    "a_tensor": (torch.ones(3), TypeError, "should be an iterable of Tensors or dicts"),
    "a_triple": (
        [("a", torch.ones(3), 1)],
        TypeError,
        r"params\[0\] must be a tensor or a \(name, tensor\) pair, got \('a', tensor",
    ),
    "an_empty_pair": ([()], TypeError, r"params\[0\] must be a tensor .*pair, got \(\)"),
    "a_name_that_is_none": ([(1, torch.ones(3))], TypeError, r"params\[0\] must be a .*got \(1, "),
    "no_tensors": (["a"], TypeError, "can only optimize Tensors, but one of the params is str"),
    "a_group_without_params": (
        [{"lr": 1.0}],
        TypeError,
        "param_group must be a dict with 'params'",
    ),
    "a_number_in_a_group": ([{"params": 3}], TypeError, r"params must be tensors, .*, got 3"),
    "names_that_are_none": (
        [{"params": [torch.ones(3)], "param_names": 5}],
        ValueError,
        "group 0: param_names must be a list of 1 names, got 5",
    ),
}


@pytest.mark.parametrize(("params", "kind", "message"), PARAMS.values(), ids=PARAMS)
def test_parameters_that_are_none_are_refused(params, kind, message):
    with pytest.raises(kind, match=message):
        FusedAdam(params)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_parameters_of_lazy_modules_are_refused():
    lazy = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match="parameter 0 of group 0 must have a shape, got an uninit"):
        FusedAdam(lazy.parameters())


@pytest.mark.filterwarnings("ignore:.*of nested tensors is in prototype:UserWarning")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: layout must be .*, got nested"):
        FusedAdam([nested])


OF_ALL_GROUPS = {
    "dtype": (
        {"dtype": FP32},
        r"dtype must be None, the optimizer's own .*got torch.float32",
    ),
    "contract": ({"contract": "te"}, r"contract must be 'ieee', .*all groups, got 'te'"),
    "adam_w_mode": ({"adam_w_mode": False}, r"adam_w_mode must be True, .*got False"),
    "exp_avg_dtype": (
        {"exp_avg_dtype": BF16},
        r"exp_avg_dtype must be torch.float32.* torch.bfloat16",
    ),
    "master_weights": ({"master_weights": True}, r"master_weights must .* not of a group, .* True"),
    "use_decoupled_grad": ({"use_decoupled_grad": True}, r"use_decoupled_grad must be .* a group"),
    "amsgrad": ({"amsgrad": True}, r"amsgrad must be False, got True"),
    "maximize": ({"maximize": True}, r"maximize must be False, got True"),
}


@pytest.mark.parametrize(("option", "message"), OF_ALL_GROUPS.values(), ids=OF_ALL_GROUPS)
def test_what_holds_for_all_groups_is_refused_in_one(option, message):
    optimizer = FusedAdam(parameters([(3,)]))
    with refused(optimizer, "group 1: " + message):
        optimizer.add_param_group({"params": parameters([(2,)]), **option})


def test_groups_of_torchs_optimizers_are_taken_as_they_are():
    params = parameters(SHAPES, FP32)
    groups = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.1, foreach=True).param_groups
    found, expected = FusedAdam(groups), FusedAdam(parameters(SHAPES, FP32), 2e-3, weight_decay=0.1)
    train_all((found, expected), 2)
    assert_same(params, expected.param_groups[0]["params"])


@pytest.mark.parametrize("steps", [0, 2], ids=["at_the_first_step", "later"])
@pytest.mark.parametrize(("hyper", "message"), HYPER.values(), ids=HYPER)
def test_what_a_scheduler_writes_is_checked(hyper, message, steps):
    optimizer = FusedAdam([{"params": [param]} for param in parameters(SHAPES)], **MASTER)
    train(optimizer, steps)
    (name,) = hyper
    good = optimizer.param_groups[1][name]
    optimizer.param_groups[1].update(hyper)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="group 1: " + message):
        train(optimizer, 1, first=steps)
    optimizer.param_groups[1][name] = before["groups"][1][name] = good
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("step", [-1, 1.0, None], ids=str)
def test_a_step_count_that_is_none_is_refused(step):
    optimizer = FusedAdam(parameters(SHAPES))
    optimizer.param_groups[0]["step"] = step
    with pytest.raises(ValueError, match=rf"group 0: step must be a whole number .*, got {step}"):
        train(optimizer, 1)
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.complex64], ids=str)
def test_weights_of_other_dtypes_are_refused(dtype):
    params = [torch.ones(3), torch.ones(3, dtype=dtype)]
    message = f"dtype must be one of torch.float32, torch.bfloat16, torch.float16, got {dtype}"
    with pytest.raises(ValueError, match=f"parameter 1 of group 0: {message}"):
        FusedAdam(params)
    with pytest.raises(ValueError, match=f"parameter 'b': {message}"):
        FusedAdam([("a", params[0]), ("b", params[1])])


def test_sparse_weights_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: layout must .* torch.sparse"):
        FusedAdam([torch.ones(3).to_sparse()])


def test_weights_whose_elements_share_memory_are_refused():
    """torch refuses to write them only after other parameters were stepped."""
    params = [torch.ones(3), torch.ones(1).expand(4)]
    message = r"parameter 1 of group 0: .* memory of its own, got strides \(0,\) of shape \(4,\)"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params)


@pytest.mark.parametrize("dtypes", [[FP16], [BF16, FP16]], ids=["fp16", "bf16_and_fp16"])
def test_remainders_of_fp16_weights_are_refused(dtypes):
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    index = dtypes.index(FP16)
    message = rf"parameter {index} of group 0: dtype must be .*_remainders=True, got torch.float16"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, dtype=FP32, store_param_remainders=True)


def test_remainders_without_a_bf16_weight_are_refused():
    """TransformerEngine switches them off in silence."""
    message = (
        r"store_param_remainders=True needs torch.bfloat16 weights; none of the 2 parameters is"
    )
    with pytest.raises(ValueError, match=message):
        FusedAdam(parameters(SHAPES, FP32), dtype=FP32, store_param_remainders=True)


def test_a_group_that_is_refused_is_not_added():
    optimizer = FusedAdam(parameters(SHAPES), dtype=FP32, store_param_remainders=True)
    with refused(optimizer, r"parameter 0 of group 1: .*torch.float16"):
        optimizer.add_param_group({"params": parameters([(2,)], FP16)})
    with refused(optimizer, "some parameters appear in more than one"):
        optimizer.add_param_group({"params": optimizer.param_groups[0]["params"]})
    train(optimizer, 1)


# --- numbers of groups are checked in every step that could see others than the last check


NUMBERS = ("lr", "eps", "betas", "weight_decay", "bias_correction", "step")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_went_away_is_refused(name):
    optimizer = FusedAdam(parameters(), lr=1e-3)
    train(optimizer, 2)
    del optimizer.param_groups[0][name]
    with pytest.raises(ValueError, match=f"must have {name}"):
        train(optimizer, 1)


def test_numbers_that_change_their_value_are_looked_at_each_time():
    lr, betas = torch.tensor(1e-3), [0.9, 0.99]
    optimizer = FusedAdam(parameters(), lr=lr, betas=betas)
    train(optimizer, 2)
    betas[1] = 1.5
    with pytest.raises(ValueError, match=r"betas\[1\]"):
        train(optimizer, 1)
    betas[1] = 0.99
    train(optimizer, 1)
    lr.fill_(-1.0)
    with pytest.raises(ValueError, match="group 0: lr"):
        train(optimizer, 1)


def test_a_group_that_was_added_is_looked_at():
    optimizer = FusedSGD(parameters(), lr=1e-3, momentum=0.9)
    train(optimizer, 2)
    optimizer.add_param_group({"params": parameters()})
    optimizer.param_groups[1]["momentum"] = -1.0
    with pytest.raises(ValueError, match="group 1: momentum"):
        train(optimizer, 1)


def test_a_load_refuses_momentum_without_a_buffer():
    optimizer = FusedSGD(parameters(), lr=1e-3)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="group 0: momentum must be 0"):
        optimizer.load_state_dict(saved)
