"""Hugging Face's Trainer, private: LoRA to ε = 3, stopped half-way and resumed.

    pip install transformers accelerate peft
    python examples/huggingface_trainer.py

An ordinary Trainer script with one import changed (PrivateTrainer) and three arguments for privacy. Batches of 32
samples are run 8 at a time. docs/trainer.md says which settings of the Trainer work.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dpscope.transformers import PrivateTrainer as Trainer

VOCABULARY, LONGEST, PADDING = 32, 12, -100


class Counting(Dataset):
    """Sequences of different lengths that count upwards from a random start."""

    def __init__(self, samples: int = 256, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(VOCABULARY, (samples,), generator=generator).tolist()
        self.lengths = torch.randint(4, LONGEST + 1, (samples,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": (self.starts[index] + torch.arange(self.lengths[index])) % VOCABULARY}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch."""
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, PADDING)}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))


def make_trainer(folder: Path) -> Trainer:
    return Trainer(
        model=make_model(),
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            learning_rate=2e-2,
            logging_steps=8,
            eval_strategy="epoch",
            save_strategy="epoch",
            data_seed=1,  # for this comparison: draws are random otherwise, as they should be
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Counting(),
        eval_dataset=Counting(64, seed=1),
        data_collator=collate,
        target_epsilon=3.0,
        target_delta=1e-4,
        noise_seed=2,  # likewise
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = make_trainer(folder / "whole")
        trainer.train()
        resumed = make_trainer(folder / "whole")
        resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-16"))

    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    steps = sum(count for _, _, count in trainer.privacy_engine.accountant.history)
    assert steps == trainer.state.global_step == 32, "every step of the Trainer is accounted for"
    assert losses[-1] < losses[0], "private training should have learned something"
    assert resumed.get_epsilon() == trainer.get_epsilon() <= 3.0
    ours, theirs = trainer.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours), "as if the run had not been stopped"
    print(f"evaluation loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} private steps")
    print(f"resumed at step 16: the same weights, and ε = {resumed.get_epsilon():.2f} at δ = 1e-4")


if __name__ == "__main__":
    main()
