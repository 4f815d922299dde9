import pytest
import torch
from how_to import everything, needs
from runs import assert_same

pytestmark = [
    needs("lightning"),
    # Lightning 2.6 asks for a class that torch 2.13 deprecates
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # the resumed run writes into a folder of its own
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def plain_loop(how_to, muon=False):
    model = how_to.Model(muon).bfloat16()
    made = model.configure_optimizers()
    optimizer, warmup = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for _ in range(how_to.EPOCHS):
        for batch in how_to.batches():
            rows = batch.bfloat16()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model.layers(rows), rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
    return everything(model, optimizer)


def test_lightning_has_the_bits_of_a_plain_loop(how_to, straight):
    model, _ = straight
    assert_same(everything(model, model.optimizers().optimizer), plain_loop(how_to))


def test_lightning_steps_matrices_by_muon(how_to, tmp_path):
    model = how_to.main(["--folder", str(tmp_path), "--muon"])
    optimizer = model.optimizers().optimizer
    assert [each.rule for each in optimizer.describe()] == ["muon", "adamw", "adamw", "adamw"]
    assert_same(everything(model, optimizer), plain_loop(how_to, muon=True))


def test_resumed_is_straight(how_to, straight, tmp_path):
    model, folder = straight
    resume = str(folder / "epoch=0.ckpt")
    resumed = how_to.main(["--folder", str(tmp_path), "--resume", resume])
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=1.ckpt"]
    assert_same(*(everything(m, m.optimizers().optimizer) for m in (resumed, model)))
