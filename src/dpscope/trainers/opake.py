"""opake (PyPI): per-sample gradients by `vmap(grad)`, functional.

As its README runs it: `clipped_grad` of one sample's loss, then `gaussian_noise`, with its patches for Hugging Face
models. The update is torch's own, as for every other method here. Compiled as its own trainer compiles: the gradient of
a batch as one graph.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.random import key
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpscope.trainers.base import TrainerBase, require_flat, require_private_trainable
from dpscope.vocabulary.phases import BACKWARD, NOISE, phase
from dpscope.vocabulary.settings import EAGER
from dpscope.workloads.workload import Batch


class OpakeTrainer(TrainerBase):
    """opake 0.16 with fixed clipping. Its gradient function runs forward and backward at once: both are `backward`."""

    def require_model(self, model: nn.Module) -> None:
        require_flat(self.settings.clipping)
        require_private_trainable(model)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        if type(model).__module__.partition(".")[0] in ("transformers", "peft"):
            from opake.exceptions import ConfigurationError
            from opake.patches import apply_model_patches, apply_runtime_patches

            apply_runtime_patches()
            with contextlib.suppress(ConfigurationError):
                apply_model_patches(model)
        self.noise, self.noise_state = gaussian_noise(
            noise_multiplier=self.settings.noise_multiplier, key=key(self.settings.seed)
        )
        self.gradients: Any = None
        self._functions: dict[Any, Any] = {}  # by the structure of the batch
        return model

    def compile(self, model: nn.Module) -> nn.Module:
        """Return the model as it is: `_function` compiles what differentiates it."""
        return model

    def _differentiate(self, batch: Batch) -> Tensor:
        leaves, structure = tree_flatten(batch)
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        with phase(BACKWARD), self._autocast():
            function, state = self._function(structure, len(leaves))
            (self.gradients, aux), _ = function(trained, *leaves, state=state)
        losses: Tensor = aux.loss_values
        return losses.detach().mean()

    def _function(self, structure: Any, tensors: int) -> Any:
        if structure not in self._functions:

            def loss_of_one(trained: dict[str, Tensor], *sample: Tensor) -> Tensor:
                batch = tree_unflatten([each.unsqueeze(0) for each in sample], structure)
                model: Any = lambda *args, **also: functional_call(self.model, trained, args, also)  # noqa: E731
                return self.loss(model, batch)[0]

            compilation: dict[str, Any] = {}
            if self.settings.compile != EAGER:
                compiler = partial(torch.compile, mode=self.settings.compile, fullgraph=True)
                compilation = {"microbatch_size": self.settings.batch_size, "_chunk_compiler": compiler}
            self._functions[structure] = clipped_grad(
                loss_of_one,
                clipping_norm=self.settings.max_grad_norm,
                batch_argnums=tuple(range(1, tensors + 1)),
                normalize_by=self.settings.logical_batch_size,
                return_aux=True,
                **compilation,
            )
        return self._functions[structure]

    def backward(self, losses: Tensor) -> None:
        """Do nothing: the forward pass has done it."""

    def update(self) -> None:
        with phase(NOISE):
            private = self.gradients
            if self.settings.noise_multiplier:
                private, self.noise_state = self.noise(private, self.noise_state)
        parameters = dict(self.model.named_parameters())
        for name, gradient in private.pytree.items():
            parameters[name].grad = gradient
        self.gradients = None
        super().update()
