"""TRL's SFTTrainer, private: texts and prompts with completions, adapters, resumed."""

from __future__ import annotations

import pytest
import torch

from dpscope.errors import UserError
from tests.unit.transformers.small_training import PRIVACY, VOCABULARY, assert_same, logged, small_llama, weights

pytest.importorskip("trl")

import peft
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from dpscope.transformers import PrivateSFTConfig, PrivateSFTTrainer
from dpscope.transformers.steps import sample_losses

SPECIAL = {"<pad>": 0, "<eos>": 1}


def tokenizer():
    words = {**SPECIAL, **{f"w{number}": number for number in range(len(SPECIAL), VOCABULARY)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def texts(samples=48):
    lengths = torch.randint(2, 7, (samples,), generator=torch.Generator().manual_seed(0)).tolist()
    return [" ".join(f"w{2 + (start + place) % 30}" for place in range(length)) for start, length in enumerate(lengths)]


def sft_trainer(folder, *, data=None, model=None, **changed):
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "data_seed": 3,
        "save_strategy": "no",
        "max_length": 16,
        **PRIVACY,
        **changed.pop("settings", {}),
    }
    return PrivateSFTTrainer(
        model=small_llama() if model is None else model,
        args=PrivateSFTConfig(**settings),
        train_dataset=Dataset.from_dict({"text": texts()} if data is None else data),
        processing_class=tokenizer(),
        **changed,
    )


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_lora_with_a_target_is_stopped_and_resumed_as_if_it_had_not_been(tmp_path):
    target = {"target_epsilon": 2.0, "noise_multiplier": None}
    torch.manual_seed(0)
    whole = sft_trainer(tmp_path / "whole", settings=target, peft_config=lora())
    start = weights(whole.model)
    whole.train()
    moved = {name for name, value in weights(whole.model).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name}
    torch.manual_seed(0)
    saving = {**target, "save_strategy": "steps", "save_steps": 2}
    sft_trainer(tmp_path / "cut", settings=saving, peft_config=lora()).train()
    torch.manual_seed(0)
    resumed = sft_trainer(tmp_path / "cut", settings=target, peft_config=lora())
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert_same(weights(resumed.model), weights(whole.model), tolerance=0)
    assert resumed.get_epsilon() == whole.get_epsilon() <= 2.0


def test_the_loss_is_that_of_the_completion_alone_where_there_are_prompts(tmp_path):
    words = [text.split() for text in texts()]
    data = {"prompt": [line[0] for line in words], "completion": [" " + " ".join(line[1:]) for line in words]}
    trainer = sft_trainer(tmp_path, data=data)
    batch = next(iter(trainer.get_train_dataloader()))
    assert all(row[0] == -100 for row in batch["labels"].tolist())
    trainer.train()
    assert logged(trainer, "epsilon")[-1] == trainer.get_epsilon()


def test_losses_are_those_of_the_model_for_each_sample_alone(tmp_path):
    trainer = sft_trainer(tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"]
    rest = {name: value for name, value in batch.items() if name != "labels"}
    losses = sample_losses(trainer.model, trainer.model(**rest), labels)
    for row in range(4):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        assert losses[row].item() == pytest.approx(trainer.model(**alone).loss.item(), rel=1e-5)


@pytest.mark.parametrize("setting", ["packing", "padding_free"])
def test_what_puts_samples_into_one_row_is_refused_before_the_data_are_prepared(tmp_path, setting):
    with pytest.raises(UserError, match=f"{setting}=True cannot be private"):
        sft_trainer(tmp_path, settings={setting: True})


def test_evaluation_is_trls_own(tmp_path):
    data = Dataset.from_dict({"text": texts(8)})
    trainer = sft_trainer(tmp_path, settings={"eval_strategy": "steps", "eval_steps": 2}, eval_dataset=data)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 2
    assert logged(trainer, "eval_mean_token_accuracy")
