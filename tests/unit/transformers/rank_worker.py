"""One rank of a private Trainer, and the same training by one process."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

from tests.unit.transformers.small_training import LOGICAL, PHYSICAL, logged, private_trainer, weights

STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def sharded_settings(state_dict: str) -> dict[str, Any]:
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {
        "fsdp": True,
        "fsdp_config": {**layers, "state_dict_type": state_dict},
        "save_strategy": "steps",
        "save_steps": 2,
    }


def shard_on_the_cpu() -> None:
    """Accelerate shards models on GPUs alone; have it take the CPU for one."""
    make = accelerate.state.AcceleratorState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        plugin = options.get("fsdp_plugin") or self._shared_state.get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    accelerate.state.AcceleratorState.__init__ = init


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in weights(model).items()
    }


def resume(folder: str, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Train on from the checkpoint of another trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was set by the training loop")
        resumed = private_trainer(folder, settings=settings)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return whole_weights(resumed.model), resumed.get_epsilon()


def main(folder: str, parallel: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    accelerate.state.AcceleratorState._reset_state(True)  # this process may be a copy of one that was alone
    settings: dict[str, Any] = {"gradient_accumulation_steps": LOGICAL // PHYSICAL // world}
    if world > 1:
        settings["ddp_backend"] = "gloo"
    if parallel == "fsdp":
        shard_on_the_cpu()
        settings |= sharded_settings(STATE_DICTS[0])
    trainer = private_trainer(folder, settings=settings)
    trainer.train()
    state = {
        "weights": whole_weights(trainer.model),
        "history": trainer.privacy_engine.accountant.history,
        "losses": logged(trainer, "loss"),
        "sharded": any(hasattr(parameter, "full_tensor") for parameter in trainer.model.parameters()),
    }
    if parallel == "fsdp":
        state |= {"epsilon": trainer.get_epsilon(), "resumed": {}}
        for kind in STATE_DICTS:
            settings |= sharded_settings(kind)
            if kind != STATE_DICTS[0]:
                private_trainer(folder, settings=settings).train()
            state["resumed"][kind] = resume(folder, settings)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(state, Path(folder) / f"{parallel}.pt")
    if world > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # a rank may abort when gloo is taken down
