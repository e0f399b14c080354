"""Flash clipping for Opacus users: `opacus.PrivacyEngine` with another engine inside.

Training loops stay as they are. Accountants, the Poisson loader, BatchMemoryManager, checkpoints, noise and clip
schedulers are Opacus's own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.module_utils import clone_module
from opacus.validators.module_validator import ModuleValidator
from torch import nn
from torch.distributed import get_world_size
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from dpscope.errors import UserError
from dpscope.flash.combinations import MADE_UP_RANKS, PADDED_OPACUS, PADDED_ROWS
from dpscope.flash.engine import FlashEngine
from dpscope.flash.gradients.clip_rules import make_rule, options_of
from dpscope.flash.gradients.memory_budget import MemoryLimit, check_limit
from dpscope.flash.opacus.opacus_arguments import (
    FLASH,
    UnsupportedModelError,
    as_number,
    check_arguments,
    detach_previous,
    is_flash,
    is_valid,
    validate,
    warn_of_untrained,
)
from dpscope.flash.opacus.physical_batches import PhysicalBatches
from dpscope.flash.opacus.privacy_spent import Spending, continued, count_draws
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.padding.loader import PadBatches, pad_loader, unpadded
from dpscope.flash.ranks.ranks import refusing_together
from dpscope.flash.ranks.sampling import loader_of_rank
from dpscope.flash.sample_rows.forward_passes import BatchSizeOf
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.frames import require_module
from dpscope.flash.update.noise_source import used_keys_of

OPACUS_PREFIX = "_module."  # Opacus's wrapper keeps the model under this name, and so do its checkpoints
USED_NOISE_KEYS = "dpscope_used_noise_keys"  # in checkpoints of runs with a noise generator
# What make_private_with_epsilon hands to the search for the noise multiplier and to the accountant.
ACCOUNTING_OPTIONS = ("epsilon_tolerance", "alphas", "eps_error", "delta_error", "poisson")


class PrivacyEngine(OpacusPrivacyEngine):
    """`opacus.PrivacyEngine` that clips with flash clipping (`grad_sample_mode="flash"`, the default here).

    The model is returned as it was given: no wrapper, the same names, `state_dict` and class. Its `FlashEngine` is
    `privacy_engine.flash_engine` and `optimizer.engine`; `flash_engine.detach()` undoes everything.

    Args:
        accountant: Opacus's accountant: "prv", "rdp" or "gdp".
        secure_mode: Use Opacus's secure noise, which needs torchcsprng.

    Example:
        >>> privacy_engine = PrivacyEngine()
        >>> model, optimizer, loader = privacy_engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss_fn(model(x), y).backward()
        ...     optimizer.step()
        >>> epsilon = privacy_engine.get_epsilon(delta=1e-5)
    """

    flash_engine: FlashEngine | None = None
    spending: Spending | None = None  # of the last make_private: steps, draws, and what makes ε doubtful
    _prepared: FlashEngine | None = None
    # Of the call of make_private that runs:
    _engine_options: Mapping[str, Any] = MappingProxyType({})
    _pad_batches: PadBatches = False
    _sampler: Any = None

    def make_private(
        self,
        *,
        module: nn.Module,
        grad_sample_mode: str = FLASH,
        wrap_model: bool = True,
        batch_size_of: BatchSizeOf | None = None,
        rows_per_sample: int = 1,
        memory_budget: MemoryLimit = None,
        pad_batches: PadBatches = False,
        **kwargs: Any,
    ) -> Any:
        """Make a model, its optimizer and its data loader private. All arguments are keywords.

        Args:
            module: The model, not wrapped by Opacus. DDP or FSDP2 may spread it.
            optimizer: Its ordinary optimizer, or the private one of an earlier call.
            data_loader: Loader over the whole data set, with the expected batch size of a step.
            noise_multiplier: Standard deviation of the noise divided by the sensitivity.
            max_grad_norm: The clipping bound C; a list or dictionary for rules with several bounds. Leave it out if
                `clipping` is a `ClipRule`.
            clipping: The clipping rule: its name, or a `ClipRule`, whose own bounds then hold. Options of a named rule
                (`gamma`, `target_unclipped_quantile`, …) are keywords too.
            poisson_sampling: Draw batches by Poisson sampling, which ε assumes.
            loss_reduction: How the loss combines samples, "mean" or "sum".
            noise_generator: Generator of the noise, for runs that can be repeated. Keep its seed secret.
            batch_size_of: Function of the model's `(args, kwargs)` that returns the number of samples, if that is not
                the first dimension of the first tensor.
            rows_per_sample: Number of neighbouring rows that are views of one sample.
            memory_budget: Memory that a step may hold to be faster: None (the peak of ordinary training), bytes, or
                "lean".
            pad_batches: Fill batches up to a few sizes, for compiled models: True (sizes follow from the sample rate),
                one size, or a list of sizes. Padding has no weight. A draw above the largest size comes as several
                batches, of which the last takes the step.
            fused: Update in the same pass that adds the noise. Default: on a GPU with SGD, Adam or AdamW.
            adam_bc: The floor γ′ of DP-AdamBC, which takes the variance of the noise out of Adam's v̂. Default: Adam.
            grad_sample_mode: Leave it out. Other modes than "flash" and "hooks" use Opacus's engine, with a warning.
            wrap_model: False returns a handle with `cleanup()` instead of the model, as Opacus does.
            **kwargs: Further arguments of Opacus's `make_private`.

        Returns:
            The model, the private optimizer, and the loader to train with.

        Raises:
            UserError: An argument is wrong. A model that is refused raises `UnsupportedModelError`, which is Opacus's
                `UnsupportedModuleError` too.
        """
        if rows_per_sample != 1 and pad_batches:
            raise PADDED_ROWS.error(option="rows_per_sample")
        if not is_flash(grad_sample_mode):
            if pad_batches:
                raise PADDED_OPACUS.error()
            return super().make_private(
                module=module,
                grad_sample_mode=grad_sample_mode,
                **({} if wrap_model else {"wrap_model": False}),
                **kwargs,
            )
        for name in ("max_grad_norm", "noise_multiplier"):
            if name in kwargs:
                kwargs[name] = as_number(kwargs[name])
        clipping = kwargs.pop("clipping", "flat")
        options = {name: kwargs.pop(name) for name in options_of(clipping) if name in kwargs}
        require_module(module)
        try:
            with refusing_together(module):
                rule = make_rule(clipping, kwargs.get("max_grad_norm"), **options)
                kwargs["max_grad_norm"] = rule.max_grad_norm
                check_arguments(module, **kwargs)
                check_limit(memory_budget)
                detach_previous(module, kwargs["optimizer"])
                options = {
                    "batch_size_of": batch_size_of,
                    "rows_per_sample": rows_per_sample,
                    "memory_budget": memory_budget,
                    "clipping": rule,
                }
                with temporarily(self, _engine_options=options, _pad_batches=pad_batches):
                    _, optimizer, loader = super().make_private(module=module, grad_sample_mode=FLASH, **kwargs)
        except BaseException:
            if self._prepared is not None:
                self._prepared.cleanup()
                self._prepared = None
            raise
        self._prepared = None
        self.flash_engine = engine = optimizer.engine
        engine.forwards.expects_padding = pad_batches is not False
        engine.attachment.hooks.append(_accept_opacus_names(module))
        self.accountant.dpscope_poisson = poisson = kwargs.get("poisson_sampling", True)  # for audits: what ε assumes
        self.accountant.history = continued(self.accountant.history, optimizer.spent_before)
        optimizer.physical_batches = PhysicalBatches(
            self._sampler, ahead=loader.num_workers * (loader.prefetch_factor or 0)
        )
        self.spending = Spending(optimizer.step_hook, self.accountant, self._sampler if poisson else None)
        optimizer.spending = self.spending
        warn_of_untrained(engine, optimizer)
        return module if wrap_model else engine, optimizer, loader

    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        grad_sample_mode: str = FLASH,
        **kwargs: Any,
    ) -> Any:
        """Make a model private with the noise that a target ε needs.

        Args:
            data_loader: Loader over the whole data set, with the expected batch size of a step.
            target_epsilon: ε that all epochs together may spend.
            target_delta: δ of that ε, below 1 / number of samples.
            epochs: Passes over the loader.
            grad_sample_mode: Leave it out, as in `make_private`.
            **kwargs: The other arguments of `make_private` except `noise_multiplier`, and options of the accountant
                (`epsilon_tolerance`, `alphas`, …).

        Returns:
            The model, the private optimizer, and the loader to train with.

        Raises:
            UserError: As `make_private`.

        Example:
            >>> model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            ...     module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0,
            ...     target_epsilon=3.0, target_delta=1e-3, epochs=2,
            ... )
        """
        if len(self.accountant) > 0:
            warnings.warn(
                "make_private_with_epsilon takes the privacy budget to be unspent, but this engine has counted steps "
                "already: the total will be larger than target_epsilon",
                stacklevel=2,
            )
        options = {name: kwargs.pop(name) for name in ACCOUNTING_OPTIONS if name in kwargs}
        noise_multiplier = get_noise_multiplier(
            target_epsilon=float(target_epsilon),
            target_delta=float(target_delta),
            sample_rate=1 / len(data_loader),
            epochs=epochs,
            accountant=self.accountant.mechanism(),
            **options,
        )
        self.spending = None
        private = self.make_private(
            data_loader=data_loader, noise_multiplier=noise_multiplier, grad_sample_mode=grad_sample_mode, **kwargs
        )
        if self.spending is not None:  # of flash clipping
            self.spending.plan(int(epochs * len(data_loader)), float(target_epsilon))
        return private

    def get_epsilon(self, delta: float) -> float:
        """Return ε of all steps so far at δ = `delta`. Warn if it does not hold for them, or is above the target."""
        for doubt in [] if self.spending is None else self.spending.doubts(self.accountant.history):
            warnings.warn(doubt, stacklevel=2)
        if any(noise == 0 for noise, _, _ in self.accountant.history):
            return math.inf  # Opacus's PRV accountant ends in an OverflowError
        epsilon: float = super().get_epsilon(delta)
        return epsilon

    # -- which models ------------------------------------------------------------------------------------------------

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise UnsupportedModelError if make_private would refuse `module`.

        `optimizer` and `data_loader` are Opacus's arguments, and not used.
        """
        validate(module)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Return whether make_private would accept `module`. `optimizer` and `data_loader` are not used."""
        return is_valid(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy of `module` in which layers that flash clipping refuses (BatchNorm) are replaced as by Opacus.

        Raise UnsupportedModelError if a refused layer has no replacement.
        """
        module = clone_module(module)
        for name, layer in list(module.named_modules()):
            replace = ModuleValidator.FIXERS.get(type(layer))
            if replace is not None and not is_valid(layer):
                replacement = replace(layer).to(next(layer.parameters()).device)
                module = ModuleValidator._replace_sub_module(
                    root=module, sub_module_name=name, new_sub_module=replacement
                )
        validate(module)
        return module

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        *,
        module: nn.Module,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save `module`, optimizer and spent privacy to a file that Opacus can load too.

        `module_state_dict_kwargs` are for `module.state_dict`, `checkpoint_dict` has further entries of the file, and
        `kwargs` are `path`, `optimizer` and the other arguments of Opacus's `save_checkpoint`.
        """
        if not isinstance(module, AbstractGradSampleModule):
            module_state_dict_kwargs = {"prefix": OPACUS_PREFIX, **(module_state_dict_kwargs or {})}
        if used := used_keys_of(module):
            checkpoint_dict = {**(checkpoint_dict or {}), USED_NOISE_KEYS: used.state()}
        super().save_checkpoint(
            module=module,
            module_state_dict_kwargs=module_state_dict_kwargs,
            checkpoint_dict=checkpoint_dict,
            **kwargs,
        )

    def load_checkpoint(
        self, *, module: nn.Module, optimizer: Any = None, resume_noise: bool = False, **kwargs: Any
    ) -> Any:
        """Return the further entries of a checkpoint of this engine or of Opacus, and load the rest.

        The state of `module` is loaded and, if given, of the private `optimizer`. `kwargs` are `path` and the other
        arguments of Opacus's `load_checkpoint`. Noise is fresh, unless `resume_noise` continues the generator of the
        saved run: see `DPFlashOptimizer.load_state_dict`. Steps that this engine has counted since still count.
        """
        spent = list(self.accountant.history)
        if resume_noise and not isinstance(optimizer, DPFlashOptimizer):
            raise UserError("resume_noise=True needs the private optimizer: load_checkpoint(optimizer=…)")
        wrapped = isinstance(module, AbstractGradSampleModule)
        with (
            temporarily(optimizer, resumes_noise=True) if resume_noise else nullcontext(),
            nullcontext() if wrapped else _accept_opacus_names(module),
        ):
            checkpoint = super().load_checkpoint(module=module, optimizer=optimizer, **kwargs)
        self.accountant.history = continued(spent, self.accountant.history)
        used = checkpoint.pop(USED_NOISE_KEYS, None)
        if used is not None and not resume_noise:
            used_keys_of(module).update(torch.as_tensor(used).tolist())
        return checkpoint

    # -- what Opacus's make_private calls ----------------------------------------------------------------------------

    def _prepare_model(self, module: nn.Module, *, grad_sample_mode: str = FLASH, **kwargs: Any) -> Any:
        if grad_sample_mode != FLASH:
            return super()._prepare_model(module, grad_sample_mode=grad_sample_mode, **kwargs)
        try:
            engine = FlashEngine(
                module,
                loss_reduction=kwargs.get("loss_reduction", "mean"),
                **self._engine_options,
            )
        except UserError as refusal:
            raise UnsupportedModelError(str(refusal)) from None
        engine.refusal = UnsupportedModelError
        self._prepared = engine
        return engine

    def _prepare_data_loader(self, data_loader: DataLoader[Any], *, distributed: bool, **kwargs: Any) -> Any:
        poisson = kwargs["poisson_sampling"]
        ranks = None if self._prepared is None else self._prepared.ranks
        several = ranks is not None and ranks.several
        if several and kwargs.get("rand_on_empty"):
            raise MADE_UP_RANKS.error()
        distributed = distributed and not several
        loader = super()._prepare_data_loader(unpadded(data_loader), distributed=distributed, **kwargs)
        if ranks is not None and several:
            ranks.control.shares_given = 0
            loader = loader_of_rank(loader, ranks.control) if poisson else loader
        self._sampler = loader.batch_sampler
        count_draws(self._sampler)
        return loader if self._pad_batches is False else pad_loader(loader, self._pad_batches, poisson=poisson)

    def _prepare_optimizer(self, *, optimizer: Optimizer, grad_sample_mode: str = FLASH, **kwargs: Any) -> Any:
        if grad_sample_mode != FLASH:
            return super()._prepare_optimizer(optimizer=optimizer, grad_sample_mode=grad_sample_mode, **kwargs)
        assert self._prepared is not None
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        self._prepared.ranks.agree_on(optimizer)
        # Opacus divides by the number of processes; sums here are over all of them.
        if kwargs.pop("distributed", False):
            kwargs["expected_batch_size"] = round(kwargs["expected_batch_size"] * get_world_size())
        kwargs.pop("clipping", None)
        kwargs["max_grad_norm"] = self._prepared.max_grad_norm
        generator = kwargs.pop("noise_generator", None)
        return DPFlashOptimizer(
            optimizer,
            engine=self._prepared,
            generator=self.secure_rng if self.secure_mode else generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )


def _accept_opacus_names(module: nn.Module) -> RemovableHandle:
    """Let `module` load a state_dict of Opacus's wrapper around it as well as its own."""
    hook: RemovableHandle = module.register_load_state_dict_pre_hook(_strip_prefix)  # type: ignore[no-untyped-call]
    return hook


def _strip_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    wrapped = prefix + OPACUS_PREFIX
    if state and all(name.startswith(wrapped) for name in state):
        for name in list(state):
            state[prefix + name[len(wrapped) :]] = state.pop(name)
