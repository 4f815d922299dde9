import pytest
import torch
from how_to import everything, mean_of_two_ranks, run_ranks, script
from runs import assert_same


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    # the script makes folders that are missing
    straight = tmp_path_factory.mktemp("straight") / "not" / "there"
    resumed = tmp_path_factory.mktemp("resumed")
    resume = ["--folder", str(resumed), "--resume", str(straight / "step-3.pt")]
    run_ranks("ddp", [["--folder", str(straight)], resume])
    return straight, resumed


def load(folder, name):
    saved = torch.load(folder / name)
    return {"model": dict(saved["model"]), "optimizer": saved["optimizer"]}


def test_ranks_have_the_bits_of_a_plain_loop(folders):
    straight, _ = folders
    expected = everything(*mean_of_two_ranks(script("ddp")))
    assert_same(load(straight, "step-6.pt"), expected)
    assert_same(load(straight, "step-6-rank-1.pt"), expected)


def test_resumed_is_straight(folders):
    straight, resumed = folders
    assert_same(load(resumed, "step-6.pt"), load(straight, "step-6.pt"))
    assert not (resumed / "step-3.pt").exists()
