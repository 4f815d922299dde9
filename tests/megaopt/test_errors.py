"""Bad input is refused at once, by a message that names it, and nothing has changed."""

import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from runs import BF16, FP16, FP32, MASTER, assert_same, give_gradients, parameters, snapshot, train

from megaopt import FusedAdam

NAN, INF = math.nan, math.inf
BACKENDS = ["reference", "triton"]
SHAPES = [(3, 4), (5,)]

# --- at construction

OPTIONS = {
    "amsgrad": ({"amsgrad": True}, r"amsgrad=True is not allowed: False"),
    "nonfinite": (
        {"nonfinite": "ignore"},
        r"nonfinite='ignore' is not allowed: one of propagate, skip, error",
    ),
    "error_that_nothing_waits_for": (
        {"nonfinite": "error", "capturable": True},
        r"nonfinite='error' is not allowed with capturable=True: .*'propagate' or 'skip'",
    ),
    "contract": ({"contract": "fast"}, r"contract='fast' is not allowed: one of ieee"),
    "backend": ({"backend": "cuda"}, r"backend='cuda' .*one of auto, triton, reference"),
    "dtype": ({"dtype": BF16}, r"dtype=torch.bfloat16 .*one of None, torch.float32"),
    "master_weight_dtype": (
        {"master_weights": True, "master_weight_dtype": BF16},
        r"master_weight_dtype=torch.bfloat16 .*one of torch.float32, torch.float16",
    ),
    "exp_avg_dtype": (
        {"exp_avg_dtype": torch.int8},
        r"exp_avg_dtype=torch.int8 .*one of torch.float32, torch.bfloat16, torch.float16, "
        r"torch.float8_e4m3fn$",
    ),
    "exp_avg_sq_dtype": (
        {"exp_avg_sq_dtype": torch.float64},
        r"exp_avg_sq_dtype=torch.float64 .*one of torch.float32",
    ),
    "fp8_of_the_other_kind": (
        {"exp_avg_dtype": torch.float8_e5m2},
        r"exp_avg_dtype=torch.float8_e5m2 is not allowed: one of .*torch.float8_e4m3fn",
    ),
    "dtype_against_master_weight_dtype": (
        {"dtype": FP32, "master_weight_dtype": FP16},
        r"dtype=torch.float32 .*master_weight_dtype=torch.float16 .*master_weights=True",
    ),
    "dtype_against_no_masters": (
        {"dtype": FP32, "master_weights": False},
        r"master_weights=False is not allowed with dtype=torch.float32",
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
        r"store_param_remainders=True .*master_weight_dtype=torch.float16 .*only torch.float32",
    ),
}

HYPER = {
    "lr_negative": ({"lr": -1e-3}, r"lr=-0\.001 is not allowed: a finite number, at least 0"),
    "lr_nan": ({"lr": NAN}, r"lr=nan is not allowed"),
    "lr_inf": ({"lr": INF}, r"lr=inf is not allowed"),
    "lr_inf_in_fp32": ({"lr": 1e39}, r"lr=1e\+39 is not allowed: a finite number"),
    "lr_text": ({"lr": "fast"}, r"lr='fast' is not allowed: a number"),
    "lr_tensor_nan": ({"lr": torch.tensor(NAN)}, r"lr=tensor\(nan\) is not allowed"),
    "lr_tensor_of_two": ({"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\): one element"),
    "eps_negative": ({"eps": -1.0}, r"eps=-1\.0 is not allowed: a finite number, at least 0"),
    "eps_nan": ({"eps": NAN}, r"eps=nan is not allowed"),
    "weight_decay_negative": ({"weight_decay": -0.1}, r"weight_decay=-0\.1 is not allowed"),
    "weight_decay_nan": ({"weight_decay": NAN}, r"weight_decay=nan is not allowed"),
    "beta1_one": ({"betas": (1.0, 0.9)}, r"betas\[0\]=1\.0 .*at least 0, less than 1"),
    "beta2_one": ({"betas": (0.9, 1.0)}, r"betas\[1\]=1\.0 is not allowed"),
    "beta1_negative": ({"betas": (-0.1, 0.9)}, r"betas\[0\]=-0\.1 is not allowed"),
    "beta2_nan": ({"betas": (0.9, NAN)}, r"betas\[1\]=nan is not allowed"),
    "three_betas": ({"betas": (0.9, 0.9, 0.9)}, r"betas=\(0\.9, 0\.9, 0\.9\) .*two numbers"),
    "one_beta": ({"betas": 0.9}, r"betas=0\.9 is not allowed: two numbers"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        FusedAdam(parameters(SHAPES), **options)


@pytest.mark.parametrize(("hyper", "message"), HYPER.values(), ids=HYPER)
def test_hyper_parameters_are_checked_at_construction(hyper, message):
    with pytest.raises(ValueError, match="group 0: " + message):
        FusedAdam(parameters(SHAPES), **hyper)


@pytest.mark.parametrize(("hyper", "message"), HYPER.values(), ids=HYPER)
def test_hyper_parameters_of_a_group_are_checked(hyper, message):
    first, second = parameters(SHAPES)
    with pytest.raises(ValueError, match="group 1: " + message):
        FusedAdam([{"params": [first]}, {"params": [second], **hyper}])
    optimizer = FusedAdam([first])
    with pytest.raises(ValueError, match="group 1: " + message):
        optimizer.add_param_group({"params": [second], **hyper})
    assert len(optimizer.param_groups) == 1


OF_ALL_GROUPS = {
    "dtype": ({"dtype": FP32}, r"dtype=torch.float32 .*: None, the optimizer's own argument"),
    "contract": ({"contract": "te"}, r"contract='te' is not allowed: 'ieee', .*all groups"),
    "adam_w_mode": ({"adam_w_mode": False}, r"adam_w_mode=False is not allowed: True"),
    "exp_avg_dtype": ({"exp_avg_dtype": BF16}, r"exp_avg_dtype=torch.bfloat16 .*torch.float32"),
    "master_weights": ({"master_weights": True}, r"master_weights is not allowed in a group"),
    "use_decoupled_grad": ({"use_decoupled_grad": True}, r"use_decoupled_grad is not allowed in a"),
    "amsgrad": ({"amsgrad": True}, r"amsgrad=True is not allowed: False"),
    "maximize": ({"maximize": True}, r"maximize=True is not allowed: False"),
}


@pytest.mark.parametrize(("option", "message"), OF_ALL_GROUPS.values(), ids=OF_ALL_GROUPS)
def test_what_holds_for_all_groups_is_refused_in_one(option, message):
    optimizer = FusedAdam(parameters([(3,)]))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="group 1: " + message):
        optimizer.add_param_group({"params": parameters([(2,)]), **option})
    assert_same(snapshot(optimizer), before)


def test_groups_of_torchs_optimizers_are_taken_as_they_are():
    params = parameters(SHAPES, FP32)
    groups = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.1, foreach=True).param_groups
    found, expected = FusedAdam(groups), FusedAdam(parameters(SHAPES, FP32), 2e-3, weight_decay=0.1)
    for optimizer in (found, expected):
        train(optimizer, 2)
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
    with pytest.raises(ValueError, match=rf"group 0: step={step} .*whole number"):
        train(optimizer, 1)
    assert len(optimizer.state) == 0


WEIGHTS = {
    "integers": (torch.int32, {}, "dtype torch.int32"),
    "fp64": (torch.float64, {}, "dtype torch.float64"),
    "complex": (torch.complex64, {}, "dtype torch.complex64"),
}


@pytest.mark.parametrize(("dtype", "options", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_other_dtypes_are_refused(dtype, options, message):
    params = [torch.ones(3), torch.ones(3, dtype=dtype)]
    allowed = "is not allowed: torch.float32, torch.bfloat16, torch.float16"
    with pytest.raises(ValueError, match=f"parameter 1 of group 0: {message} {allowed}"):
        FusedAdam(params, **options)
    with pytest.raises(ValueError, match=f"parameter 'b': {message} {allowed}"):
        FusedAdam([("a", params[0]), ("b", params[1])], **options)


def test_sparse_weights_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: layout torch.sparse_coo"):
        FusedAdam([torch.ones(3).to_sparse()])


def test_weights_whose_elements_share_memory_are_refused():
    """torch refuses to write them only after other parameters were stepped."""
    params = [torch.ones(3), torch.ones(1).expand(4)]
    with pytest.raises(ValueError, match=r"parameter 1 of group 0: strides \(0,\) of shape \(4,\)"):
        FusedAdam(params)


@pytest.mark.parametrize("dtypes", [[FP16], [BF16, FP16]], ids=["fp16", "bf16_and_fp16"])
def test_remainders_of_fp16_weights_are_refused(dtypes):
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    index = dtypes.index(FP16)
    message = rf"parameter {index} of group 0: store_param_remainders=True .*torch.float16 weights"
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
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"parameter 0 of group 1: .*torch.float16"):
        optimizer.add_param_group({"params": parameters([(2,)], FP16)})
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": optimizer.param_groups[0]["params"]})
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1)


# --- gradients

GRADS = {
    "sparse": (
        lambda p: torch.ones(p.shape, dtype=BF16).to_sparse(),
        r"layout torch.sparse_coo .*strided",
    ),
    "complex": (lambda p: torch.ones(p.shape, dtype=torch.complex64), r"dtype torch.complex64"),
    "fp64": (lambda p: torch.ones(p.shape, dtype=torch.float64), r"dtype torch.float64 .*float32"),
    "integers": (lambda p: torch.ones(p.shape, dtype=torch.int64), r"dtype torch.int64"),
    "longer": (lambda p: torch.ones(6, dtype=BF16), r"shape \(6,\) .*\(5,\)"),
    "shorter": (lambda p: torch.ones(4, dtype=BF16), r"shape \(4,\) .*\(5,\)"),
    "one_for_all": (lambda p: torch.ones(1, dtype=BF16), r"shape \(1,\) .*\(5,\)"),
    "two_dimensional": (lambda p: torch.ones(1, 5, dtype=BF16), r"shape \(1, 5\) .*\(5,\)"),
    "meta": (lambda p: torch.ones(5, device="meta"), r"on meta .*the parameter's, cpu"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [0, 2], ids=["at_the_first_step", "later"])
@pytest.mark.parametrize(("bad", "message"), GRADS.values(), ids=GRADS)
def test_gradients_that_cannot_be_read_are_refused(backend, steps, bad, message):
    """Twice: a refusal must not make the next step trust the tensor; then a good step goes on."""
    params, same = parameters(SHAPES), parameters(SHAPES)
    found = FusedAdam(params, backend=backend, use_decoupled_grad=True, **MASTER)
    expected = FusedAdam(same, backend="reference", use_decoupled_grad=True, **MASTER)

    def give(own, step):
        for param in own:
            param.decoupled_grad = torch.full(param.shape, 0.5 + step, dtype=BF16)

    for step in range(steps):
        give(params, step)
        give(same, step)
        found.step()
        expected.step()
    give(params, steps)
    params[1].decoupled_grad = bad(params[1])
    before = snapshot(found)
    for _ in range(2):
        with pytest.raises(ValueError, match="parameter 1 of group 0: a gradient .*" + message):
            found.step()
        assert_same(snapshot(found), before)
    give(params, steps)
    give(same, steps)
    found.step()
    expected.step()
    assert_same(snapshot(found), snapshot(expected))


def test_a_sparse_gradient_of_an_embedding_is_refused():
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = FusedAdam([("table", embedding.weight)])
    embedding(torch.tensor([1, 2])).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError, match=r"parameter 'table': a gradient of layout torch.sparse_coo"
    ):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sparse_gradient_of_a_transposed_weight_is_refused(backend):
    param = torch.nn.Parameter(torch.ones(3, 4).t())
    optimizer = FusedAdam([param], backend=backend)
    train(optimizer, 1)
    param.grad = torch.ones(4, 3).to_sparse()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"a gradient of layout torch.sparse_coo"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


# --- states that someone replaced

STATES = {
    "another_dtype": ("exp_avg", lambda t: t.to(BF16), r"torch.bfloat16 of shape .*torch.float32"),
    "another_width": ("exp_avg_sq", lambda t: t.double(), r"torch.float64 of shape"),
    "another_size": ("exp_avg", lambda t: t[:3], r"\(3,\).*allowed: .*\(5,\)"),
    "another_shape": ("exp_avg_sq", lambda t: t.clone()[None], r"\(1, 5\).*allowed: .*\(5,\)"),
    "another_view": ("exp_avg_sq", lambda t: t.view(1, 5), r"\(1, 5\).*allowed: .*\(5,\)"),
    "another_device": ("exp_avg", lambda t: t.to("meta"), r"on meta; allowed: .*on cpu"),
    "no_master": ("master_param", lambda t: t.to(BF16), r"torch.bfloat16.*allowed: torch.float32"),
    "a_scale_of_another_dtype": ("exp_avg_scale", lambda t: t.double(), r"torch.float64"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "change", "message"), STATES.values(), ids=STATES)
def test_states_replaced_by_other_ones_are_refused(backend, name, change, message):
    scaled = {"exp_avg_dtype": FP16} if name == "exp_avg_scale" else {}
    optimizer = FusedAdam(parameters(SHAPES), backend=backend, **MASTER, **scaled)
    train(optimizer, 2)
    param = optimizer.param_groups[0]["params"][1]
    good = optimizer.state[param][name]
    before = snapshot(optimizer)
    optimizer.state[param][name] = change(good)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"parameter 1 of group 0: state '{name}' is .*{message}"
        ):
            train(optimizer, 1, first=2)
    optimizer.state[param][name] = good
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1, first=2)


def test_a_refused_first_step_makes_no_state():
    """Not of the parameters before the one that is refused either."""
    params = parameters(SHAPES)
    optimizer = FusedAdam(params, **MASTER)
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(5, dtype=BF16)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameter 1 of group 0: state 'exp_avg'"):
        train(optimizer, 1)
    assert_same(snapshot(optimizer), before)


# --- the rest


def test_a_parameter_of_another_optimizer_is_refused():
    optimizer = FusedAdam(parameters(SHAPES))
    with pytest.raises(ValueError, match=r"tensor of shape \(7,\) is no parameter"):
        optimizer.initialize_state(torch.zeros(7))
    assert len(optimizer.state) == 0


def test_triton_on_a_device_without_kernels_is_refused():
    with pytest.raises(
        RuntimeError, match=r"backend='triton' .*parameter 0 of group 0 on meta: .*'meta'"
    ):
        FusedAdam([torch.zeros(3, device="meta")], backend="triton")


def python(code, **environment):
    """Runs code in a fresh Python; gives what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_triton_on_a_cpu_without_the_interpreter_says_why():
    printed = python("""
        import torch
        from megaopt import FusedAdam
        param = torch.nn.Parameter(torch.ones(3))
        try:
            FusedAdam([param], backend="triton")
        except RuntimeError as error:
            print(error)
        FusedAdam([param])
        print("auto works")
    """)
    assert "backend='triton' does not work for parameter 0 of group 0 on cpu" in printed
    assert "set TRITON_INTERPRET=1 before megaopt is imported" in printed
    assert "backend='reference' works everywhere" in printed
    assert "auto works" in printed


def test_without_triton_the_reference_serves_and_triton_says_why():
    """As on macOS: the numbers are those of a run with Triton installed."""
    code = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError("No module named 'triton'", name="triton")
        {block}
        import torch
        from megaopt import FusedAdam
        param = torch.nn.Parameter(torch.linspace(-1, 1, 7).bfloat16())
        optimizer = FusedAdam([param], dtype=torch.float32, exp_avg_dtype=torch.float16)
        for step in range(3):
            param.grad = torch.full((7,), 0.1 + step).bfloat16()
            optimizer.step()
        print(optimizer.get_unscaled_state(param, "master_param").view(torch.int32).tolist())
        try:
            FusedAdam([param], backend="triton")
        except RuntimeError as error:
            print(error)
        print("triton" in sys.modules)
    """
    without = python(code.replace("{block}", "sys.meta_path.insert(0, Blocked())")).splitlines()
    installed = python(code.replace("{block}", "")).splitlines()
    assert without[0] == installed[0]
    assert "Triton cannot be imported (No module named 'triton')" in without[1]
    assert "backend='reference' works everywhere" in without[1]
    assert without[2] == "False"
    assert installed[2] == "True"


def test_the_closures_error_changes_nothing():
    optimizer = FusedAdam(parameters(SHAPES))
    give_gradients(optimizer.param_groups[0]["params"], 0)
    before = snapshot(optimizer)

    def closure():
        raise KeyError("the data ran out")

    with pytest.raises(KeyError, match="the data ran out"):
        optimizer.step(closure)
    assert_same(snapshot(optimizer), before)
