"""Arguments of private training, and which settings of the Trainer are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments

from dpscope.errors import UserError
from dpscope.privacy_budget import PrivacyBudget


def _argument(default: Any, help_text: str) -> Any:
    """Return a field with its help, for `HfArgumentParser`."""
    return field(default=default, metadata={"help": help_text})


@dataclass
class PrivacyArguments:
    """Privacy settings beside `TrainingArguments`: `target_epsilon` or `noise_multiplier`, and δ.

    The clipping bound C is `TrainingArguments.max_grad_norm`, which here bounds each sample's gradient.

    Args:
        target_epsilon: ε that the whole run may spend; the noise follows from it.
        target_delta: δ of that ε, below 1 / number of samples.
        noise_multiplier: Noise of a step divided by C, instead of `target_epsilon`.
        clipping: Name of the clipping rule, as in `make_private`.
        logical_batch_size: Expected samples of a step over all processes. Default: `per_device_train_batch_size` ×
            `gradient_accumulation_steps` × processes.
        pad_batches: Give all physical batches one size. Default: only for `torch_compile` and FSDP.
        accountant: Opacus's accountant: "rdp", "prv" or "gdp".
        noise_seed: Seed of repeatable noise, for experiments. Anyone who knows it can remove the noise.

    Example:
        >>> from dpscope.transformers import PrivacyArguments
        >>> privacy = PrivacyArguments(target_epsilon=3.0, target_delta=1e-5)
    """

    target_epsilon: float | None = _argument(None, "ε that the whole run may spend; the noise follows from it.")
    target_delta: float | None = _argument(None, "δ at which ε is told; below 1 / number of samples.")
    noise_multiplier: float | None = _argument(None, "Noise of a step divided by C, instead of target_epsilon.")
    clipping: str = _argument("flat", "The clipping rule, as of make_private.")
    logical_batch_size: int | None = _argument(
        None,
        "Expected samples of a step over all processes; otherwise per_device_train_batch_size × "
        "gradient_accumulation_steps × processes.",
    )
    pad_batches: bool | None = _argument(
        None, "Give all physical batches one size; by default only for torch_compile and FSDP."
    )
    accountant: str = _argument("rdp", "Opacus's accountant: rdp, prv or gdp.")
    noise_seed: int | None = _argument(
        None, "Repeatable noise, for experiments: anyone who knows the seed can take the noise off."
    )

    def budget(self, accountant: Any, max_grad_norm: float, samples: int) -> PrivacyBudget:
        """Return what the run may spend; raise UserError if the privacy arguments are missing or make no sense."""
        if self.target_delta is None:
            raise UserError(
                f"private training needs target_delta, the δ of (ε, δ): with {samples} samples give less than "
                f"{1 / samples:.1g}, such as target_delta={0.1 / samples:.0e}"
            )
        if max_grad_norm is None or not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
            raise UserError(
                f"max_grad_norm={max_grad_norm} is the bound on each sample's gradient here (C), and must be above 0: "
                "leave it at 1.0 or give another number"
            )
        if self.logical_batch_size is not None and self.logical_batch_size < 1:
            raise UserError(f"logical_batch_size must be at least 1, not {self.logical_batch_size}")
        noise = {"target_epsilon": self.target_epsilon, "noise_multiplier": self.noise_multiplier}
        budget = PrivacyBudget(accountant, delta=self.target_delta, **noise)
        budget.doubt_delta(samples)
        return budget


@dataclass
class PrivateTrainingArguments(PrivacyArguments, TrainingArguments):
    """`TrainingArguments` with the fields of `PrivacyArguments`, for `HfArgumentParser`.

    Args:
        **kwargs: Fields of `TrainingArguments` and of `PrivacyArguments`.

    Example:
        >>> from dpscope.transformers import PrivateTrainingArguments
        >>> args = PrivateTrainingArguments(output_dir="out", target_epsilon=3.0, target_delta=1e-5)
    """


PRIVACY_FIELDS = tuple(each.name for each in fields(PrivacyArguments))


def take_privacy(args: Any, keywords: dict[str, Any]) -> PrivacyArguments:
    """Take the privacy arguments out of a trainer's keywords; those that are not there come from its `args`."""
    given = {name: getattr(args, name) for name in PRIVACY_FIELDS if hasattr(args, name)}
    given |= {name: keywords.pop(name) for name in PRIVACY_FIELDS if name in keywords}
    return PrivacyArguments(**given)


def _names(value: Any) -> str:
    return str(getattr(value, "value", value))


# Why a setting that is on is refused, and what to do instead.
REFUSED_SETTINGS = {
    "fp16": "torch's loss scaling hides the size of gradients from clipping: use bf16=True, or neither",
    "group_by_length": "private training draws each sample independently (Poisson sampling): leave out group_by_length "
    "and train_sampling_strategy",
    "packing": "packing puts several samples into one row, which is then clipped as one: leave it out (packing=False)",
    "padding_free": "it flattens the batch into one row, and samples cannot be told apart: leave it out",
    "loss_type": "this loss is not one of each sample by itself: use loss_type='nll', or override sample_losses",
    "auto_find_batch_size": "it would start training anew after steps that already spent privacy: choose "
    "per_device_train_batch_size (it changes only memory, not the result)",
    "accelerator_config": "num_steps of gradient_accumulation_kwargs would add up whole draws: use "
    "gradient_accumulation_steps, which makes draws larger",
    "deepspeed": "DeepSpeed reduces gradients before they can be clipped: use DDP or FSDP2 with torchrun",
    "parallelism_config": "tensor, context and sequence parallelism split samples: use DDP or FSDP2 with torchrun",
    "fsdp": "FSDP1 flattens parameters of several layers into one: use fsdp_config={'version': 2}",
    "use_liger_kernel": "its kernels give no gradients of single samples: leave it out",
    "optim": "this optimizer takes its step inside backward, or looks at gradients before noise: use adamw_torch or "
    "another optimizer with an ordinary step",
    "dataloader_in_order": "batches that overtake each other cannot be resumed: leave it True",
    "ignore_data_skip": "a resumed run would draw the same samples again, and draws have to be independent: leave it "
    "out (draws that were trained on are left out without reading them)",
    "n_gpu": "several GPUs in one process (nn.DataParallel) split each batch unseen: start one process a GPU with "
    "torchrun, or show one GPU with CUDA_VISIBLE_DEVICES=0",
    "hub_strategy": "checkpoints tell which samples were drawn, which weakens the privacy that ε promises: use "
    "hub_strategy='every_save' or 'end'",
    "torch_compile": "compiled models cannot be trained privately over several processes: leave out torch_compile",
    "ddp_static_graph": "a static graph of DDP keeps its own reduction of gradients: leave it out",
    "neftune_noise_alpha": "its noise depends on the length of the longest sample in the batch: leave it out",
    "activation_offloading": "activations that are moved away cannot be measured for clipping: use "
    "gradient_checkpointing=True",
}


def _accumulates(config: Any) -> bool:
    options = getattr(config, "gradient_accumulation_kwargs", None) or {}
    return int(options.get("num_steps") or 1) > 1


# When a setting is on, where that is more than a value that is true.
_IS_ON: dict[str, Callable[[Any], Any]] = {
    "group_by_length": lambda args: (
        getattr(args, "group_by_length", False)
        or _names(getattr(args, "train_sampling_strategy", "random")) != "random"
    ),
    "accelerator_config": lambda args: _accumulates(getattr(args, "accelerator_config", None)),
    "loss_type": lambda args: getattr(args, "loss_type", None) not in (None, "nll", "chunked_nll"),
    "fsdp": lambda args: args.fsdp and int((args.fsdp_config or {}).get("version", 2)) != 2,
    "optim": lambda args: any(word in _names(args.optim) for word in ("lomo", "layerwise", "apollo", "galore")),
    "dataloader_in_order": lambda args: not getattr(args, "dataloader_in_order", True),
    "n_gpu": lambda args: args.n_gpu > 1,
    "hub_strategy": lambda args: args.push_to_hub and "checkpoint" in _names(args.hub_strategy),
    "torch_compile": lambda args: args.torch_compile and args.world_size > 1,
}


def refuse_settings(args: Any) -> None:
    """Raise UserError, with a sentence, for the first setting that private training cannot have."""
    for name, why in REFUSED_SETTINGS.items():
        value = getattr(args, name, None)
        if _IS_ON[name](args) if name in _IS_ON else value:
            raise UserError(f"{name}={_names(True if value is None else value)} cannot be private: {why}")


def refuse_data(dataset: Any) -> int:
    """Raise UserError for data that cannot be sampled by Poisson; return the number of samples."""
    if dataset is None:
        raise UserError("private training needs train_dataset: ε depends on the number of samples")
    if isinstance(dataset, torch.utils.data.IterableDataset) or not isinstance(dataset, Sized) or len(dataset) == 0:
        raise UserError(
            "train_dataset has no length, or no samples: Poisson sampling draws samples by their number; use a dataset "
            "with a length (of a streamed one, load or index it first)"
        )
    return len(dataset)
