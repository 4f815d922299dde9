"""FusedMuon: what goes to Muon and what to AdamW, with which bits; what is refused."""

import copy
from functools import partial

import pytest
import torch
from fsdp2_ranks import split_muon, trained
from handling import copy_weights, refused, train_all
from interpreted import interpreted
from kinds import BLOCKS, DRAWN, STOCHASTIC, kept_as
from runs import (
    BF16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    values,
)

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.float8.shard import Float8Shard
from megaopt.kernels.muon.newton_schulz import orthogonal
from megaopt.kernels.muon.orthogonal import COEFFICIENTS, Orthogonal

SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 64), (4, 2, 3)]
ADAM = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
KINDS = {
    "fp32": {"weights": FP32},
    "masters": {"weights": BF16, **MASTER},
    "remainders": {"weights": BF16, **REMAINDERS, "momentum_buffer_dtype": BF16},
    "stochastic": {"weights": BF16, **STOCHASTIC, **DRAWN,
                   "momentum_buffer_dtype": "bfloat16_stochastic"},
    "kahan": {"weights": BF16, **kept_as("kahan"), "second_moment": "normuon"},
    "blocks": {"weights": BF16, **kept_as("remainder8"), **BLOCKS,
               "momentum_buffer_dtype": "block_e4m3", "precision": "fp16"},
}  # fmt: skip
LARGE = [(33, 128), (48, 96), (10,), (2, 20, 128)]


def made(shapes=SHAPES, weights=FP32, **options):
    return FusedMuon(parameters(shapes, weights), lr=0.02, **options)


# --- the step


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw", 0.5])
def test_a_step_of_a_matrix_is_the_written_one(nesterov, adjust):
    """Momentum, direction, decay, update; by numbers that fp32 has, so that the host rounds none.

    How a direction becomes orthogonal is tests/kernels/muon/test_rule.py's.
    """
    options = {"weight_decay": 0.125, "momentum": 0.75, "nesterov": nesterov}
    (param,) = params = parameters([(12, 20)], FP32)
    optimizer = FusedMuon(params, lr=0.25, adjust_lr_fn=adjust, **options)
    how = Orthogonal((COEFFICIENTS["simple"][0],) * 5, adjust=adjust)
    weight, buffer = param.detach().clone(), torch.zeros_like(param)
    for step in range(3):
        train(optimizer, 1, step)
        buffer = buffer * 0.75 + param.grad * 0.25
        direction = buffer * 0.75 + param.grad * 0.25 if nesterov else buffer
        weight = weight * (1 - 0.25 * 0.125) - orthogonal(direction, how).float() * 0.25
        assert_same(param.detach(), weight)
        assert_same(optimizer.state[param]["momentum_buffer"], buffer)


def test_a_matrix_comes_out_about_orthogonal():
    (param,) = params = parameters([(24, 40)], FP32)
    before = param.detach().clone()
    train(FusedMuon(params, 1.0, 0.0), 1)
    sizes = torch.linalg.svdvals(before - param.detach())
    assert sizes.min() > 0.5
    assert sizes.max() < 1.3


@pytest.mark.parametrize("options", [{}, {**MASTER, "exp_avg_dtype": BF16}], ids=["fp32", "master"])
def test_others_take_fused_adams_steps(options):
    """Vectors, marked parameters, and groups with use_muon=False, whose eps is AdamW's."""
    weights = BF16 if options else FP32
    first, second, third = parameters([(9,), (6, 4), (3, 5)], weights)
    third.use_muon = False
    groups = [
        {"params": [first, third]},
        {"params": [second], "use_muon": False, "eps": 1e-3, "lr": 0.5, "betas": (0.5, 0.75)},
    ]
    found = FusedMuon(groups, 0.01, 0.1, adam_eps=1e-6, **options)
    expected = FusedAdam(
        [
            {"params": parameters([(9,), (6, 4), (3, 5)], weights)[::2], "eps": 1e-6},
            {"params": parameters([(9,), (6, 4)], weights)[1:], **groups[1]} | {"use_muon": False}
            | {"params": parameters([(9,), (6, 4)], weights)[1:]},
        ],
        **ADAM,
        **options,
    )  # fmt: skip
    for step in range(3):
        for optimizer in (found, expected):
            give_gradients(params_of(optimizer), step)
            optimizer.step()
    for key in ("weights", "states"):
        assert_same(snapshot(found)[key], snapshot(expected)[key])


STEPPED = [  # each kind once in the quick tests, by turns with capturable and without
    pytest.param(
        options, capturable, id=f"{kind}-{capturable}",
        marks=[] if capturable == bool(number % 2) else [pytest.mark.slow],
    )
    for number, (kind, options) in enumerate(KINDS.items())
    for capturable in (False, True)
]  # fmt: skip


@pytest.mark.sample(5)
@interpreted
@pytest.mark.parametrize(("options", "capturable"), STEPPED)
def test_kernel_and_twin_take_the_same_steps(options, capturable):
    """With numbers that groups say each for itself; clipped."""
    options, dtype = dict(options), options["weights"]
    del options["weights"]
    found = []
    for backend in ("triton", "reference"):
        params = parameters(LARGE, dtype)
        groups = [
            {"params": params[:1], "momentum": 0.5, "nesterov": False, "split_sizes": (11, 22),
             "ns_steps": 2},
            {"params": params[1:2], "use_muon": False, "betas": (0.5, 0.75)},
            {"params": params[2:], "ns_steps": 1, "ns_coefficients": "quintic"},
        ]  # fmt: skip
        own = {"backend": backend, "capturable": capturable, **options}
        optimizer = FusedMuon(groups, 0.02, adjust_lr_fn="match_rms_adamw", **own)
        for step in range(2):
            give_gradients(params, step)
            optimizer.step(clip_norm=1.0)
        found.append(snapshot(optimizer))
    assert_same(*found)
    with pytest.raises(AssertionError):
        assert_same(found[0]["weights"], parameters(LARGE, dtype))


# --- one parameter as several matrices


def halves(optimizers):
    """The weights after three steps, with the same gradients for all."""
    for step in range(3):
        grad = values((12, 10), 70 + step)
        for optimizer in optimizers:
            params, first = params_of(optimizer), 0
            for param in params:
                rows = param.numel() // 10
                param.grad = grad[first : first + rows].reshape(param.shape).clone()
                first += rows
            optimizer.step()
    return [
        torch.cat([param.detach().reshape(-1, 10) for param in params_of(optimizer)])
        for optimizer in optimizers
    ]


def test_several_matrices_in_one_parameter_have_the_bits_that_they_have_alone():
    weight = values((12, 10), 5)

    def param(*shape, first=0):
        rows = torch.Size(shape).numel() // 10
        return torch.nn.Parameter(weight[first : first + rows].reshape(shape).clone())

    split = FusedMuon([{"params": [param(12, 10)], "split_sizes": [8, 4]}], 0.1)
    batch = FusedMuon([param(3, 4, 10)], 0.1)
    both = FusedMuon([{"params": [param(3, 4, 10)], "split_sizes": (3, 1)}], 0.1)
    convolution = FusedMuon([param(12, 5, 2, 1)], 0.1)

    def alone(*rows):
        firsts = [sum(rows[:place]) for place in range(len(rows))]
        own = [param(r, 10, first=f) for r, f in zip(rows, firsts, strict=True)]
        return FusedMuon(own, 0.1)

    found = halves(
        [split, alone(8, 4), batch, alone(4, 4, 4), both, alone(3, 1, 3, 1, 3, 1), convolution,
         alone(12)]
    )  # fmt: skip
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("contract", ["ieee", "eo"])
def test_sizes_that_come_again_are_one_matrix_each(backend, contract):
    """A parameter says its own sizes: 2 rows of q, 1 of k and 1 of v, for each of three groups."""
    rows = [
        [r for r in range(12) if begin <= r % 4 < end] for begin, end in ((0, 2), (2, 3), (3, 4))
    ]
    weight = values((12, 10), 5)
    fused, other = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    fused.muon_split_sizes = (2, 1, 1)
    alone = [torch.nn.Parameter(weight[own].clone()) for own in rows]
    options = {"backend": backend, "contract": contract}
    optimizers = [FusedMuon(own, 0.1, **options) for own in ([fused, other], alone)]
    for step in range(2):
        fused.grad = other.grad = values((12, 10), 70 + step)
        for param, own in zip(alone, rows, strict=True):
            param.grad = fused.grad[own]
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(fused, other)
    for param, own in zip(alone, rows, strict=True):
        assert torch.equal(fused[own], param)
    assert optimizers[0].describe()[0].matrices == ((6, 10), (3, 10), (3, 10))


def test_momentum_in_blocks_goes_by_rows_of_all_dimensions_but_the_first():
    """As FusedAdam's moments do."""
    shapes = [(8, 8, 128), (64, 16, 4, 2), (33, 128), (48, 96), (4, 128)]
    optimizer = made(shapes, momentum_buffer_dtype="block_e4m3")
    expected = FusedAdam(parameters(shapes, FP32), exp_avg_dtype="block_e4m3")
    for each in (optimizer, expected):
        each.initialize_states()
    for param, other in zip(params_of(optimizer), params_of(expected), strict=True):
        own, theirs = optimizer.state[param], expected.state[other]
        for name in ("", "_scale"):
            assert_same(own.get(f"momentum_buffer{name}"), theirs.get(f"exp_avg{name}"))
    assert sum("momentum_buffer_scale" in own for own in optimizer.state.values()) == 3


# --- groups


def test_numbers_of_a_group_may_change_between_steps():
    """What chooses how matrices are stepped, too, in place as well; the state stays."""
    params = parameters([(8, 12), (5,)], FP32)
    optimizer = FusedMuon(params, 0.1, ns_coefficients=[list(COEFFICIENTS["quintic"][0])] * 5)
    (group,) = optimizer.param_groups
    changes = [
        {}, {"lr": 0.5, "momentum": 0.5, "nesterov": False}, {"ns_steps": 2}, {"eps": 0.5},
        {"split_sizes": (3, 5)}, {"adjust_lr_fn": "spectral"}, {"use_muon": None},
    ]  # fmt: skip
    for step, change in enumerate(changes):
        group.update(change)
        if step == len(changes) - 1:
            group["ns_coefficients"][0][0] = 1.5
        fresh = FusedMuon([{**group, "params": copy.deepcopy(params), "step": 0}])
        if step:
            fresh.load_state_dict(optimizer.state_dict())
        for own in (optimizer, fresh):
            train(own, 1, step)
        assert_same(snapshot(optimizer)["weights"], snapshot(fresh)["weights"])


OF_ALL = {"method": "gram", "precision": "fp16", "second_moment": "normuon", "contract": "torch",
          "momentum_buffer_dtype": BF16, "capturable": None}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OF_ALL.items(), ids=OF_ALL)
@pytest.mark.parametrize("is_there", [False, True])
def test_an_option_of_the_whole_optimizer_in_a_group_is_refused_later_too(name, value, is_there):
    """capturable is torch's key, which all groups may have."""
    (param,) = params = parameters([(4, 6)], FP32)
    own = {"method": "auto", "precision": "bf16", "second_moment": None} if is_there else {}
    optimizer = FusedMuon([{"params": params, **own}])
    train(optimizer, 2)
    optimizer.param_groups[0][name] = value
    param.grad = values((4, 6), 1)
    if name == "capturable":
        optimizer.step()
        return
    with refused(optimizer, f"group 0: {name} must be .*, the optimizer's own argument, which"):
        optimizer.step()


WRONG = {
    "eps": (None, "eps must be a finite number >= 0 in fp32, got None"),
    "adjust_lr_fn": ([1], r"adjust_lr_fn must be None, one of .*, got \[1\]"),
    "ns_coefficients": (5, "ns_coefficients must be three numbers, a list of such or .*, got 5"),
    "split_sizes": (5, "split_sizes must be None or a list of whole numbers >= 1, got 5"),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_way_to_step_a_matrix_is_named_in_any_step(name, steps):
    optimizer = made([(4, 6), (9,)])
    train(optimizer, steps)
    give_gradients(params_of(optimizer), steps)
    optimizer.param_groups[0][name], message = WRONG[name]
    with refused(optimizer, message):
        optimizer.step()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", ["use_muon", "split_sizes", "adjust_lr_fn", "eps", "lr"])
def test_a_key_that_a_group_has_lost_is_named(name, capturable):
    optimizer = made([(4, 6), (9,)], capturable=capturable)
    train(optimizer, 2)
    del optimizer.param_groups[0][name]
    give_gradients(params_of(optimizer), 2)
    before = [param.detach().clone() for param in params_of(optimizer)]
    asked = [optimizer.step]
    if name not in ("lr",):
        asked += [optimizer.state_dict, optimizer.describe]
    for ask in asked:
        with pytest.raises(ValueError, match=f"group 0 must have {name}, got params, "):
            ask()
    assert_same([param.detach() for param in params_of(optimizer)], before)


def test_eps_of_a_group_of_adamws_is_adam_eps_where_it_says_none():
    first, second, third = parameters([(3, 4)] * 3, FP32)
    optimizer = FusedMuon([{"params": [first], "use_muon": False}, {"params": [second]}], eps=1e-5)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-8, 1e-5]
    given = {"params": [third], "use_muon": False, "lr": -1}
    with refused(optimizer, "group 2: lr must be"):
        optimizer.add_param_group(given)
    assert given == {"params": [third], "use_muon": False, "lr": -1}


def test_describe_says_what_goes_where():
    vector, matrix, fused, batch, embedding, head = parameters(
        [(9,), (6, 4), (12, 4), (2, 3, 5), (20, 4), (20, 4)], FP32
    )
    embedding.is_embedding_or_output_parameter = True
    groups = [
        {"params": [("norm", vector), ("up", matrix), ("experts", batch), ("wte", embedding)]},
        {"params": [("qkv", fused)], "use_muon": True, "split_sizes": (4, 4, 4)},
        {"params": [("head", head)], "use_muon": False},
    ]
    optimizer = FusedMuon(groups)
    assert [str(each) for each in optimizer.describe()] == [
        "parameter 'norm': adamw, as it has fewer than two dimensions",
        "parameter 'up': muon 1 x [6, 4], by its shape",
        "parameter 'experts': muon 2 x [3, 5], by its shape",
        "parameter 'wte': adamw, as it is marked is_embedding_or_output_parameter=True",
        "parameter 'qkv': muon 3 x [4, 4], as its group has use_muon=True",
        "parameter 'head': adamw, as its group has use_muon=False",
    ]
    train(optimizer, 1)
    for param, each in zip(params_of(optimizer), optimizer.describe(), strict=True):
        name = "momentum_buffer" if each.rule == "muon" else "exp_avg"
        assert name in optimizer.state[param]


# --- refusals


# --- marks that are set between steps


def test_a_matrix_that_is_marked_later_is_refused_until_its_momentum_is_gone():
    """As one whose group changes; what describe() says is what a step does."""
    optimizer = made([(6, 4), (5,)])
    train(optimizer, 2)
    param = params_of(optimizer)[0]
    param.use_muon = False
    give_gradients(params_of(optimizer), 2)
    message = "parameter 0 of group 0: its state must have exp_avg, exp_avg_sq, .*momentum_buffer"
    with refused(optimizer, message):
        optimizer.step()
    del optimizer.state[param]["momentum_buffer"]
    optimizer.step()
    assert {"exp_avg", "exp_avg_sq"} < optimizer.state[param].keys()
    assert optimizer.describe()[0].rule == "adamw"


@pytest.mark.parametrize("sizes", [(2, 4), None], ids=["other", "none"])
@pytest.mark.parametrize("edited", [False, True], ids=["new", "edited"])
def test_split_sizes_that_a_parameter_gets_later_count_at_the_next_step(sizes, edited):
    found, expected = made([(6, 4)]), made([(6, 4)])
    (param,), (other,) = params_of(found), params_of(expected)
    param.muon_split_sizes, other.muon_split_sizes = [3, 3], [3, 3]
    train_all((found, expected), 2)
    again = made([(6, 4)])
    if edited and sizes is not None:
        param.muon_split_sizes[:] = sizes
    else:
        param.muon_split_sizes = sizes
    params_of(again)[0].muon_split_sizes = sizes
    copy_weights(expected, again)
    again.load_state_dict(expected.state_dict())
    train_all((found, again), 1, first=2)
    assert_same(snapshot(found)["weights"], snapshot(again)["weights"])


def test_other_attributes_of_parameters_make_nothing_anew():
    """Also where they come and go: what a step made stays."""
    optimizer = made([(6, 4), (5,)])
    train(optimizer, 2)
    batches = optimizer.stepper.gather(optimizer.param_groups, optimizer.state, False)[0]
    params_of(optimizer)[0].tensor_model_parallel = True
    train(optimizer, 1, first=2)
    again = optimizer.stepper.gather(optimizer.param_groups, optimizer.state, False)[0]
    assert batches is again


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("muon_split_sizes", 4, "muon_split_sizes must be"), ("muon_split_sizes", (4,), "split_sizes"),
     ("use_muon", "no", "use_muon must be one of")],
)  # fmt: skip
def test_marks_that_are_mistakes_are_refused_later_too(name, value, message):
    optimizer = made([(6, 4), (5,)])
    train(optimizer, 1)
    setattr(params_of(optimizer)[0], name, value)
    give_gradients(params_of(optimizer), 1)
    for _ in range(2):
        with refused(optimizer, f"group 0: .*parameter 0.*{message}"):
            optimizer.step()


def test_galores_mark_of_an_embedding_counts_at_the_next_step():
    optimizer = GaLoreAdamW(parameters([(24, 10)], FP32), rank=3, backend="reference")
    train(optimizer, 1)
    param = params_of(optimizer)[0]
    param.is_embedding_or_output_parameter = True
    give_gradients([param], 1)
    with refused(optimizer, "parameter 0 of group 0: state 'exp_avg'"):
        optimizer.step()


def marked(name, value):
    (param,) = parameters([(4, 6)], FP32)
    setattr(param, name, value)
    return param


FLOAT8 = torch.nn.Parameter(Float8Weight.from_values(values((32, 32), 1), RECIPES["current"]))
MUON = {"use_muon": True}
REFUSED = {
    "vector": ([torch.ones(3)], MUON, "group 0: use_muon must be None or False beside its "
               "parameter 0, as it has fewer than two dimensions, got True"),
    "mark": ([marked("use_muon", False)], MUON, "as it is marked use_muon=False, got True"),
    "embedding": ([marked("is_embedding_or_output_parameter", True)], MUON,
                  "as it is marked is_embedding_or_output_parameter=True, got True"),
    "no mark": ([marked("use_muon", 0)], {}, "group 0: its parameter 0: its attribute use_muon "
                "must be one of None, True, False, got 0"),
    "no embedding": ([torch.ones(3), marked("is_embedding_or_output_parameter", "yes")], {},
                     "its parameter 1: its attribute is_embedding_or_output_parameter must be"),
    "use_muon": ([], {"use_muon": 1}, "use_muon must be one of None, True, False, got 1"),
    "fp8": ([FLOAT8], {}, "master_weight_dtype must be torch.float32, of whole masters, for param"),
    "part of fp8": ([Float8Shard(FLOAT8, 0, 512)], {}, "use_muon must be False beside its param"
                    "eter 0, a flat part of a matrix"),
    "flat": ([marked("megaopt_whole_shape", (8, 3))], {}, "a flat part of a matrix"),
    "steps": ([], {"ns_steps": 0}, "group 0: ns_steps must be a whole number from 1 to 99, got 0"),
    "set": ([], {"ns_coefficients": "simpel"}, "ns_coefficients must be numbers or one of 'sim"),
    "triples": ([], {"ns_coefficients": [(1, 2, 3)]}, "a triple for each of 5 steps, got 1"),
    "numbers": ([], {"ns_coefficients": None}, "three numbers, a list of such or one of 'simple',"),
    "NaN": ([], {"ns_coefficients": (float("nan"), 1, 1)}, "be triples of numbers a, b and c"),
    "factor": ([], {"adjust_lr_fn": True}, "adjust_lr_fn must be None, one of 'original', .* or"),
    "adjust": ([], {"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of None, 'original', "),
    "eps": ([], {"eps": 2.0}, "group 0: eps must be from 1e-30 to 1, got 2.0"),
    "momentum": ([], {"momentum": 1.0}, "momentum must be a number >= 0 and < 1, got 1.0"),
    "nesterov": ([], {"nesterov": None}, "nesterov must be one of True, False, got None"),
    "sizes": ([], {"split_sizes": 3}, r"split_sizes must be None or a list of whole numbers >= 1"),
    "own sizes": ([marked("muon_split_sizes", 4)], {}, "muon_split_sizes must be"),
    "sum": ([torch.ones(4, 3)], {"split_sizes": [2, 1]}, "its parameter 0: split_sizes must add"),
    "sizes of AdamW's": ([], {"split_sizes": [1], "use_muon": False}, "None beside use_muon=False"),
    "method": ([], {"method": "gram"}, "method must be 'auto', the optimizer's own argument"),
}  # fmt: skip


@pytest.mark.parametrize(("params", "group", "message"), REFUSED.values(), ids=REFUSED)
def test_groups_that_muon_cannot_step_are_refused(params, group, message):
    with pytest.raises(ValueError, match=message):
        FusedMuon([{"params": params, **group}])
    optimizer = made()
    with refused(optimizer, message.replace("group 0", "group 1")):
        optimizer.add_param_group({"params": params, **group})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gram"}, "method='gram' must have precision='fp16'"),
        ({"method": "newton"}, "method must be one of auto, standard, gram, got 'newton'"),
        ({"precision": "fp8"}, "precision must be one of bf16, fp16, got 'fp8'"),
        ({"second_moment": "adam"}, "second_moment must be one of None, normuon, got 'adam'"),
        ({"contract": "te"}, "contract must be one of ieee, torch, eo, got 'te'"),
    ],
)
def test_options_of_no_use_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion, FusedSGD, GaLoreAdamW])
def test_others_say_that_a_group_asks_for_muon(kind):
    with pytest.warns(UserWarning, match="group 0: 'use_muon' is kept, .* another optimizer of"):
        kind([{"params": parameters([(4, 6)]), "use_muon": True}])


def test_flat_tensors_in_the_place_of_matrices_are_refused():
    """As optimizers around this one put them there (DeepSpeed's ZeRO)."""
    optimizer = made([(4, 6)])
    optimizer.param_groups[0]["params"] = parameters([(24,)], FP32)
    with pytest.raises(ValueError, match="group 0: use_muon must be False beside tensors of one"):
        train(optimizer, 1)


# --- runs that go on


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_it_resumes_at_each_step(options):
    straight = made(LARGE, **options)
    for done in range(4):
        resumed = made(LARGE, **options)
        copy_weights(straight, resumed)
        resumed.load_state_dict(through_a_file(straight.state_dict()))
        train_all((straight, resumed), 1, done)
        assert_same_run(resumed, straight)


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=[interpreted, pytest.mark.slow])]
)
def test_ranks_split_the_whole_matrix(on_ranks, backend):
    """Their own rows may be no whole number of the sizes that come again."""
    given = {"optimizer": split_muon, "backend": backend, "weights": FP32}
    run = partial(trained, shapes=[(12, 10), (8, 6), (4, 9)])
    expected = run(given, 2)
    for world in (2, 3):
        for rank, found in enumerate(on_ranks(world, run, given, 2)):
            assert_same(found, expected, f"rank {rank}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("options", [{}, {"second_moment": "normuon"}, {"contract": "torch"}])
def test_matrices_without_elements_leave_the_others(backend, options):
    found, expected = (
        made([(4, 6), *more], backend=backend, **options) for more in ([(5, 0), (0, 5)], [])
    )
    for optimizer in (found, expected):
        for step in range(2):
            give_gradients(params_of(optimizer), step)
            optimizer.step(clip_norm=1.0)
    assert_same(params_of(found)[0].detach(), params_of(expected)[0].detach())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_leaves_the_others(bad):
    found, expected = made(), made()
    for optimizer in (found, expected):
        give_gradients(params_of(optimizer), 0)
    params_of(found)[1].grad[2, 3] = bad
    for optimizer in (found, expected):
        optimizer.step()
    own, others = snapshot(found)["weights"], snapshot(expected)["weights"]
    assert not own.pop(1).isfinite().any()
    others.pop(1)
    assert_same(own, others)


@interpreted
def test_a_graph_captures_what_is_made(capturing):
    """The second moment too; the host is asked for nothing."""
    optimizer = made([(6, 4), (9,)], capturable=True, backend="triton", second_moment="normuon")
    train(optimizer, 1)
    capturing()
    train(optimizer, 1, 1)
    del optimizer.state[params_of(optimizer)[0]]["variance_neuron"]
    reason = "the state of parameter 0 of group 0 is not made yet: take one step before"
    with refused(optimizer, reason, RuntimeError):
        optimizer.step()


def test_adam_eps_of_a_group_without_muon_is_its_eps():
    """Unless it says eps; then that counts."""
    steps = {}
    for name, given in {
        "adam_eps": {"adam_eps": 1.0},
        "eps": {"eps": 1.0, "adam_eps": 2.0},
    }.items():
        param = torch.nn.Parameter(torch.zeros(3))
        param.grad = torch.ones(3)
        FusedMuon([{"params": [param], "use_muon": False, **given}], lr=1.0).step()
        steps[name] = param.detach()
    assert_same(steps["adam_eps"], torch.full((3,), -0.5))
    assert_same(steps["eps"], torch.full((3,), -0.5))
