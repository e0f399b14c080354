"""`PrivateTrainer`: Hugging Face's Trainer whose steps are private. docs/trainer.md says what it does differently."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from dpscope.accelerate import PrivateAcceleratedOptimizer
from dpscope.batches import batch_size_of
from dpscope.errors import UserError
from dpscope.flash.opacus.privacy_engine import PrivacyEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.padding.rows import real_rows
from dpscope.transformers import draws
from dpscope.transformers.arguments import refuse_data, refuse_settings, take_privacy
from dpscope.transformers.steps import (
    FirstStep,
    PrivacyCallback,
    check_losses,
    noting_models,
    sample_losses,
    takes_cache,
    task_model,
)

HOOKS = ("_prepare_for_training", "_run_epoch", "_get_grad_norm")  # of the Trainer, of transformers 5
_OWN_LOSSES = "override sample_losses(model, inputs), and return one loss for each sample"
_Host: Any = object  # the Trainer that a subclass names beside the mixin


class PrivateTrainerMixin(_Host):
    """Mixin that makes a subclass of Hugging Face's Trainer private. It comes first among the bases.

    Args:
        model: The model, as for the Trainer.
        args: A `TrainingArguments`, or one with the fields of `PrivacyArguments`.
        *rest: Further arguments of the Trainer by position.
        **keywords: Further arguments of the Trainer, and fields of `PrivacyArguments`.

    Attributes:
        privacy_engine: The `dpscope.flash.PrivacyEngine`, with its accountant.

    Raises:
        UserError: A setting cannot be private, or a privacy argument is missing.

    Example:
        >>> from dpscope.transformers import PrivateTrainerMixin
        >>> class MyPrivateTrainer(PrivateTrainerMixin, Trainer):
        ...     def sample_losses(self, model, inputs):
        ...         return super().sample_losses(model, inputs) * 2
    """

    _optimizer: DPFlashOptimizer | None = None
    _loader: draws.DrawLoader | None = None
    _filters_losses = True
    _operations_each: float | None = None  # for each element of a batch

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **keywords: Any) -> None:
        self.privacy = take_privacy(args, keywords)
        if missing := [name for name in HOOKS if not hasattr(Trainer, name)]:
            raise UserError(
                f"private training needs transformers 5 or newer (this one has no {missing[0]}): upgrade it"
            )
        self._refuse_other_losses()
        accumulated = 1
        if args is not None:
            refuse_settings(args)
            accumulated = args.gradient_accumulation_steps
            args = copy.copy(args)
            args.gradient_accumulation_steps = 1  # a draw is a whole step, however many batches it is
            self._filters_losses = args.logging_nan_inf_filter
            args.logging_nan_inf_filter = False  # done here, without waiting for the device in every step
        super().__init__(model, args, *rest, **keywords)
        refuse_settings(self.args)
        samples = refuse_data(self.train_dataset)
        self.privacy_engine = PrivacyEngine(accountant=self.privacy.accountant)
        self.budget = self.privacy.budget(self.privacy_engine.accountant, self.args.max_grad_norm, samples)
        if isinstance(getattr(self.optimizer, "optimizer", self.optimizer), DPFlashOptimizer):
            raise UserError(
                "the optimizer is private already: give the trainer the ordinary one, and it is made private"
            )
        self._refuse_model()
        self.physical_batch_size = self.args.per_device_train_batch_size
        self.logical_batch_size = self.privacy.logical_batch_size or (
            self.physical_batch_size * accumulated * self.args.world_size
        )
        self._resumed: draws.PrivacyRecord | None = None
        self._first_step: FirstStep | None = None
        self._losses: list[Tensor] = []  # of the draw's samples
        self._norms: list[Tensor] = []  # of samples since the last log
        self._trainings = 0
        self.add_callback(PrivacyCallback(self))

    def _refuse_other_losses(self) -> None:
        """Raise UserError for losses that are not computed from each sample's labels, as in DPO or reward models."""
        owners = [kind for kind in type(self).__mro__ if "compute_loss" in vars(kind)]
        place = owners.index(PrivateTrainerMixin)
        hidden = [kind for kind in owners[place + 1 :] if kind.__name__ not in ("Trainer", "SFTTrainer")]
        if others := owners[:place] + ([] if self._has_own_losses else hidden):
            raise UserError(
                f"{others[0].__name__} has a compute_loss of its own, whose mean over the batch mixes samples: "
                f"{_OWN_LOSSES}"
            )

    def _refuse_model(self) -> None:
        """Raise UserError for a model that has nothing to train, or whose loss of each sample is not known."""
        if self.model_init is None and not any(each.requires_grad for each in self.model.parameters()):
            raise UserError(
                "all parameters of the model are frozen, so there is nothing to train: set requires_grad_(True) on "
                "some, or add an adapter (peft.get_peft_model)"
            )
        if getattr(getattr(task_model(self.model), "config", None), "output_router_logits", False):
            raise UserError(
                "the router loss of experts is one of the whole batch: set model.config.output_router_logits=False"
            )
        known = self._has_own_losses or self.compute_loss_func is not None
        if len(self.label_names) > 1 and "labels" not in self.label_names and not known:
            raise UserError(f"the labels are {' and '.join(self.label_names)}: {_OWN_LOSSES}")

    @property
    def _has_own_losses(self) -> bool:
        return type(self).sample_losses is not PrivateTrainerMixin.sample_losses

    # -- ε -----------------------------------------------------------------------------------------------------------

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return ε of all steps so far at δ = `delta`, by default `target_delta`."""
        return self.budget.epsilon(delta)

    def steps_left(self) -> int | None:
        """Return how many more steps the target ε allows; None without a target, or before training."""
        if self._optimizer is None:
            return None
        return self.budget.steps_left(self._optimizer.noise_multiplier, self._sample_rate)

    # -- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the data in batches of the logical size; training draws from it by Poisson sampling."""
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        workers = self.args.dataloader_num_workers
        return DataLoader(
            dataset,
            batch_size=self.logical_batch_size,
            collate_fn=partial(draws.collate_rows, collate),
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=workers > 0 and self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            generator=torch.Generator(),
        )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the next draw, and no number of tokens to divide by."""
        return list(islice(epoch_iterator, num_batches)), None

    def _prepare_input(self, data: Any) -> Any:
        """Move as the Trainer does, but do not wait for the device: its copy of pinned memory is ordered anyway."""
        if isinstance(data, Tensor) and self.args.device.type == "cuda":
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.logical_batch_size

    # -- becoming private --------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._resumed = (
            None if resume_from_checkpoint is None else draws.PrivacyRecord.load(Path(resume_from_checkpoint))
        )
        self._ordinary_loader = train_dataloader
        with noting_models(self.accelerator) as self._prepared_models:
            model, _ = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        assert self._optimizer is not None
        if self._resumed is not None:  # of sharded models the optimizer's state does not hold it
            self.budget.load_state_dict({"history": self._resumed.history})
        self.budget.require_left(self._optimizer.noise_multiplier, self._sample_rate)
        self.callback_handler.train_dataloader = self._loader
        return model, self._loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the model private, which by now is spread and compiled and has its optimizer. Return the scheduler."""
        prepared = self._prepared_models[-1] if self._prepared_models else self.model_wrapped
        if self._optimizer is None or not self._optimizer.engine.attached or self._private_model is not self.model:
            self._make_private(prepared, num_training_steps)
        assert self._loader is not None
        sampler: Any = self._loader.batch_sampler
        resumed = self._resumed
        sampler.seed = draws.new_seed(self.args.data_seed, self._trainings) if resumed is None else resumed.draw_seed
        self._trainings += 1
        return super().create_scheduler(num_training_steps, self.optimizer if optimizer is None else optimizer)

    def _make_private(self, model: nn.Module, steps: int) -> None:
        loader = self._ordinary_loader
        self._sample_rate = 1 / len(loader)
        noise = self._noise_multiplier(steps)
        seed = self.privacy.noise_seed
        accelerated = self.optimizer
        _, private, private_loader = self.privacy_engine.make_private(
            module=model,
            optimizer=accelerated.optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=self.args.max_grad_norm,
            clipping=self.privacy.clipping,
            noise_generator=None if seed is None else torch.Generator().manual_seed(seed),
            pad_batches=self.physical_batch_size if self._pads() else False,
        )
        private.resumes_noise = seed is not None
        for name in ("train", "eval"):  # of schedule-free optimizers, whose weights differ in evaluation
            if hasattr(private.original_optimizer, name):
                setattr(private, name, getattr(private.original_optimizer, name))
        self._optimizer = accelerated.optimizer = private
        accelerated.__class__ = PrivateAcceleratedOptimizer
        self._private_model = self.model
        self._first_step = FirstStep(private)
        self._loader = draws.loader_of_draws(private_loader, size=self.physical_batch_size)

    def _pads(self) -> bool:
        asked = self.privacy.pad_batches
        return bool(self.args.torch_compile or self.args.fsdp) if asked is None else asked

    def _noise_multiplier(self, steps: int) -> float:
        """Return the noise multiplier: of the resumed run, as given, or what the target ε needs for all steps."""
        if self._resumed is not None and self.privacy.noise_multiplier is None:
            if abs(self._resumed.sample_rate - self._sample_rate) > 1e-9:
                raise UserError(
                    f"the checkpoint's run drew samples with rate {self._resumed.sample_rate:.6g}, this one would with "
                    f"{self._sample_rate:.6g}: keep batch size and data, or give noise_multiplier, not target_epsilon"
                )
            return self._resumed.noise_multiplier
        return self.budget.noise_for(steps, self._sample_rate)

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a whole draw, physical batch by physical batch; the Trainer then takes the step."""
        optimizer = self._optimizer
        assert optimizer is not None
        if not isinstance(inputs, draws.StepDraw):
            raise UserError(
                "a batch did not come from the private loader: ε holds for its Poisson draws alone; give "
                "train_dataset, and leave out loaders of your own"
            )
        # What the Trainer does before each batch, once a draw: it takes milliseconds.
        if not model.training or self._first_step is not None:
            model.train()
        if callable(train := getattr(self.optimizer, "train", None)):  # of schedule-free optimizers
            train()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        optimizer.zero_grad()  # the Trainer clears p.grad alone where the model is compiled or spread
        self._losses = []
        for number, batch in enumerate(inputs, 1):
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(batch))
            self.accelerator.backward(loss)
            if self._first_step is not None:
                self._first_step.see_backward()
            if number < len(inputs):  # the physical batch is clipped and its sum kept; the draw goes on
                if not self._pads():  # a padded batch knows that
                    optimizer.signal_skip_step(do_skip=True)
                optimizer.step()
                optimizer.zero_grad()
                self._note_norms(optimizer)
        if self._losses:
            losses = torch.cat(self._losses)
            if self._filters_losses:
                losses = torch.where(losses.isfinite(), losses, torch.nan)
            return losses.nanmean() if self._filters_losses else losses.mean()
        usual: Tensor = self._tr_loss / max(1, self.state.global_step - self._globalstep_last_logged)
        return usual  # an empty draw: the average in the log stays

    def _note_norms(self, optimizer: DPFlashOptimizer) -> None:
        norms = optimizer.engine.norms
        if norms is not None and norms.numel():
            self._norms.append(norms.detach())

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean of the samples' own losses in training; the Trainer's own loss in evaluation."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        real = real_rows(inputs)
        losses = self.sample_losses(model, inputs)
        if self._has_own_losses:
            check_losses(losses, batch_size_of(inputs), "sample_losses")
        self._losses.append(losses.detach()[:real].float())
        return losses.sum() / max(len(losses), 1)

    def sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of each sample, (B,), given `model` and the batch `inputs`. Override it for your own loss.

        Row b may depend on sample b alone: average over its own tokens, never over those of the batch.
        """
        named = self.label_names[0] if len(self.label_names) == 1 else "labels"
        labels = inputs.get(named)
        rest = {name: value for name, value in inputs.items() if name != named}
        if labels is None and self.compute_loss_func is None:
            raise UserError(
                f"the batch has no labels, so the loss of each sample is not known: have the collator give {named!r} "
                f"(it gives {', '.join(inputs)}), or override sample_losses"
            )
        inner: Any = task_model(model)
        config = getattr(inner, "config", None)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" not in rest:
            rest["decoder_input_ids"] = inner.prepare_decoder_input_ids_from_labels(labels=labels)
        kind: Any = type(inner)
        if takes_cache(kind):
            rest.setdefault("use_cache", False)
        outputs = model(**rest)
        if self.compute_loss_func is None:
            assert labels is not None
            return sample_losses(model, outputs, labels, smoothing=self.args.label_smoothing_factor)
        losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        return check_losses(losses, batch_size_of(inputs), "compute_loss_func")

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return the operations of a draw. The Trainer counts the parameters each time; here they are counted once."""
        if not isinstance(inputs, draws.StepDraw):
            return super().floating_point_ops(inputs)
        name = getattr(self.model, "main_input_name", "input_ids")
        mains = [(batch, batch[name].numel()) for batch in inputs if name in batch and batch[name].numel()]
        if mains and self._operations_each is None:
            self._operations_each = float(super().floating_point_ops(mains[0][0])) / mains[0][1]
        return sum(elements for _, elements in mains) * (self._operations_each or 0.0)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs if isinstance(inputs, draws.StepDraw) else [inputs]:
            super()._track_num_input_tokens(batch)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing, because each sample's gradient was clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return nothing: `log` has the norms of samples."""

    # -- logs and checkpoints ----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *rest: Any, **keywords: Any) -> None:
        """Log as the Trainer does, and besides ε, the median of the samples' norms and the share that was clipped."""
        if "loss" in logs or "train_loss" in logs:
            logs["epsilon"] = self.get_epsilon()
        if "loss" in logs and self._norms:
            norms = torch.cat(self._norms)
            logs["grad_norm"] = norms.median().item()
            logs["clipped_samples"] = (norms > self.args.max_grad_norm).float().mean().item()
            self._norms = []
        super().log(logs, *rest, **keywords)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        with warnings.catch_warnings():
            # To load a sharded state, torch takes a step with gradients of 0 and a learning rate of 0.
            warnings.filterwarnings("ignore", message=".*was set by the training loop")
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save and self._optimizer is not None and self._loader is not None:
            sampler: Any = self._loader.batch_sampler
            accountant = self.privacy_engine.accountant
            record = draws.PrivacyRecord(
                history=list(accountant.history),
                mechanism=accountant.mechanism(),
                noise_multiplier=self._optimizer.noise_multiplier,
                sample_rate=self._sample_rate,
                draw_seed=sampler.seed,
            )
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            record.save(folder)

    def hyperparameter_search(self, *args: Any, **keywords: Any) -> Any:
        """Refuse, because every trial spends privacy on the same data, and the sum would not be counted."""
        raise UserError(
            "hyperparameter_search trains on the private data once for each trial, and each spends ε: train the trials "
            "one by one and add up their privacy, or search on public data"
        )


class PrivateTrainer(PrivateTrainerMixin, Trainer):
    """Hugging Face's `Trainer` whose steps are private.

    Args:
        model: The model, as for the Trainer.
        args: A `TrainingArguments` or `PrivateTrainingArguments`.
        *rest: Further arguments of the Trainer by position.
        **keywords: Further arguments of the Trainer, and fields of `PrivacyArguments`.

    Raises:
        UserError: A setting cannot be private, or a privacy argument is missing.

    Example:
        >>> from dpscope.transformers import PrivateTrainer
        >>> trainer = PrivateTrainer(
        ...     model=model, args=args, train_dataset=data, target_epsilon=3.0, target_delta=1e-5
        ... )
        >>> result = trainer.train()
        >>> print(trainer.get_epsilon() <= 3.0)
        True
    """
