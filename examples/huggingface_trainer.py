"""Hugging Face's Trainer with flash clipping: a Trainer whose loader, loss and optimizer are private.

    pip install transformers accelerate
    python examples/huggingface_trainer.py

What Trainer does by itself that private training must not inherit, and what is done here about each:

| Trainer                                                | here                                                       |
| ------------------------------------------------------ | ---------------------------------------------------------- |
| shuffles and cuts the data into batches                | `get_train_dataloader` gives the Poisson loader             |
| divides the loss by all tokens of the batch            | `compute_loss`: mean over each sample's tokens, then over   |
|                                                        | samples; otherwise one sample's length scales the others    |
| clips the summed gradient (`max_grad_norm=1.0`)        | `max_grad_norm=0`: clipping is each sample's                |
| accumulates (`gradient_accumulation_steps`)            | 1: a Poisson batch is a whole step. For large batches use   |
|                                                        | an ordinary loop, see gradient_accumulation.py              |
| moves to several GPUs, compiles, scales float16 losses | one device, fp32 or bf16                                    |
"""

import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dpscope.flash import PrivacyEngine

VOCABULARY, LONGEST, PADDING = 32, 12, -100
EPOCHS, BATCH = 2, 32


class Counting(Dataset):
    """Sequences of different lengths that count upwards from a random start."""

    def __init__(self, samples: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.starts = torch.randint(VOCABULARY, (samples,), generator=generator).tolist()
        self.lengths = torch.randint(4, LONGEST + 1, (samples,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.starts[index] + torch.arange(self.lengths[index])) % VOCABULARY


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padded to the longest there is, not to the longest of the batch: a sample looks the same in any company."""
    ids = torch.zeros(len(samples), LONGEST, dtype=torch.long)
    labels = torch.full((len(samples), LONGEST), PADDING)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = labels[row, : len(sample)] = sample
    return {"input_ids": ids, "attention_mask": (labels != PADDING).long(), "labels": labels}


class PrivateTrainer(Trainer):
    """Trains on `private_loader` with a loss that is the mean over samples of each sample's own loss."""

    def __init__(self, *args, private_loader: DataLoader, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        assert self.args.gradient_accumulation_steps == 1
        assert self.args.max_grad_norm == 0
        self.private_loader = private_loader
        self.model_accepts_loss_kwargs = False  # no division by the tokens of the whole batch

    def get_train_dataloader(self) -> DataLoader:
        return self.private_loader

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].transpose(1, 2)
        losses = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="none").sum(1)
        losses = losses / (labels != PADDING).sum(1).clamp(min=1)  # (B,)
        loss = losses.sum() / max(len(losses), 1)  # an empty Poisson batch has a loss of 0, not NaN
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LONGEST,
            n_embd=32,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    ).train()
    privacy_engine = PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data_loader=DataLoader(Counting(), batch_size=BATCH, collate_fn=collate),
        noise_multiplier=0.7,
        max_grad_norm=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=EPOCHS,
                max_grad_norm=0,
                gradient_accumulation_steps=1,
                lr_scheduler_type="linear",
                logging_steps=4,
                save_strategy="no",
                report_to=[],
                remove_unused_columns=False,
                disable_tqdm=True,
                use_cpu=True,
            ),
            optimizers=(optimizer, None),
            private_loader=loader,
        )
        trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    steps = sum(count for _, _, count in privacy_engine.accountant.history)
    assert steps == trainer.state.global_step == EPOCHS * len(loader), "every step of the Trainer is accounted for"
    assert losses[-1] < losses[0], "private training should have learned something"
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} private steps")
    print(f"ε = {privacy_engine.get_epsilon(delta=1e-5):.2f} at δ = 1e-5")


if __name__ == "__main__":
    main()
