import pytest
import torch
from how_to import everything
from runs import assert_same

from megaopt import FusedAdam


def plain_loop(how_to):
    """No GradScaler: the loss times its first scale, a power of two, and gradients by that."""
    model, scale = how_to.build_model(), 2.0**16
    optimizer = FusedAdam(model.parameters(), **how_to.OPTIONS)
    for step in range(how_to.STEPS):
        optimizer.zero_grad()
        (how_to.loss_of(model, how_to.batch_of(step)) * scale).backward()
        for param in model.parameters():
            param.grad /= scale
        # as the script's warmup: a quarter to all in three steps
        optimizer.param_groups[0]["lr"] = RATES[min(step, 3)]
        optimizer.step(clip_norm=0.5)
    return model, optimizer


RATES = [0.0025, 0.005, 0.0075, 0.01]


def test_the_loop_has_the_bits_of_one_without_a_scaler(how_to, straight):
    found, expected = straight[0], plain_loop(how_to)
    assert_same(dict(found[0].state_dict()), dict(expected[0].state_dict()))
    assert_same(found[1].state_dict()["state"], expected[1].state_dict()["state"])


def test_resumed_is_straight(how_to, straight, tmp_path):
    run, folder = straight
    resumed = how_to.main(["--folder", str(tmp_path), "--resume", str(folder / "step-3.pt")])
    assert [file.name for file in tmp_path.iterdir()] == ["step-6.pt"]
    assert_same(everything(*resumed), everything(*run))


def moments(model, optimizer):
    return [
        {name: optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")}
        for param in model.parameters()
    ]


def test_from_torch_and_back(how_to):
    model = how_to.build_model()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.2)
    how_to.loss_of(model, how_to.batch_of(0)).backward()
    theirs.step()
    ours = how_to.from_torch(model, theirs)
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["step"]) == (0.003, 0.2, 1)
    assert_same(moments(model, ours), moments(model, theirs))
    ours.step()
    back = how_to.to_torch(model, ours)
    assert_same(moments(model, back), moments(model, ours))
    assert {int(own["step"]) for own in back.state.values()} == {2}
    assert back.param_groups[0]["lr"] == 0.003
    back.step()


def test_other_moments_need_another_way_than_a_state_dict(how_to, straight):
    (model, optimizer), _ = straight
    found = how_to.in_bf16(model, optimizer)
    rounded = [
        {name: moment.bfloat16() for name, moment in own.items()}
        for own in moments(model, optimizer)
    ]
    assert_same(moments(model, found), rounded)
    assert found.param_groups[0]["step"] == how_to.STEPS
    with pytest.raises(ValueError, match=r"format of 'exp_avg' in the state dict .*'bfloat16'"):
        found.load_state_dict(optimizer.state_dict())


def test_masters_go_along_where_the_page_sets_them(how_to):
    model = how_to.build_model().bfloat16()
    moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    old = FusedAdam(model.parameters(), dtype=torch.float32, **how_to.OPTIONS)
    new = FusedAdam(model.parameters(), dtype=torch.float32, **moments, **how_to.OPTIONS)
    how_to.loss_of(model, how_to.batch_of(0)).backward()
    old.step()
    new.load_state_dict(old.to_torch_state_dict(drop_masters=True))
    for param in model.parameters():
        new.set_scaled_state(param, "master_param", old.get_unscaled_state(param, "master_param"))
    for param in model.parameters():
        assert_same(new.state[param]["master_param"], old.state[param]["master_param"])
        assert not torch.equal(new.state[param]["master_param"], param.float())
    new.step()
