"""capturable=True: lr and step live on the device, and no bit of a run is another."""

import copy

import pytest
import torch
from bits import assert_same_bits
from handling import assert_same_numbers, both_backends, copy_weights, refused, train_all
from runs import (
    FORMATS,
    MASTER,
    assert_same,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR

from megaopt import FusedAdam

BACKENDS = ["reference", "triton"]
SHAPES = [(3, 4), (5,), (0,), (), (7,), (2, 2)]


def groups():
    """Three groups with numbers of their own, one of them empty."""
    params = parameters(SHAPES)
    return [
        {"params": params[:3], "lr": 0.02, "weight_decay": 0.1},
        {"params": []},
        {"params": params[3:], "betas": (0.5, 0.75), "bias_correction": False, "eps": 1e-4},
    ]


def made(options, capturable=True, **others):
    return FusedAdam(groups(), capturable=capturable, **{**others, **options})


def plain(options, **others):
    return made(options, capturable=False, **others)


def test_lr_and_step_are_tensors_of_the_documented_kind():
    optimizer = made(MASTER)
    train(optimizer, 2)
    for group, lr in zip(optimizer.param_groups, (0.02, 1e-3, 1e-3), strict=True):
        assert_same_bits(group["lr"], torch.tensor(lr))
        assert_same_bits(group["step"], torch.tensor([2], dtype=torch.int32))
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda own: LambdaLR(own, [lambda step: 1 / (step + 1)] * 3),
        lambda own: ExponentialLR(own, 0.7),
        lambda own: CosineAnnealingLR(own, 5),
    ],
    ids=["lambda", "exponential", "cosine"],
)
@both_backends
def test_a_scheduler_writes_into_the_tensors(backend, schedule):
    """torch computes with fp32 tensors then; the plain run is given what it made of them."""
    found, expected = made(MASTER, backend=backend), plain(MASTER, backend="reference")
    tensors, seen = [group["lr"] for group in found.param_groups], []
    scheduler = schedule(found)
    for step in range(6):
        seen.append(float(tensors[0]))
        for ours, theirs in zip(found.param_groups, expected.param_groups, strict=True):
            theirs["lr"] = float(ours["lr"])
        train_all((found, expected), 1, first=step)
        scheduler.step()
    assert [id(group["lr"]) for group in found.param_groups] == [id(each) for each in tensors]
    assert len(set(seen)) == 6 or isinstance(scheduler, CosineAnnealingLR)
    assert_same(snapshot(found)["weights"], snapshot(expected)["weights"])
    assert_same(snapshot(found)["states"], snapshot(expected)["states"])


def test_a_tensor_for_lr_stays_the_same_object():
    lr = torch.tensor(0.25)
    optimizer = FusedAdam(groups()[1:], lr=lr, capturable=True)
    assert all(group["lr"] is lr for group in optimizer.param_groups)
    optimizer.add_param_group({"params": parameters([(9,)])})
    train(optimizer, 2)
    assert all(group["lr"] is lr for group in optimizer.param_groups)
    lr.fill_(0.0)  # what the user writes is what the step reads
    before = copy.deepcopy(snapshot(optimizer)["weights"])
    train(optimizer, 1, first=2)
    assert_same(snapshot(optimizer)["weights"], before)


@pytest.mark.parametrize(
    "lr", [torch.tensor(0.1, dtype=torch.float64), torch.tensor(1), 1], ids=str
)
def test_another_number_for_lr_becomes_such_a_tensor(lr):
    optimizer = FusedAdam(parameters(), lr=lr, capturable=True)
    assert_same_bits(optimizer.param_groups[0]["lr"], torch.tensor(float(lr)))
    assert optimizer.defaults["lr"] is lr


@pytest.mark.sample(2)
@both_backends
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "lr",
            0.5,
            r"lr must be a torch.float32 tensor .*got 0\.5.*group\['lr'\]\.fill_",
        ),
        ("lr", torch.tensor(0.5, dtype=torch.float64), r"lr must be .*got tensor\(0\.5"),
        ("lr", torch.ones(2), r"lr must be .*got .* of shape \(2,\)"),
        ("lr", torch.ones((), device="meta"), r"lr must be .*on cpu .*on meta; to change it"),
        ("step", 3, r"step must be a torch.int32 tensor of shape \(1,\) on cpu .*got 3"),
        ("step", torch.tensor([3]), r"step must be .*got tensor\(\[3\]\)"),
        ("eps", -1.0, r"eps must be a finite number >= 0 in fp32, got -1\.0"),
        ("betas", (0.9, 1.0), r"betas\[1\] must be .*, got 1\.0"),
    ],
    ids=str,
)
def test_what_is_assigned_to_a_group_is_checked(backend, name, value, message):
    optimizer = made(MASTER, backend=backend)
    train(optimizer, 1)
    good = optimizer.param_groups[2][name]
    optimizer.param_groups[2][name] = value
    give_gradients(params_of(optimizer), 1)
    weights, states = (copy.deepcopy(snapshot(optimizer)[part]) for part in ("weights", "states"))
    with pytest.raises(ValueError, match="group 2: " + message):
        optimizer.step()
    assert_same([snapshot(optimizer)[part] for part in ("weights", "states")], [weights, states])
    optimizer.param_groups[2][name] = good
    expected = plain(MASTER, backend="reference")
    train(expected, 2)
    optimizer.step()
    assert_same_numbers(optimizer, expected)


def test_parameters_on_several_devices_are_refused():
    here, elsewhere = parameters([(3,)]), [torch.nn.Parameter(torch.ones(3, device="meta"))]
    message = r"parameters must be on one device with capturable=True, got them on cpu, meta"
    with pytest.raises(ValueError, match=message):
        FusedAdam([*here, *elsewhere], capturable=True, backend="reference")
    optimizer = FusedAdam(here, capturable=True, backend="reference")
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": elsewhere})
    assert len(optimizer.param_groups) == 1


@both_backends
def test_a_group_added_later_counts_from_its_own_start(backend):
    found, expected = (
        FusedAdam(groups()[:1], capturable=capturable, backend=each, **MASTER)
        for capturable, each in ((True, backend), (False, "reference"))
    )
    for optimizer in (found, expected):
        train(optimizer, 2)
        optimizer.add_param_group({"params": parameters([(9,), (130,)]), "lr": 0.5})
        train(optimizer, 2, first=2)
    assert_same_numbers(found, expected)
    assert [int(group["step"]) for group in found.param_groups] == [4, 2]


@both_backends
def test_without_parameters_steps_are_counted(backend):
    optimizer = FusedAdam([{"params": []}], capturable=True, backend=backend)
    optimizer.step()
    assert int(optimizer.param_groups[0]["step"]) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize(("backend", "backend_after"), [BACKENDS, BACKENDS[::-1]])
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", ["remainders", "fp16_master_bf16_fp16"])
def test_resumed_is_straight(name, before, after, backend, backend_after):
    options = FORMATS[name]
    source = made(options, before, backend=backend)
    train(source, 3)
    straight = plain(options, backend="reference")
    train(straight, 5)
    resumed = made(options, after, backend=backend_after)
    copy_weights(source, resumed)
    resumed.load_state_dict(source.state_dict())
    kinds = [(type(group["lr"]), type(group["step"])) for group in resumed.param_groups]
    assert kinds == [(torch.Tensor, torch.Tensor) if after else (float, int)] * 3
    train(source, 1, first=3)  # which must not reach what was loaded
    train(resumed, 2, first=3)
    assert_same_numbers(resumed, straight)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "step",
            torch.tensor([-1], dtype=torch.int32),
            r"group 0: step must be a whole .*got .*-1",
        ),
        ("step", torch.ones(2), r"group 0: step must be a whole number .* of shape \(2,\)"),
        ("lr", torch.tensor(-0.5), r"group 0: lr must be a finite number .*got .*-0\.5"),
    ],
    ids=str,
)
@pytest.mark.parametrize("capturable", [True, False])
def test_a_bad_tensor_in_a_state_dict_is_refused(capturable, name, value, message):
    source, target = made(MASTER), made(MASTER, capturable)
    train(source, 1)
    saved = source.state_dict()
    saved["param_groups"][0] = {**saved["param_groups"][0], name: value}
    with refused(target, message):
        target.load_state_dict(saved)


def test_torchs_and_transformer_engines_capturable_state_dicts_load():
    """torch keeps fp32 steps with the parameters, TransformerEngine int32 ones with the groups."""
    param = parameters([(5,)], torch.float32)[0]
    state = {"exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    theirs = {
        "torch": ({**state, "step": torch.tensor(4.0)}, {**group, "capturable": True}),
        "te": (state, {**group, "step": torch.tensor([4], dtype=torch.int)}),
    }
    for name, (saved, saved_group) in theirs.items():
        for capturable in (True, False):
            optimizer = FusedAdam([copy.deepcopy(param)], capturable=capturable)
            packed = {"state": {0: saved}, "param_groups": [{**saved_group, "params": [0]}]}
            optimizer.load_state_dict(packed)
            (own,) = optimizer.param_groups
            assert (float(own["lr"]), int(own["step"])) == (0.5, 4), name
            train(optimizer, 1)
            assert int(own["step"]) == 5
