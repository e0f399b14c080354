"""Private training with Lightning: one callback.

pip install lightning
python examples/lightning_module.py
"""

import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.lightning import PrivateTraining

warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.losses: list[float] = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0)


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x @ torch.randn(16, 4, generator=generator)).argmax(1)), batch_size=64)


def fit(module, callback, *, epochs: int, folder: str, resume: Path | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader(), ckpt_path=resume)
    return trainer


def main() -> None:
    torch.manual_seed(0)
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "target_delta": 1e-5}
    with tempfile.TemporaryDirectory() as folder:
        module, private = Classifier(), PrivateTraining(**privacy)
        trainer = fit(module, private, epochs=4, folder=folder)
        trainer.save_checkpoint(Path(folder) / "saved.ckpt")
        resumed = PrivateTraining(**privacy)
        fit(Classifier(), resumed, epochs=6, folder=folder, resume=Path(folder) / "saved.ckpt")
    assert sum(module.losses[-8:]) < sum(module.losses[:8]), "private training should have learned something"
    assert resumed.privacy_engine.accountant.history == [(1.0, 1 / 8, 48)], "a checkpoint knows what was spent"
    print(f"loss {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
    print(f"saved at ε = {private.get_epsilon():.2f}, resumed to ε = {resumed.get_epsilon():.2f} at δ = 1e-5")


if __name__ == "__main__":
    main()
