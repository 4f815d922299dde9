"""Lightning's callbacks that change an optimizer's groups or average weights, and their resumes."""

import importlib.util
import warnings

import pytest
import torch
from runs import assert_same

from megaopt import FusedAdam, FusedMuon

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
    # Lightning 2.6 asks for a class that torch 2.13 deprecates
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
KINDS = {"adam": (FusedAdam, {"dtype": torch.float32}), "muon": (FusedMuon, {"lr": 0.01})}
EPOCHS = 4


def model_of(kind):
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

        def configure_optimizers(self):
            params = [param for param in self.parameters() if param.requires_grad]
            make, options = KINDS[kind]
            return make(params, **options)

        def training_step(self, batch, _):
            return self.head(self.body(batch)).square().mean()

    return Model()


def callbacks_of(name):
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging

    class Unfreezing(BaseFinetuning):
        """The body is trained from the second epoch on, in a group of its own."""

        def freeze_before_training(self, module):
            self.freeze(module.body)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.005)

        def on_train_start(self, trainer, module):
            if trainer.current_epoch > 1:  # after a resume Lightning leaves it frozen
                self.make_trainable(module.body)

    if name == "averaging":
        return StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2)
    return Unfreezing()


def trained(kind, name, folder, epochs, resume=None):
    """Weights, and the optimizer's state dict, after so many epochs."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.manual_seed(1)
    data = torch.utils.data.DataLoader([torch.randn(8) for _ in range(8)], batch_size=4)
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    model = model_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about this small run
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=[callbacks_of(name), saving],
            **dict.fromkeys(quiet, False),
        )
        trainer.fit(model, data, ckpt_path=resume)
    return dict(model.state_dict()), trainer.optimizers[0].state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["finetuning", "averaging"])
def test_resumed_is_straight(kind, name, tmp_path):
    weights, state = trained(kind, name, tmp_path / "straight", EPOCHS)
    resume = str(tmp_path / "straight" / "epoch=1.ckpt")
    found, back = trained(kind, name, tmp_path / "resumed", EPOCHS, resume)
    assert_same(found, weights)
    assert_same(back["state"], state["state"])
    assert [group["lr"] for group in back["param_groups"]] == [
        group["lr"] for group in state["param_groups"]
    ]
    if name == "finetuning":
        assert len(state["param_groups"]) == 2
