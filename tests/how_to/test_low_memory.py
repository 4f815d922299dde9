import torch
from how_to import everything, plain_loop
from runs import assert_same

from megaopt.saving import checkpoint


def test_the_run_has_the_bits_of_a_plain_loop(how_to, straight):
    assert_same(everything(*straight[0]), plain_loop(how_to))


def test_resumed_is_straight(how_to, straight, tmp_path):
    run, folder = straight
    resumed = how_to.main(["--folder", str(tmp_path), "--resume", str(folder / "step-3.pt")])
    assert_same(everything(*resumed), everything(*run))
    assert_same(checkpoint.load(tmp_path / "weights.pt"), checkpoint.load(folder / "weights.pt"))


def test_seven_bytes_and_no_gradients(how_to, straight):
    """Of weights that are cast: weight, master and moments; and the masters' values in a file."""
    (model, optimizer), folder = straight
    weights = checkpoint.load(folder / "weights.pt")
    for name, param in model.named_parameters():
        assert param.grad is None
        assert_same(weights[name], optimizer.get_unscaled_state(param, "master_param"))
        if param.dtype == torch.bfloat16:
            tensors = [param, *optimizer.state[param].values()]
            assert sum(tensor.element_size() for tensor in tensors) == 7
            assert not torch.equal(weights[name], param.float())
