"""The ways to tap a module, tried one after the other until one matches the model.

    family    the layer's own rule: its input has a row, or a block of rows, for each sample
    followed  its parameters are followed to the operators that use them (bare.py): its input has nothing of the
              samples, or its forward is not that of its class
    whole     the module runs sample by sample, with all it contains (opaque.py)
    climb     the module around it runs as a whole: rows inside are not the samples, as with the experts of a mixture

Samples really mix only if the whole model, run sample by sample, does not give what it gives for a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from dpscope.flash.layers.bare import own_parameters
from dpscope.flash.layers.sample_dims import is_recurrent


class Ladder:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.followed: set[nn.Module] = set()
        self.whole: dict[nn.Module, str] = {}  # with the reason
        self.derived: set[nn.Module] = set()  # wholes that are given parameters, and nothing of the samples
        self.constants: dict[nn.Module, set[object]] = {}  # operators of followed modules that meet no samples
        self._strays: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._parents = {child: parent for parent in model.modules() for child in parent.children()}

    def follow(self, modules: Sequence[nn.Module]) -> bool:
        """Follow the parameters of modules if possible, run others on parameters alone; return whether any is new."""
        found = [module for module in modules if self._may_be_followed(module)]
        self.followed.update(found)
        if found:
            return True
        derived = [module for module in modules if module not in self.followed and module not in self.derived]
        self.derived.update(derived)
        return bool(derived)

    def move(self, modules: Sequence[nn.Module], reason: str, *, climb: bool) -> bool:
        """Move modules to the next way; return whether there was one for any of them."""
        followed = [module for module in modules if not climb and self._may_be_followed(module)]
        # All of them before any is noted: modules with one parent climb to it, and no further.
        targets = [self._next_whole(module, climb) for module in modules if module not in followed]
        wholes = {target: reason for target in targets if target is not None}
        self.followed.update(followed)
        self.whole.update(wholes)
        return bool(followed or wholes)

    def _may_be_followed(self, module: nn.Module) -> bool:
        inside_of_followed = module in self.followed or module in self.whole or is_recurrent(module)
        return not inside_of_followed and any(True for _ in own_parameters(module))

    def _next_whole(self, module: nn.Module, climb: bool) -> nn.Module | None:
        """Return the nearest module, this one or around it, that has a forward and is not tapped as a whole yet."""
        target: nn.Module | None = self._parents.get(module) if climb or module in self.whole else module
        while target is not None and (target in self.whole or not _is_called(target)):
            target = self._parents.get(target)
        return target

    # -- parameters used elsewhere -----------------------------------------------------------------------------------

    def add_strays(self, parameters: Collection[nn.Parameter]) -> bool:
        """Follow these parameters from the model's own forward on, because their owners' layers are called as well."""
        known = {id(parameter) for _, _, parameter in self._strays}
        found = [
            (module._parameters, key, parameter)
            for module in self._model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in known and any(parameter is each for each in parameters)
        ]
        self._strays += found
        if found:
            self.followed.add(self._model)
        return bool(found)

    def strays_of(self, module: nn.Module) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
        return self._strays if module is self._model else []


def _is_called(module: nn.Module) -> bool:
    """Return whether it has a forward: lists and dictionaries of modules have none."""
    return type(module).forward is not nn.Module.forward
