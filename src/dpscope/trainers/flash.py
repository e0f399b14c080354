"""Private training with flash clipping: the ordinary loop, with a private optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.flash import make_graphed_step
from dpscope.flash.engine import FlashEngine
from dpscope.flash.gradients.explanation import PerSampleModule, costly_modules, own_parameters
from dpscope.flash.gradients.memory_budget import LEAN, MemoryLimit
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.instruments.memory import Holding
from dpscope.results.schema import Note
from dpscope.trainers.base import StandardTrainer, TrainerBase, require_private_trainable
from dpscope.trainers.modes import PrivateGraph
from dpscope.units import format_bytes, name_module
from dpscope.vocabulary.components import ACTIVATION_HOOKS, GRADIENTS, NORM_SAMPLES, PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import CLIP, NOISE, in_phase

OPAQUE = "opaque modules"


def note_on_per_sample(modules: Sequence[PerSampleModule], batch_size: int) -> list[Note]:
    """Return a note on modules that torch.func.vmap makes costly: which, what it costs, what to write instead."""
    costly = costly_modules(modules)
    if not costly:
        return []
    first, more = costly[0], len(costly) - 1
    kept = sum(each.bytes_a_sample for each in costly)  # the sentence is the same at every size, and is told once
    share = sum(each.share for each in costly)
    kind, own = type(first.module).__name__, ", ".join(own_parameters(first.module))
    names = name_module(first.name, first.module) + (f" and {more} more module{'s' * (more > 1)}" if more else "")
    how, why = "through torch.func.vmap", f"because {kind} owns {own} itself"
    if not first.instead:
        how, why = f"{how}, or in a loop where that fails", f"flash clipping has no rule for {kind}"
    sentence = (
        f"{names}, {share:.0%} of the trainable parameters, run{'' if more else 's'} sample by sample "
        f"{how} ({why}), which takes more time and keeps {format_bytes(kept)} of gradients for each sample."
    )
    if first.instead:
        sentence += f" To avoid it, {first.instead} (docs/flash-how-it-works.md)."
    data = {"modules": [each.name for each in costly], "parameter_share": share, "kept_bytes": batch_size * kept}
    return [{"topic": OPAQUE, "sentence": sentence, **data}]


def memory_limit(setting: str) -> MemoryLimit:
    """Return the engine's value for a row's memory setting."""
    if setting == "auto":
        return None
    return LEAN if setting == LEAN else float(setting) * 2**30


class DPFlashClippingTrainer(StandardTrainer):
    """Exact clipping by `dpscope.flash`: norms from the recorded backward pass, then one sum for each layer."""

    optimizer: DPFlashOptimizer

    def holdings(self) -> Iterator[Holding]:
        yield from super().holdings()
        for slot, part in self.engine.contributions():
            values = part.values
            if values is None and not part.is_borrowed:
                values = part.summed_later
            if values is not None:
                yield PER_SAMPLE_GRADIENTS, slot.module, values
            for tensor in part.saved:
                yield ACTIVATION_HOOKS, slot.module, tensor
        for name, total in self.engine.running_sums.held():
            yield GRADIENTS, name.rpartition(".")[0], total
        for norms in (self.engine.norms, self.engine.factors):
            if norms is not None:
                yield NORM_SAMPLES, "", norms

    def begin_measuring(self) -> None:
        self.engine.verification.schedule.pause()

    def notes(self) -> list[Note]:
        return note_on_per_sample(self.engine.per_sample_modules(), self.settings.batch_size)

    def require_model(self, model: nn.Module) -> None:
        require_private_trainable(model)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        self.engine = FlashEngine(
            model,
            max_grad_norm=self.settings.max_grad_norm,
            clipping=self.settings.clipping,
            loss_reduction="mean",
            memory_budget=memory_limit(self.settings.memory_budget),
        )
        # Norms and factors are ready when this returns; sums, noise and update then go layer by layer, as one phase.
        self.engine.factored_sums = in_phase(CLIP, self.engine.factored_sums)  # type: ignore[method-assign]
        self.engine.accumulate = in_phase(CLIP, self.engine.accumulate)  # type: ignore[method-assign]
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> DPFlashOptimizer:
        private = DPFlashOptimizer(
            optimizer,
            engine=self.engine,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=self.engine.max_grad_norm,
            expected_batch_size=self.settings.logical_batch_size,
            generator=self.noise_generator(),
        )
        private.add_noise = in_phase(NOISE, private.add_noise)  # type: ignore[method-assign]
        return private

    def make_graphed(self) -> Callable[..., Tensor]:
        return PrivateGraph(make_graphed_step(lambda batch: self.losses_of(batch).mean(), self.optimizer))

    run_backward = TrainerBase.run_backward  # the optimizer divides by the size of the logical batch
