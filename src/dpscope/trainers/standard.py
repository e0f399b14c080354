"""Ordinary training: the denominator of every comparison."""

from collections.abc import Callable
from inspect import signature

from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.trainers.base import TrainerBase
from dpscope.trainers.compilation import compile_model
from dpscope.trainers.graphed import OrdinaryGraph
from dpscope.trainers.spreading import spread
from dpscope.vocabulary.phases import BACKWARD, OPTIMIZER, phase


class StandardTrainer(TrainerBase):
    """One backward pass for each batch, one optimizer step, no privacy."""

    def spread(self, model: nn.Module) -> nn.Module:
        return spread(model, self.settings)

    def compile(self, model: nn.Module) -> nn.Module:
        return compile_model(model, self.settings.compile)

    def make_graphed(self) -> Callable[..., Tensor]:
        """Return ordinary steps as a graph. A subclass has to say what it does: a graph might replay its noise."""
        if type(self) is not StandardTrainer:
            return super().make_graphed()
        return OrdinaryGraph(self.take_step, self.optimizer)

    def optimizer_options(self, optimizer: Callable[..., Optimizer]) -> dict[str, bool]:
        captured = self.settings.cuda_graph and type(self) is StandardTrainer
        return {"capturable": True} if captured and "capturable" in signature(optimizer).parameters else {}

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    def backward(self, losses: Tensor) -> None:
        with phase(BACKWARD):
            loss = losses.mean()
            if self.settings.accumulate > 1:
                loss = loss / self.settings.accumulate
            loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        with phase(OPTIMIZER):
            self.optimizer.step()

    def accumulate(self) -> None:
        """Let the next backward pass add to `.grad`. Subclasses override this if they accumulate differently."""
        if type(self) is not StandardTrainer:
            super().accumulate()
