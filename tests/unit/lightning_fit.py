"""A small module for Lightning, its data, and a private fit of both."""

from __future__ import annotations

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dpscope.lightning import PrivateTraining
from tests.unit.flash.private_training import make_data, make_model, sgd


class Classifier(lightning.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.net = make_model()
        self.count = optimizers

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("evaluated", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizers = [sgd(self.net) for _ in range(self.count)]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
        return optimizers, schedulers


def trainer(folder, **changed):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = {"default_root_dir": str(folder), "max_epochs": 2, "enable_checkpointing": False, **quiet}
    return lightning.Trainer(**{**settings, **changed})


def private(seed=1, **changed):
    noise = {"noise_multiplier": 1.0} if "target_epsilon" not in changed else {}
    generator = torch.Generator().manual_seed(seed)
    return PrivateTraining(max_grad_norm=0.5, target_delta=1e-5, noise_generator=generator, **noise, **changed)


def loader(seed=3):
    return DataLoader(make_data(), batch_size=16, generator=torch.Generator().manual_seed(seed))
