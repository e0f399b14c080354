"""Private training as Opacus does it: flat and ghost clipping, over several processes by its own DDP and FSDP2."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModule, get_gsm_class
from opacus.grad_sample.grad_sample_module import create_or_accumulate_grad_sample
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from opacus.utils.module_utils import trainable_modules
from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.batches import tensors_of
from dpscope.errors import UserError
from dpscope.flash.torch_side.torch_version import require, require_for_shards
from dpscope.instruments.memory import Holding
from dpscope.trainers.base import TrainerBase, require_flat, require_private_trainable
from dpscope.trainers.modes import is_sharded, policy_of
from dpscope.trainers.opacus_refusals import CHECKPOINTED, NOT_COMPILED, CallWatch, refusals, require_supported
from dpscope.units import list_names, name_module
from dpscope.vocabulary.components import ACTIVATION_HOOKS, GRADIENTS, NORM_SAMPLES, PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import CLIP, NOISE, OPTIMIZER, allocates, in_phase, phase
from dpscope.vocabulary.settings import EAGER, TrainerSettings
from dpscope.workloads.workload import Batch

# Before, gloo adds up gradients that FSDP2 asks it to average, without an error: a sample moves the sum by the bound
# times the number of ranks (github.com/pytorch/pytorch/issues/162338). NCCL averages them.
OLDEST_SHARDED_ON_CPU = (2, 11)


def require_spreadable(model: nn.Module, mode: str, settings: TrainerSettings) -> None:
    """Raise `UserError` for what Opacus cannot train in this `grad_sample_mode` over several processes."""
    if not is_sharded(settings):
        return
    require_for_shards()
    if settings.parallel == "hsdp":
        raise UserError(
            "Opacus cannot train over replicas of shards: its FSDP2Wrapper takes no mesh. Compare ghost with "
            "--parallel fsdp, or --methods standard,flash"
        )
    if mode == "hooks":
        raise UserError(
            "Opacus has no flat clipping of a sharded model: its hooks keep gradients of whole parameters for every "
            "sample. Compare flat with --parallel ddp, or --methods standard,ghost,flash"
        )
    try:
        import opacus.utils.fsdp_utils  # noqa: F401
    except ImportError:
        raise UserError("this Opacus cannot train a sharded model: install opacus 1.6 or newer") from None
    # FSDP2Wrapper leaves the mesh to torch, which takes the accelerator of the machine.
    if torch.cuda.is_available() and next(model.parameters()).device.type != "cuda":
        raise UserError(
            "Opacus shards a model on this machine's GPU only: leave out --device cpu, or compare --methods "
            "standard,flash"
        )
    _require_untied(model)
    _require_copyable(model)
    _require_rows_for_all(model, settings.world_size)
    if next(model.parameters()).device.type == "cpu":
        instead = "compare ghost with --parallel ddp, or --methods standard,flash"
        require(OLDEST_SHARDED_ON_CPU, "Opacus's training of a sharded model on a CPU", instead)


def _require_untied(model: nn.Module) -> None:
    """Refuse tied parameters: FSDP2Wrapper shards each layer by itself, and each would train its own copy."""
    holders = defaultdict(list)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders[parameter].append(f"{module_name}.{name}".lstrip("."))
    if tied := next((names for names in holders.values() if len(names) > 1), None):
        raise UserError(
            f"Opacus cannot train tied weights of a sharded model ({list_names(tied)}): it shards each layer by "
            "itself. Untie them, or compare --methods standard,flash"
        )


def _require_copyable(model: nn.Module) -> None:
    """Refuse shards in a module without a rule: Opacus copies such modules, and shards cannot be copied."""
    rules = get_gsm_class("ghost_fsdp")
    for name, module in trainable_modules(model):
        below = (each for each in module.modules() if each is not module)
        has_shards = module is model or any(True for each in below for _ in each.parameters(recurse=False))
        if has_shards and type(module) not in {*rules.GRAD_SAMPLERS, *rules.NORM_SAMPLERS}:
            raise UserError(
                f"Opacus cannot train this model sharded: {name_module(name, module)} owns parameters beside its "
                "submodules. Move them to a submodule, or compare --methods standard,flash"
            )


def _require_rows_for_all(model: nn.Module, ranks: int) -> None:
    """Refuse parameters with fewer rows than ranks: DTensor keeps such a gradient whole on every rank."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() and len(parameter) < ranks:
            raise UserError(
                f"Opacus cannot train {name} of shape {tuple(parameter.shape)} in {ranks} shards: its first dimension "
                "is smaller than the number of ranks. Use fewer, or compare --methods standard,flash"
            )


# Opacus's hooks fire for the first layer too, whose input needs no gradient: that is meant, and is said every time.
warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)


# What Opacus hangs on a parameter: attribute -> component. Lists where batches were accumulated.
PARAMETER_HOLDINGS = {
    "grad_sample": PER_SAMPLE_GRADIENTS,
    "_current_grad_sample": PER_SAMPLE_GRADIENTS,
    "_norm_sample": NORM_SAMPLES,
    "summed_grad": GRADIENTS,
}

# What Opacus makes and holds in local variables only.
# The output gradient times the batch size, which stays for as long as a layer's hook works on it.
allocates(ACTIVATION_HOOKS, "aten::mul")(GradSampleModule.rearrange_grad_samples)
# Norms of one parameter, and of all of them stacked.
allocates(NORM_SAMPLES, "aten::linalg_vector_norm", "aten::stack")(DPOptimizer.clip_and_accumulate)
# Layers that ghost clipping has no rule for: one layer's per-sample gradients, thrown away after their norm.
allocates(PER_SAMPLE_GRADIENTS, "aten::zeros")(create_or_accumulate_grad_sample)


class _OpacusTrainer(TrainerBase):
    """Base of flat and ghost: an Opacus optimizer that makes the gradient private before the step."""

    optimizer: DPOptimizer
    mode: str  # Opacus's `grad_sample_mode`

    def require_model(self, model: nn.Module) -> None:
        require_flat(self.settings.clipping)
        require_private_trainable(model)
        if self.settings.checkpoint_blocks:
            raise UserError(CHECKPOINTED)
        require_supported(model)
        if self.settings.world_size > 1:
            require_spreadable(model, self.mode, self.settings)
        if self.settings.compile != EAGER:
            raise UserError(NOT_COMPILED)

    def spread(self, model: nn.Module) -> nn.Module:
        # As Opacus's documentation says: whole on each process, or every layer sharded by itself.
        if not is_sharded(self.settings):
            whole: nn.Module = DifferentiallyPrivateDistributedDataParallel(model)
            return whole
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        FSDP2Wrapper(model, mp_policy=policy_of(self.settings))  # in place
        return model

    def prepare_model(self, model: nn.Module) -> GradSampleModule:
        with refusals(self.plain_model):
            wrapped = self.wrap(model)
        self.first_calls: CallWatch | None = CallWatch(wrapped, self.plain_model)
        return wrapped

    def wrap(self, model: nn.Module, **options: object) -> GradSampleModule:
        """Return the model in Opacus's hooks."""
        return get_gsm_class(self.mode)(model, batch_first=True, loss_reduction="mean", **options)

    def train_step(self, *batches: Batch) -> Tensor:
        with refusals(self.plain_model):  # some are found out only by hooks, while the model runs
            return super().train_step(*batches)

    def backward(self, losses: Tensor) -> None:
        if self.first_calls is not None:
            self.first_calls.require_batch_first(len(losses))
            self.first_calls = None
        super().backward(losses)

    def holdings(self) -> Iterator[Holding]:
        yield from super().holdings()
        for name, parameter in self.plain_model.named_parameters():
            for attribute, component in PARAMETER_HOLDINGS.items():
                for tensor in tensors_of(getattr(parameter, attribute, None)):
                    yield component, name.rpartition(".")[0], tensor
        for tensor in tensors_of(getattr(self.model, "_per_sample_gradient_norms", None)):
            yield NORM_SAMPLES, "", tensor
        for path, module in self.plain_model.named_modules():
            for tensor in tensors_of(vars(module).get("activations")):
                yield ACTIVATION_HOOKS, path, tensor

    def prepare_optimizer(self, optimizer: Optimizer) -> DPOptimizer:
        ranks = self.settings.world_size
        make = get_optimizer_class("flat", distributed=ranks > 1, grad_sample_mode=self.mode)
        private: DPOptimizer = make(
            optimizer,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=self.settings.max_grad_norm,
            # Opacus averages over ranks, so that its divisor is the batch of one.
            expected_batch_size=self.settings.logical_batch_size // ranks,
            loss_reduction="mean",
            generator=self.noise_generator(),
        )
        private.add_noise = in_phase(NOISE, private.add_noise)
        return private

    def update(self) -> None:
        # DPOptimizer.step, with its parts told apart: make the gradient private, add it up over ranks, then step.
        if self.optimizer.pre_step():
            with phase(OPTIMIZER):
                if hasattr(self.optimizer, "reduce_gradients"):
                    self.optimizer.reduce_gradients()
                self.optimizer.original_optimizer.step()


class DPSGDTrainer(_OpacusTrainer):
    """Flat clipping: Opacus hooks keep every sample's gradient of every parameter."""

    mode = "hooks"

    def prepare_optimizer(self, optimizer: Optimizer) -> DPOptimizer:
        private = super().prepare_optimizer(optimizer)
        private.clip_and_accumulate = in_phase(CLIP, private.clip_and_accumulate)
        return private


class DPFunctorchTrainer(DPSGDTrainer):
    """Flat clipping whose per-sample gradients come from torch.func instead of the rules for each layer."""

    mode = "functorch"


class DPGhostClippingTrainer(_OpacusTrainer):
    """Ghost clipping: one backward pass for per-sample norms, a second for the gradient of the clipped loss."""

    def require_model(self, model: nn.Module) -> None:
        self.mode = "ghost_fsdp" if is_sharded(self.settings) else "ghost"
        super().require_model(model)

    def wrap(self, model: nn.Module, **options: object) -> GradSampleModule:
        wrapped = super().wrap(model, max_grad_norm=self.settings.max_grad_norm, use_ghost_clipping=True, **options)
        wrapped.get_clipping_coef = in_phase(CLIP, wrapped.get_clipping_coef)
        return wrapped

    def run_backward(self, losses: Tensor) -> None:
        DPTensorFastGradientClipping(self.model, self.optimizer, losses, "mean").backward()
