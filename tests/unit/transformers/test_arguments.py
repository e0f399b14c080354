"""Settings of the Trainer that people use: each works, or is refused with a sentence when the trainer is made.

docs/trainer.md has the table of both.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, HfArgumentParser, Trainer

from dpscope.errors import UserError
from dpscope.transformers import PrivateTrainer, PrivateTrainerMixin, PrivateTrainingArguments
from dpscope.transformers.arguments import REFUSED_SETTINGS, refuse_settings
from dpscope.transformers.steps import sample_losses
from tests import ROOT
from tests.torch_here import takes_compiled
from tests.unit.transformers.small_training import (
    Counting,
    arguments,
    assert_same,
    collate,
    logged,
    private_trainer,
    small_llama,
    weights,
)

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 2}


@functools.cache
def baseline():
    """Weights after four private steps with nothing but the usual settings."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = private_trainer(folder)
        trainer.train()
        return weights(trainer.model)


# Settings that must not change a step: after four of them the weights are those of the baseline.
UNCHANGED = {
    "eval_strategy": EVALUATED,
    "eval_on_start": {**EVALUATED, "eval_on_start": True},
    "save_strategy": SAVED,
    "save_total_limit": {**SAVED, "save_total_limit": 1},
    "save_only_model": {**SAVED, "save_only_model": True},
    "load_best_model_at_end": {
        **EVALUATED,
        **SAVED,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_steps_per_second",  # of some checkpoint; its weights are those of that step
        "save_total_limit": 3,
    },
    "per_device_train_batch_size": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "remove_unused_columns": {"remove_unused_columns": True},
    "dataloader_num_workers": {"dataloader_num_workers": 1},
    "dataloader_persistent_workers": {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 3,
    },
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "gradient_checkpointing_kwargs": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "seed": {"seed": 7},
    "logging_steps": {"logging_steps": 2, "logging_first_step": True},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": True},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 1},
    "dataloader_drop_last": {"dataloader_drop_last": True},
}
MARKS = dict.fromkeys(("dataloader_num_workers", "dataloader_persistent_workers"), (pytest.mark.slow,))
MARKS["torch_compile"] = (pytest.mark.slow, takes_compiled)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in UNCHANGED])
def test_a_setting_that_is_not_about_steps_leaves_them_as_they_are(tmp_path, name):
    trainer = private_trainer(tmp_path, settings=UNCHANGED[name])
    trainer.train()
    assert trainer.state.global_step == 4
    if name != "load_best_model_at_end":
        assert_same(weights(trainer.model), baseline())
    assert sum(steps for *_, steps in trainer.privacy_engine.accountant.history) == 4


# Settings that change steps: what they should show.
CHANGED = {
    "num_train_epochs": ({"max_steps": -1, "num_train_epochs": 1}, lambda t: t.state.global_step == 3),
    "lr_scheduler_type": (
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        lambda t: logged(t, "learning_rate")[0] == 0 and logged(t, "learning_rate")[2] == 1e-2,
    ),
    "optim": ({"optim": "adafactor"}, lambda t: "Adafactor" in type(t._optimizer.original_optimizer).__name__),
    "weight_decay": ({"weight_decay": 0.1}, lambda t: t._optimizer.param_groups[0]["weight_decay"] == 0.1),
    "max_grad_norm": ({"max_grad_norm": 0.1}, lambda t: t._optimizer.max_grad_norm == 0.1),
    "bf16": ({"bf16": True}, lambda t: all(p.dtype == torch.float32 for p in t.model.parameters())),
    "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, lambda t: t._losses[0].dim() == 1),
    "data_seed": ({"data_seed": 11}, lambda t: t._loader.batch_sampler.seed == 11),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_of_steps_is_heeded(tmp_path, name):
    settings, holds = CHANGED[name]
    trainer = private_trainer(tmp_path, settings=settings)
    trainer.train()
    assert holds(trainer)
    assert any(not torch.equal(value, baseline()[key]) for key, value in weights(trainer.model).items())
    assert all(torch.isfinite(value).all() for value in weights(trainer.model).values())


def test_metrics_of_evaluation_are_those_of_the_ordinary_trainer(tmp_path):
    def compute_metrics(prediction):
        return {"right": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    trainer = private_trainer(tmp_path, settings=EVALUATED, compute_metrics=compute_metrics)
    trainer.train()
    ordinary = Trainer(
        model=copy.deepcopy(trainer.model),
        args=arguments(tmp_path),
        eval_dataset=trainer.eval_dataset,
        data_collator=trainer.data_collator,
        compute_metrics=compute_metrics,
    ).evaluate()
    assert logged(trainer, "eval_right")[-1] == ordinary["eval_right"]
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(ordinary["eval_loss"], rel=1e-5)


def test_callbacks_stop_training_and_epsilon_is_that_of_the_steps_taken(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.0}
    settings = {**EVALUATED, **SAVED, **best, "max_steps": 40}
    trainer = private_trainer(tmp_path, settings=settings, callbacks=[EarlyStoppingCallback(1)])
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.privacy_engine.accountant.history == [(1.0, 1 / 3, 4)]


def test_an_optimizer_and_a_scheduler_of_ones_own_are_made_private(tmp_path):
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = private_trainer(tmp_path, model=model, optimizers=(optimizer, scheduler))
    trainer.train()
    assert trainer._optimizer.original_optimizer is optimizer
    assert logged(trainer, "learning_rate") == pytest.approx([0.5, 0.5, 0.05, 0.05])


class ScheduleFree(torch.optim.SGD):
    """Refuses a step outside of train mode, as schedule-free optimizers do; their weights are others in evaluation."""

    mode = "eval"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"

    def step(self, closure=None):
        assert self.mode == "train"
        return super().step(closure)


def test_an_optimizer_that_knows_evaluation_is_told_of_it(tmp_path):
    model = small_llama()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    trainer = private_trainer(tmp_path, model=model, optimizers=(optimizer, None), settings=EVALUATED)
    trainer.train()
    assert optimizer.mode == "eval"


def make_llama():
    return small_llama()


def test_a_model_that_is_made_anew_for_each_training_shares_the_accountant(tmp_path):
    trainer = PrivateTrainer(
        model_init=make_llama,
        args=arguments(tmp_path),
        train_dataset=Counting(),
        data_collator=private_trainer(tmp_path).data_collator,
        noise_multiplier=1.0,
        target_delta=1e-3,
    )
    trainer.train()
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert trainer.privacy_engine.accountant.history[0][2] == 8


def test_a_loss_of_ones_own_gives_one_loss_for_each_sample(tmp_path):
    def of_samples(outputs, labels, num_items_in_batch=None):
        return sample_losses(model, outputs, labels)

    model = small_llama()
    trainer = private_trainer(tmp_path, model=model, compute_loss_func=of_samples)
    trainer.train()
    assert_same(weights(trainer.model), baseline())
    mean = private_trainer(tmp_path, compute_loss_func=lambda *args, **also: of_samples(*args).mean())
    with pytest.raises(UserError, match="compute_loss_func has to give one loss for each sample"):
        mean.train()


def test_overridden_losses_that_are_not_one_for_each_sample_are_refused(tmp_path):
    class Mean(PrivateTrainer):
        def sample_losses(self, model, inputs):
            return super().sample_losses(model, inputs).mean()

    with pytest.raises(UserError, match="sample_losses has to give one loss for each sample"):
        private_trainer(tmp_path, kind=Mean).train()


def test_privacy_arguments_can_be_fields_of_the_training_arguments(tmp_path):
    parser = HfArgumentParser(PrivateTrainingArguments)
    line = f"--output_dir {tmp_path} --target_epsilon 2 --target_delta 1e-3 --use_cpu --max_steps 2 --report_to none"
    (args,) = parser.parse_args_into_dataclasses(line.split())
    trainer = private_trainer(tmp_path, args=args, noise_multiplier=None, target_delta=1e-3)
    trainer.train()
    assert 1.9 < trainer.get_epsilon() <= 2.0


def usual(**changed):
    """Arguments of any trainer, as they are by default."""
    names = {
        **dict.fromkeys(("fp16", "auto_find_batch_size", "push_to_hub", "torch_compile", "ignore_data_skip"), False),
        **dict.fromkeys(("deepspeed", "parallelism_config", "fsdp", "fsdp_config", "neftune_noise_alpha")),
        **{
            "use_liger_kernel": False,
            "optim": "adamw_torch",
            "n_gpu": 1,
            "hub_strategy": "every_save",
            "world_size": 1,
        },
    }
    return SimpleNamespace(**{**names, **changed})


REFUSALS = {
    "fp16": {"fp16": True},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "packing": {"packing": True},
    "padding_free": {"padding_free": True},
    "loss_type": {"loss_type": "dft"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "accelerator_config": {"accelerator_config": SimpleNamespace(gradient_accumulation_kwargs={"num_steps": 4})},
    "deepspeed": {"deepspeed": "zero3.json"},
    "parallelism_config": {"parallelism_config": object()},
    "fsdp": {"fsdp": "full_shard", "fsdp_config": {"version": 1}},
    "use_liger_kernel": {"use_liger_kernel": True},
    "optim": {"optim": "adalomo"},
    "dataloader_in_order": {"dataloader_in_order": False},
    "ignore_data_skip": {"ignore_data_skip": True},
    "n_gpu": {"n_gpu": 2},
    "hub_strategy": {"push_to_hub": True, "hub_strategy": "all_checkpoints"},
    "torch_compile": {"torch_compile": True, "world_size": 2},
    "ddp_static_graph": {"ddp_static_graph": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "activation_offloading": {"activation_offloading": True},
}


def test_usual_settings_are_not_refused():
    refuse_settings(usual())


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_a_setting_that_cannot_be_private_is_refused_by_name(name):
    with pytest.raises(UserError, match=f"^{name}=.* cannot be private: .*: "):
        refuse_settings(usual(**REFUSALS[name]))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True cannot be private"),
        ({"train_sampling_strategy": "group_by_length"}, "draws each sample independently"),
        ({"optim": "lomo"}, "optim=lomo cannot be private"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "would add up whole draws"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 is the bound on each sample's gradient"),
    ],
)
def test_a_trainer_is_not_made_with_such_a_setting(tmp_path, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        private_trainer(tmp_path, settings=settings)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"noise_multiplier": None}, "needs one of target_epsilon and noise_multiplier"),
        ({"target_epsilon": 2.0, "noise_multiplier": 1.0}, "needs one of target_epsilon and noise_multiplier"),
        ({"target_epsilon": -1.0}, "target_epsilon must be a number, above 0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be a number, 0 or more"),
        ({"target_delta": None}, "needs target_delta.* give less than 0.02"),
        ({"target_delta": 2.0}, "target_delta must be between 0 and 1"),
        ({"logical_batch_size": 0}, "logical_batch_size must be at least 1"),
        ({"train_dataset": None}, "needs train_dataset"),
    ],
)
def test_privacy_that_is_not_said_is_asked_for(tmp_path, changed, sentence):
    with pytest.raises(UserError, match=sentence):
        private_trainer(tmp_path, **changed)


def test_a_target_that_no_noise_reaches_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no noise reaches target_epsilon=0.0001 .* give a larger target_epsilon"):
        private_trainer(tmp_path, target_epsilon=1e-4).train()


def test_a_delta_that_promises_little_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"target_delta=0.5 is not below 1 / 48 samples.* such as 2e-03"):
        private_trainer(tmp_path, target_delta=0.5)


def test_a_frozen_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is nothing to train"):
        private_trainer(tmp_path, model=small_llama().requires_grad_(False))


def test_streamed_data_are_refused(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from Counting()

    with pytest.raises(UserError, match="Poisson sampling draws samples by their number"):
        private_trainer(tmp_path, train_dataset=Stream())


def test_an_overridden_compute_loss_is_refused(tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, *args, **keywords):
            return super().compute_loss(*args, **keywords)

    with pytest.raises(UserError, match="override sample_losses"):
        private_trainer(tmp_path, kind=Own)


def test_a_trainer_with_a_loss_of_its_own_is_refused(tmp_path):
    class Preferences(Trainer):
        def compute_loss(self, *args, **keywords):
            return 0.0

    class Private(PrivateTrainerMixin, Preferences):
        pass

    with pytest.raises(UserError, match=r"Preferences has a compute_loss of its own, .*: override sample_losses"):
        private_trainer(tmp_path, kind=Private)


def test_labels_whose_loss_is_not_known_are_refused(tmp_path):
    with pytest.raises(UserError, match="the labels are start_positions and end_positions: override sample_losses"):
        private_trainer(tmp_path, settings={"label_names": ["start_positions", "end_positions"]})


def test_labels_may_have_another_name(tmp_path):
    def renamed(samples):
        batch = collate(samples)
        return {**batch, "target": batch.pop("labels")}

    trainer = private_trainer(tmp_path, settings={"label_names": ["target"]}, data_collator=renamed)
    trainer.train()
    assert_same(weights(trainer.model), baseline())


def test_a_router_loss_is_refused(tmp_path):
    model = small_llama()
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="the router loss of experts is one of the whole batch"):
        private_trainer(tmp_path, model=model)


def test_a_search_of_hyperparameters_is_refused(tmp_path):
    with pytest.raises(UserError, match="each spends ε"):
        private_trainer(tmp_path).hyperparameter_search()


def test_the_logical_batch_can_be_given(tmp_path):
    trainer = private_trainer(tmp_path, logical_batch_size=24)
    trainer.train()
    assert trainer.privacy_engine.accountant.history == [(1.0, 1 / 2, 4)]


def test_the_table_in_the_docs_names_every_setting():
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    for name in (*UNCHANGED, *CHANGED, *REFUSED_SETTINGS):
        assert f"`{name}" in page, name
