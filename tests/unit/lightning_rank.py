"""One rank of a private fit by Lightning."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit.lightning_fit import Classifier, loader, private, trainer


def main(folder: str) -> None:
    module, callback = Classifier(), private()
    spread = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    fit = trainer(folder, callbacks=[callback], **spread)
    fit.fit(module, loader())
    resumed, again = Classifier(), private(seed=2)
    fit.save_checkpoint(Path(folder) / "two.ckpt")
    fit = trainer(folder, callbacks=[again], **spread, max_epochs=3)
    fit.fit(resumed, loader(), ckpt_path=Path(folder) / "two.ckpt")
    weights = [weight.detach() for weight in module.parameters()]
    everyone: list[list[torch.Tensor]] = [weights, weights]
    dist.all_gather_object(everyone, weights)
    if fit.is_global_zero:
        state = {"weights": everyone, "epsilon": callback.get_epsilon(), "resumed": again.state_dict()["history"]}
        torch.save(state, Path(folder) / "two.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a rank may abort when gloo is taken down
