"""TRL's SFTTrainer, private: prompts with completions, adapters, ε = 3.

pip install transformers accelerate peft trl datasets
python examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dpscope.transformers import PrivateSFTConfig as SFTConfig
from dpscope.transformers import PrivateSFTTrainer as SFTTrainer

NUMBERS = 30


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"n{number}": 2 + number for number in range(NUMBERS)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def make_data(samples: int = 192) -> Dataset:
    """A number, and the three that follow."""
    starts = [number % NUMBERS for number in range(samples)]
    following = [" ".join(f"n{(start + step) % NUMBERS}" for step in (1, 2, 3)) for start in starts]
    return Dataset.from_dict(
        {"prompt": [f"n{start}" for start in starts], "completion": [f" {text}" for text in following]}
    )


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                output_dir=folder,
                num_train_epochs=6,
                per_device_train_batch_size=12,
                gradient_accumulation_steps=4,
                learning_rate=3e-2,
                logging_steps=4,
                save_strategy="no",
                bf16=False,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                target_epsilon=3.0,
                target_delta=1e-4,
            ),
            train_dataset=make_data(),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
        )
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()

    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name}, "adapters move, and nothing else"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0], "private training should have learned something"
    assert trainer.get_epsilon() <= 3.0
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {len(moved)} adapter matrices trained")
    print(f"ε = {trainer.get_epsilon():.2f} at δ = 1e-4")


if __name__ == "__main__":
    main()
