"""Holdings of every training step, whatever the method: weights, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpscope.instruments.memory.tracker import Holding
from dpscope.vocabulary.components import GRADIENTS, MODEL_PARAMETERS, OPTIMIZER_STATES


def model_holdings(model: nn.Module, optimizer: Optimizer) -> Iterator[Holding]:
    """Yield (component, module, tensor) for parameters, buffers, `.grad` and optimizer state as they are now."""
    for name, buffer in model.named_buffers():
        yield MODEL_PARAMETERS, name.rpartition(".")[0], buffer
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        yield MODEL_PARAMETERS, module, parameter
        if parameter.grad is not None:
            yield GRADIENTS, module, parameter.grad
        for leaf in tree_leaves(optimizer.state.get(parameter, {})):
            if isinstance(leaf, Tensor):
                yield OPTIMIZER_STATES, module, leaf
