"""Random bits on the public interface: the same whoever steps an element, and when repeated."""

import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, refused, train_all
from runs import (
    BF16,
    FP16,
    MASTER,
    REMAINDERS,
    assert_same,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)

from megaopt import FusedAdam, FusedLion, FusedSGD
from megaopt.float8 import RECIPES, Float8Weight

DRAWN = "bfloat16_stochastic"
DRAWN_MOMENTS = {"exp_avg_dtype": DRAWN, "exp_avg_sq_dtype": DRAWN}
STOCHASTIC24 = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
KAHAN = {"master_weights": True, "master_weight_dtype": "kahan_stochastic"}
# optimizer and options; lr so large that weights of bf16 move
KINDS = {
    "adam, moments": (FusedAdam, {**MASTER, **DRAWN_MOMENTS}),
    "adam, weights and moments": (FusedAdam, {"weight_rounding": "stochastic", **DRAWN_MOMENTS}),
    "adam, 24 bits beside a scaled moment": (FusedAdam, {**STOCHASTIC24, "exp_avg_dtype": FP16}),
    "lion, Kahan and moment": (FusedLion, {**KAHAN, "exp_avg_dtype": DRAWN}),
    "sgd, weights": (FusedSGD, {"weight_rounding": "stochastic"}),
    "sgd, 24 bits and momentum": (
        FusedSGD,
        {**STOCHASTIC24, "momentum": 0.9, "momentum_buffer_dtype": DRAWN},
    ),
}
UNSCALED = {name: kind for name, kind in KINDS.items() if FP16 not in kind[1].values()}
each_kind = pytest.mark.parametrize("kind", KINDS)
QUICK = ("adam, weights and moments", "lion, Kahan and moment")
"""On the interpreter, which takes its time; the others are slow there."""


def on_both_backends(kinds):
    """Marks a test with these kinds on the twin and on the kernel."""
    slow = [[] if kind in QUICK else [pytest.mark.slow] for kind in kinds]
    pairs = zip(kinds, slow, strict=True)
    found = [pytest.param("triton", kind, marks=own) for kind, own in pairs]
    return pytest.mark.parametrize(
        ("backend", "kind"), [*(("reference", kind) for kind in kinds), *found]
    )


each_pair = on_both_backends(KINDS)
HYPER = {"lr": 2e-3, "weight_decay": 0.1, "seed": 0x1234_5678_9ABC_DEF0}


def made(kind, params=None, **more):
    optimizer, options = KINDS[kind]
    return optimizer(parameters() if params is None else params, **{**HYPER, **options, **more})


def rows_of(whole):
    """The rows of a parameter as parameters of their own, which know where they lie."""
    rows = []
    for index, row in enumerate(whole.detach()):
        rows.append(torch.nn.Parameter(row.clone()))
        rows[-1].megaopt_first_element = index * len(row)
    return rows


@on_both_backends(UNSCALED)
def test_rows_draw_what_the_whole_draws(kind, backend):
    """A scale per tensor would be another for each row."""
    whole = torch.nn.Parameter(values((5, 7), 0, BF16))
    rows = rows_of(whole)
    one = made(kind, [{"params": [whole], "param_numbers": [9]}], backend="reference")
    groups = [
        {"params": rows[3:], "param_numbers": [9] * 2},
        {"params": rows[:3], "param_numbers": [9] * 3},
    ]
    many = made(kind, groups, backend=backend)
    for step in range(4):
        whole.grad = values((5, 7), 100 + step, BF16)
        for row, grad in zip(rows, whole.grad, strict=True):
            row.grad = grad.clone()
        one.step()
        many.step()
    assert_same_bits(torch.stack([row.detach() for row in rows]), whole.detach(), "weight")
    for name in one.rule.moments:
        found = torch.stack([many.state[row][name] for row in rows])
        assert_same_bits(found, one.state[whole][name], name)


@each_kind
def test_another_seed_draws_otherwise(kind):
    shapes = [(40, 40)]
    runs = {}
    for seed in (3, 4, 3 + 2**32, 3 + 2**63):
        optimizer = made(kind, parameters(shapes), seed=seed)
        train(optimizer, 2)
        runs[seed] = torch.cat(
            [each.float().flatten() for own in optimizer.state.values() for each in own.values()
             if isinstance(each, torch.Tensor)]
            + [param.detach().float().flatten() for param in params_of(optimizer)]
        )  # fmt: skip
    for seed in list(runs)[1:]:
        assert bool((runs[seed] != runs[3]).any()), seed
    again = made(kind, [{"params": parameters(shapes), "seed": 3}], seed=99)
    train(again, 2)
    optimizer = made(kind, parameters(shapes), seed=3)
    train(optimizer, 2)
    assert_same(snapshot(again)["weights"], snapshot(optimizer)["weights"], "a group's own seed")


@each_pair
def test_groups_with_other_step_counts(kind, backend):
    """A group that came later draws by its own count."""
    early, late = parameters([(30,)]), parameters([(3,), (40,)])
    together = made(kind, early, backend=backend)
    train(together, 2)
    together.add_param_group({"params": late, "param_numbers": [1, 2]})
    alone = [
        made(kind, parameters([(30,)]), backend="reference"),
        made(kind, [{"params": parameters([(3,), (40,)]), "param_numbers": [1, 2]}]),
    ]
    train(alone[0], 2)
    for step in range(2, 5):
        give_gradients(params_of(together), step)
        grads = [param.grad for param in params_of(together)]
        for param, grad in zip([*params_of(alone[0]), *params_of(alone[1])], grads, strict=True):
            param.grad = grad.clone()
        for optimizer in (together, *alone):
            optimizer.step()
    assert [group["step"] for group in together.param_groups] == [5, 3]
    expected = [param.detach() for each in alone for param in params_of(each)]
    assert_same([param.detach() for param in params_of(together)], expected)


@both_backends
def test_fp16_weights_have_their_own_compensation(backend):
    """Under one name beside bf16 weights; both step together."""
    params = [*parameters([(40,)], FP16), *parameters([(50,)], BF16)]
    optimizer = FusedAdam(params, **{**HYPER, **KAHAN}, backend=backend)
    train(optimizer, 3)
    for param in params:
        assert optimizer.state[param]["master_param"].dtype == BF16
        value = param.detach().double() + optimizer.state[param]["master_param"].double()
        assert bool((value != param.detach().double()).any())
        assert_same_bits(value.to(param.dtype), param.detach(), "the weight is the value rounded")


# --- refused


def float8_weight():
    weight = Float8Weight.from_values(values((128, 128), 0, BF16), RECIPES["current"])
    return torch.nn.Parameter(weight)


REFUSED = {
    "contract torch": (
        lambda: FusedAdam(parameters(), contract="torch", weight_rounding="stochastic"),
        r"contract='torch' must round to nearest, .*got weight_rounding='stochastic'; "
        r"contract='ieee' rounds stochastically too",
    ),
    "contract torch, moments": (
        lambda: FusedAdam(parameters(), contract="torch", **DRAWN_MOMENTS),
        r"contract='torch' must round to nearest, .*exp_avg_dtype='bfloat16_stochastic', "
        r"exp_avg_sq_dtype='bfloat16_stochastic'",
    ),
    "24 bits beside fp16": (
        lambda: FusedAdam(parameters(dtype=FP16), **STOCHASTIC24),
        r"parameter 0 of group 0: dtype must be torch.bfloat16 .*, or torch.float32, with "
        r"master_weight_dtype='remainder8_stochastic', got torch.float16",
    ),
    "Kahan beside bf16 and fp8": (
        lambda: FusedAdam([*parameters(), float8_weight()], **KAHAN),
        r"parameter \d of group 0: master_weight_dtype of fp8 weights must .*'kahan_stochastic'",
    ),
    "weight_rounding with masters": (
        lambda: FusedAdam(parameters(), weight_rounding="stochastic", **MASTER),
        r"weight_rounding='stochastic' is for weights without masters: leave it out, or pass "
        r"master_weights=False",
    ),
    "weight_rounding with 24 bits": (
        lambda: FusedLion(parameters(), weight_rounding="stochastic", **STOCHASTIC24),
        r"weight_rounding='stochastic' is for weights without masters",
    ),
    "remainders of 24 bits": (
        lambda: FusedAdam(parameters(), **{**REMAINDERS, **STOCHASTIC24, "dtype": None}),
        r"master_weight_dtype must be torch.float32 with store_param_remainders=True, .*"
        r"\(master_weight_dtype='remainder16' alone .*\), got 'remainder8_stochastic'",
    ),
    "a list of masters": (
        lambda: FusedAdam(
            parameters(), master_weights=[None] * 4, master_weight_dtype="remainder8"
        ),
        r"master_weight_dtype must be torch.float32, .* with a list of master_weights, got "
        r"remainder8",
    ),
    "amsgrad": (
        lambda: FusedAdam(parameters(), amsgrad=True, exp_avg_sq_dtype=DRAWN),
        r"exp_avg_sq_dtype must round to nearest with amsgrad=True, got 'bfloat16_stochastic': .*"
        r"too large",
    ),
    "an unknown rounding": (
        lambda: FusedSGD(parameters(), weight_rounding="up"),
        r"weight_rounding must be one of nearest, stochastic, got 'up'",
    ),
    "the format behind a name": (
        lambda: FusedAdam(parameters(), master_weights=True, master_weight_dtype="kahan_float16"),
        r"master_weight_dtype must be .*kahan.*got 'kahan_float16'",
    ),
    "a master's name as a moment": (
        lambda: FusedAdam(parameters(), exp_avg_dtype="kahan"),
        r"exp_avg_dtype must be .*bfloat16_stochastic.*got 'kahan'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["remainder16", "kahan", "kahan_stochastic"])
def test_masters_that_do_not_fit_a_weight_are_refused_when_it_is_known(kind):
    """When a group is added, when masters are asked for, and, where it changed, by the step."""
    options = {"master_weights": True, "master_weight_dtype": kind}
    message = f"master_weight_dtype of fp8 weights must be .*'remainder8' .*='{kind}'"
    with pytest.raises(ValueError, match=f"parameter 0 of group 0: {message}"):
        FusedAdam([float8_weight()], **options)
    message, params = f"parameter 0 of group 1: {message}", parameters()
    optimizer, group = FusedAdam(params, **options), {"params": [float8_weight()]}
    with refused(optimizer, message):
        optimizer.add_param_group(group)
    assert list(group) == ["params"]
    optimizer.param_groups.append({**optimizer.param_groups[0], **group})
    with pytest.raises(ValueError, match=message):
        optimizer.master_weights = True
    give_gradients(params_of(optimizer), 0)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    del optimizer.param_groups[1]
    optimizer.step()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, None, "0"], ids=repr)
def test_a_seed_out_of_range_is_refused(seed):
    message = r"seed must be a whole number from 0 to 2\*\*64 - 1, got "
    with pytest.raises(ValueError, match=message):
        FusedAdam(parameters(), seed=seed)
    with pytest.raises(ValueError, match="group 0: " + message):
        made("sgd, weights", [{"params": parameters(), "seed": seed}])
    packed = made("sgd, weights").state_dict()
    packed["param_groups"][0]["seed"] = seed
    for optimizer in (made("sgd, weights"), FusedSGD(parameters(), master_weights=False)):
        train(optimizer, 1)
        with refused(optimizer, "group 0: " + message):  # the second draws nothing
            optimizer.load_state_dict(packed)


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_seeds_at_the_ends(seed):
    found, expected = (made("sgd, weights", seed=seed, capturable=each) for each in (True, False))
    train_all((found, expected), 2)
    assert_same(snapshot(found)["weights"], snapshot(expected)["weights"])
