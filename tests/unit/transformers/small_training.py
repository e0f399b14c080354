"""A tiny language model, sequences of different lengths, and a private trainer of both."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, TrainingArguments

from dpscope.transformers import PrivateTrainer
from tests.tiny_models.hugging_face import MODELS

VOCABULARY, LONGEST, IGNORED = 32, 10, -100
SAMPLES, PHYSICAL, LOGICAL = 48, 4, 16

warnings.filterwarnings("ignore", message="Secure RNG turned off")
warnings.filterwarnings("ignore", message="Optimal order is the")


class Counting(Dataset[dict[str, Any]]):
    """Sequences that count upwards; `name` is a column that no model takes."""

    def __init__(self, samples: int = SAMPLES, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (samples,), generator=generator).tolist()
        lengths = torch.randint(3, LONGEST + 1, (samples,), generator=generator).tolist()
        self.rows = [(start + torch.arange(length)) % VOCABULARY for start, length in zip(starts, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "name": f"sample {index}"}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch, as Hugging Face's collators do."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = sample["input_ids"]
    return {"input_ids": ids, "attention_mask": (labels != IGNORED).long(), "labels": labels}


def small_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    return MODELS["Llama"].build(vocab_size=VOCABULARY, **settings, use_cache=False, **options)


def arguments(folder: Any, **changed: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": PHYSICAL,
        "gradient_accumulation_steps": LOGICAL // PHYSICAL,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "data_seed": 3,
    }
    return TrainingArguments(**{**settings, **changed})


PRIVACY = {"noise_multiplier": 1.0, "target_delta": 1e-3, "noise_seed": 5}


def private_trainer(
    folder: Any, *, model: Any = None, args: Any = None, kind: type[PrivateTrainer] = PrivateTrainer, **changed: Any
) -> PrivateTrainer:
    """`changed`: privacy arguments, and keywords of the Trainer; settings of `TrainingArguments` under `settings`."""
    settings = changed.pop("settings", {})
    given = {"train_dataset": Counting(), "eval_dataset": Counting(8, seed=1), "data_collator": collate, **PRIVACY}
    if "target_epsilon" in changed:
        given["noise_multiplier"] = None
    model = small_llama() if model is None else model
    return kind(model=model, args=args or arguments(folder, **settings), **{**given, **changed})


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Tolerance: sums of the same terms in float32, in another order, through a few steps of AdamW."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]
