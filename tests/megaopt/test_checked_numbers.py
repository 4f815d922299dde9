"""Numbers of groups are checked in every step that could see others than the last check."""

import pytest
import torch
from runs import parameters, train

from megaopt import FusedAdam, FusedSGD

BAD = {
    "lr": -1.0,
    "eps": float("nan"),
    "betas": (0.9, 1.0),
    "weight_decay": -0.1,
    "bias_correction": 2,
    "step": -1,
}


@pytest.mark.parametrize("name", BAD)
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
