"""An error at any point of what changes an optimizer leaves weights, states and groups alone."""

import contextlib
import sys

import pytest
import torch
from attacks import OURS, Before
from handling import made
from runs import (
    BF16,
    FORMATS,
    FP16_MASTER,
    FP32,
    MASTER,
    REMAINDERS,
    SHAPES,
    assert_same,
    copied,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt import FusedAdam
from megaopt.float8 import Float8Weight


class Injected(BaseException):  # so that nothing on the way takes it for a fault of its own
    pass


class Failing(TorchDispatchMode):
    """Lets the first operations of torch through, then one fails."""

    def __init__(self, allowed):
        super().__init__()
        self.left, self.failed = allowed, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.left == 0 and not self.failed:
            self.failed = True
            raise Injected(str(func))
        self.left -= 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def failing_line(allowed):
    """Lets the first lines of the package through, then one fails."""
    left, failed = allowed, False

    def on_event(frame, event, _):
        nonlocal left, failed
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and not failed:
            if left == 0:
                failed = True
                raise Injected(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            left -= 1
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield
    finally:
        sys.settrace(before)


FP16_FP8 = {**FORMATS["fp8_moments"], "exp_avg_sq_dtype": torch.float16}


# --- what is attacked: (makes an optimizer, and what it is given), and what is done with these


def loads(options, saved_by=None, **target_options):
    def start():
        source, target = made(options), made(options, **target_options)
        train(source, 2)
        train(target, 3, first=5)
        return target, (saved_by or FusedAdam.state_dict)(source)

    return start, FusedAdam.load_state_dict


def torchs(_):
    theirs = torch.optim.AdamW(parameters())
    train(theirs, 2)
    return theirs.state_dict()


def loads_into_external_masters():
    target, saved = loads(MASTER)[0]()
    target.master_weights = [torch.full(shape, 3.0) for shape in SHAPES]
    target.step()
    return target, saved


def adds_a_group(**options):
    def start():
        optimizer = FusedAdam(parameters(SHAPES[:2]), **options)
        train(optimizer, 1)
        return optimizer, {"params": parameters([(7,)]), "lr": 0.5, "step": 3}

    return start, FusedAdam.add_param_group


def sets(options, name, weights=BF16, after=1, shape=(6,)):
    def start():
        optimizer = FusedAdam(parameters([(6,)], weights), **options)
        train(optimizer, after)
        return optimizer, values(shape, 9)

    def do(optimizer, value):
        optimizer.set_scaled_state(params_of(optimizer)[0], name, value)

    return start, do


def sets_an_fp8_weight():
    weight = Float8Weight.from_values(values((4, 8), 1), "delayed")
    return FusedAdam([torch.nn.Parameter(weight)]), values((4, 8), 9)


def initializes(options, do):
    def start():
        optimizer = made({**options, "makes_states": "stepped"})
        params = params_of(optimizer)
        params[1].grad = torch.ones_like(params[1])
        optimizer.step()
        return optimizer, params[0]

    return start, do


def assigns_masters(optimizer, masters):
    optimizer.master_weights = masters


def masters_to_assign():
    optimizer = made(MASTER)
    train(optimizer, 1)
    return optimizer, [torch.zeros(shape) for shape in SHAPES]


ATTACKED = {
    "load": loads(MASTER),
    "load_remainders": loads(REMAINDERS),
    "load_scaled": loads(FP16_FP8),
    "load_scaled_masters": loads(FP16_MASTER),
    "load_capturable": loads(MASTER, capturable=True),
    "load_torchs": loads(FP16_FP8, torchs),
    "load_external_masters": (loads_into_external_masters, FusedAdam.load_state_dict),
    "add_param_group": adds_a_group(),
    "add_param_group_capturable": adds_a_group(capturable=True),
    "set_moment": sets(MASTER, "exp_avg"),
    "set_missing_moment": sets(MASTER, "exp_avg", after=0),
    "set_scaled_moment": sets(FP16_FP8, "exp_avg"),
    "set_scaled_master": sets(FP16_MASTER, "master_param"),
    "set_joined_master": sets(REMAINDERS, "master_param"),
    "set_weight": sets({}, "master_param"),
    "set_fp32_weight": sets({}, "master_param", FP32),
    "set_scale": sets(FP16_FP8, "exp_avg_scale", shape=(1,)),
    "master_weights": (masters_to_assign, assigns_masters),
}
ONLY_OPERATIONS = {
    "initialize_state": initializes(FP16_FP8, FusedAdam.initialize_state),
    "initialize_states": initializes(FP16_FP8, lambda o, _: o.initialize_states()),
    "set_fp8_weight": (
        sets_an_fp8_weight,
        lambda o, value: o.set_scaled_state(params_of(o)[0], "master_param", value),
    ),
}
"""Between the lines of these another one of several states may be made or not."""

# --- the attacks


def failures(start, do, fail, stride):
    """Lets so many more get through before another fails, until all do; how many failed."""
    done, given = start()
    do(done, given)
    for allowed in range(0, 6000, stride):
        optimizer, given = start()
        before, was_given = Before(optimizer), copied(given)
        try:
            with fail(allowed):
                do(optimizer, given)
        except Injected as error:
            if not is_done(optimizer, done):
                before.assert_same()
            assert_same(copied(given), was_given, str(error))
        else:
            assert_same(snapshot(optimizer), snapshot(done))
            if do is not FusedAdam.add_param_group:  # which takes what it is given
                assert_same(copied(given), was_given)
            return allowed
    raise AssertionError("it never gets through")


def is_done(optimizer, done):
    """Whether the failure came after the change: all of it was made."""
    try:
        assert_same(snapshot(optimizer), snapshot(done))
    except AssertionError:
        return False
    return True


def some_or_all(some):
    """Some points of failure; among the slow tests every one."""
    return pytest.mark.parametrize(
        "stride", [some, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
    )


COMPUTING = {**ATTACKED, **ONLY_OPERATIONS}
for name in ("add_param_group", "master_weights"):
    del COMPUTING[name]


@pytest.mark.thirds
@some_or_all(11)
@pytest.mark.parametrize(("start", "do"), COMPUTING.values(), ids=COMPUTING)
def test_an_operation_that_fails_changes_nothing(start, do, stride):
    assert failures(start, do, Failing, stride) > 0


@pytest.mark.thirds
@some_or_all(121)
@pytest.mark.parametrize(("start", "do"), ATTACKED.values(), ids=ATTACKED)
@pytest.mark.sample(2)
def test_a_line_that_fails_changes_nothing(start, do, stride):
    """As where somebody stops a notebook's cell."""
    assert failures(start, do, failing_line, stride) > 10


# --- hooks


def test_a_pre_hook_that_raises_changes_nothing():
    optimizer, saved = loads(MASTER)[0]()

    def hook(optimizer, state_dict):
        state_dict["param_groups"] = []
        raise Injected

    optimizer.register_load_state_dict_pre_hook(hook)
    before, was_saved = Before(optimizer), copied(saved)
    with pytest.raises(Injected):
        optimizer.load_state_dict(saved)
    before.assert_same()
    assert_same(copied(saved), was_saved)


def test_a_post_hook_that_raises_comes_after_the_load():
    optimizer, saved = loads(MASTER)[0]()
    expected, _ = loads(MASTER)[0]()
    expected.load_state_dict(saved)

    def hook(optimizer):
        raise Injected

    optimizer.register_load_state_dict_post_hook(hook)
    with pytest.raises(Injected):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), snapshot(expected))


# --- what cannot be written


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("step", [2**31 - 1, 2**31, 2**63, 10**400])
def test_a_step_count_that_no_int32_holds_is_refused(step, capturable):
    optimizer, saved = loads(MASTER, capturable=capturable)[0]()
    saved["param_groups"][0]["step"] = step
    before = Before(optimizer)
    with pytest.raises(ValueError, match=r"group 0: step must be a whole number from 0 to 21474"):
        optimizer.load_state_dict(saved)
    before.assert_same()
    saved["param_groups"][0]["step"] = 2**31 - 2
    optimizer.load_state_dict(saved)
    train(optimizer, 1)
    assert int(optimizer.param_groups[0]["step"]) == 2**31 - 1


def inference_copy(tensor):
    with torch.inference_mode():
        return tensor.clone()


def expanded(tensor):
    return tensor[:1].expand(5)


UNWRITABLE = {
    "inference": (inference_copy, "must be a tensor that may be written, got .*inference_mode"),
    "expanded": (expanded, r"must have memory of its own for each element, got strides \(0,\)"),
}


@pytest.mark.parametrize(("bad", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_external_masters_that_cannot_be_written_are_refused(bad, message):
    """The last of four: those before it stay as they are."""
    where = r"master_weights\[3\] for parameter 3 of group 0 "
    optimizer, saved = loads_into_external_masters()
    masters = optimizer.master_weights
    unwritable = [*masters[:3], bad(torch.zeros(5))]
    before = Before(optimizer, masters)
    with pytest.raises(ValueError, match=where + message):
        optimizer.master_weights = unwritable
    before.assert_same()
    masters[3] = unwritable[3]
    before = Before(optimizer, masters)
    for change in (lambda: optimizer.load_state_dict(saved), optimizer.initialize_states):
        with pytest.raises(ValueError, match=where + message):
            change()
        before.assert_same()
    with pytest.raises(ValueError, match=where + message):
        FusedAdam(parameters(), master_weights=unwritable)


class Unwritable(torch.Tensor):
    """What no check knows: it fails when it is written."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and type(args[0]) is cls:
            raise RuntimeError("this one cannot be written")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_external_master_that_fails_leaves_those_before_it():
    optimizer, saved = loads_into_external_masters()
    masters = optimizer.master_weights
    masters[3] = torch.zeros(5).as_subclass(Unwritable)
    before = Before(optimizer, masters)
    with pytest.raises(RuntimeError, match="this one cannot be written"):
        optimizer.load_state_dict(saved)
    before.assert_same()


@pytest.mark.parametrize(
    ("name", "replaced", "change"),
    [
        ("exp_avg", "exp_avg", inference_copy),
        ("exp_avg", "exp_avg_scale", inference_copy),
        ("master_param", "master_param", inference_copy),
        ("exp_avg", "exp_avg", expanded),
        ("master_param", "master_param", expanded),
    ],
)
def test_a_value_set_into_a_state_that_cannot_be_written_changes_nothing(name, replaced, change):
    """The weight neither, which a remainder is a part of."""
    optimizer = FusedAdam(parameters([(5,)]), **{**REMAINDERS, "exp_avg_dtype": torch.float16})
    train(optimizer, 1)
    (param,) = params_of(optimizer)
    optimizer.state[param][replaced] = change(optimizer.state[param][replaced])
    before = Before(optimizer)
    with pytest.raises(
        ValueError,
        match=f"state '{replaced}' must (be a tensor that may be|have memory of its own)",
    ):
        optimizer.set_scaled_state(param, name, values((5,), 3))
    before.assert_same()


# --- groups; those that are refused: test_errors.py


def test_a_group_that_was_taken_is_the_dict_that_was_given():
    """As with torch's optimizers: who holds it can change it."""
    optimizer = FusedAdam(parameters(SHAPES[:2]))
    group = {"params": parameters([(7,)])}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group


def test_a_value_for_a_tensor_that_is_no_parameter_makes_no_state():
    optimizer = FusedAdam(parameters([(5,)]))
    for foreign in (torch.zeros(5), "weight", None):
        with pytest.raises(ValueError, match="param must be a parameter of this optimizer, got"):
            optimizer.set_scaled_state(foreign, "exp_avg", torch.zeros(5))
        with pytest.raises(ValueError, match="param must be a parameter of this optimizer, got"):
            optimizer.initialize_state(foreign)
    assert len(optimizer.state) == 0


def test_a_refused_initialize_state_makes_no_entry():
    params = parameters([(5,), (4,)])
    optimizer = FusedAdam(params, master_weights=[torch.zeros(5), torch.zeros(4)])
    optimizer.master_weights[1] = torch.zeros(3)
    for param in params:
        with pytest.raises(ValueError, match=r"master_weights\[1\]"):
            optimizer.initialize_state(param)
    assert len(optimizer.state) == 0


def test_a_parameter_that_stands_in_a_group_twice_is_refused():
    """It would be stepped twice, by kernels at once."""
    (param,) = parameters([(3,)])
    message = "group 0: each parameter must be there once, got one at 0 and 1"
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=message):
        FusedAdam([param, param])
    optimizer = FusedAdam(parameters())
    before = Before(optimizer)
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="once"):
        optimizer.add_param_group({"params": [param, param]})
    before.assert_same()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(MASTER, id="fp32 masters"),
        pytest.param(FP16_FP8, id="scales", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_failed_before_its_launch_can_be_taken_again(options):
    """The tables that a launch reads are as new as the addresses, whatever failed on the way."""
    retried = 0
    for allowed in range(20):
        optimizer, unhurt = (made({**options, "backend": "triton"}) for _ in range(2))
        for each in (optimizer, unhurt):
            train(each, 1)
            give_gradients(params_of(each), 9)
        before = Before(optimizer)
        with Failing(allowed), pytest.raises(Injected):
            optimizer.step()
        try:
            before.assert_same()
        except AssertionError:
            break  # the kernel had begun
        for each in (optimizer, unhurt):
            each.step()
            train(each, 1, first=4)
        assert_same(snapshot(optimizer), snapshot(unhurt))
        retried += 1
    assert retried >= 4
