import pytest
import torch
from how_to import everything, script
from runs import assert_same

from megaopt import FusedAdam
from megaopt.commands import checkpoint
from megaopt.integration.flashoptim import FlashAdamW


@pytest.fixture(scope="module")
def how_to():
    return script("low_memory")


@pytest.fixture(scope="module")
def straight(how_to, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "not" / "there"
    return *how_to.main(["--folder", str(folder)]), folder


def test_the_run_has_the_bits_of_a_plain_loop(how_to, straight):
    model, optimizer = how_to.build()
    for step in range(how_to.STEPS):
        optimizer.zero_grad()
        how_to.loss_of(model, step).backward()
        optimizer.step()
    assert_same(everything(*straight[:2]), everything(model, optimizer))


def test_resumed_is_straight(how_to, straight, tmp_path):
    *run, folder = straight
    resumed = how_to.main(["--folder", str(tmp_path), "--resume", str(folder / "step-3.pt")])
    assert_same(everything(*resumed), everything(*run))
    assert_same(checkpoint.load(tmp_path / "weights.pt"), checkpoint.load(folder / "weights.pt"))


def test_seven_bytes_and_no_gradients(how_to, straight):
    """Of weights that are cast: weight, master and moments; and the masters' values in a file."""
    model, optimizer, folder = straight
    weights = checkpoint.load(folder / "weights.pt")
    for name, param in model.named_parameters():
        assert param.grad is None
        assert_same(weights[name], optimizer.get_unscaled_state(param, "master_param"))
        if param.dtype == torch.bfloat16:
            tensors = [param, *optimizer.state[param].values()]
            assert sum(tensor.element_size() for tensor in tensors) == 7
            assert not torch.equal(weights[name], param.float())


@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (24, {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}),
        (32, {"dtype": torch.float32, "store_param_remainders": True}),
        (None, {"master_weights": False, "weight_rounding": "stochastic"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("quantize", [True, False])
def test_flashoptims_names_are_what_the_page_says(how_to, quantize, bits, options):
    def train(make):
        model, _ = how_to.build()
        optimizer = make(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            how_to.loss_of(model, step).backward()
            optimizer.step()
        return model

    found = train(lambda params: FlashAdamW(params, quantize=quantize, master_weight_bits=bits))
    moments = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"} if quantize else {}
    expected = train(lambda params: FusedAdam(params, weight_decay=0.01, **options, **moments))
    assert_same(dict(found.state_dict()), dict(expected.state_dict()))
