"""Plan of the taps: the ways to tap a module, tried one after the other until one matches the model.

    family    the layer's own rule: its input has a row, or a block of rows, for each sample
    followed  its parameters are followed to the operators that use them (bare.py): its input has nothing of the
              samples, or its forward is not that of its class
    whole     the module runs sample by sample, with all it contains (opaque.py)
    climb     the module around it runs as a whole: rows inside are not the samples, as with the experts of a mixture

Samples really mix only if the whole model, run sample by sample, does not give what it gives for a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from dpscope.flash.gradients.contributions import refuse_complex
from dpscope.flash.layers import family_of
from dpscope.flash.layers.bare import BareTap, own_parameters
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.layers.per_sample import hides_samples_from_its_layers, is_recurrent
from dpscope.flash.layers.recurrent import RecurrentTap
from dpscope.flash.layers.refusals import RefusedTap, refusal_of, refuse_trained
from dpscope.flash.taps.taps import EngineTap, LayerTap
from dpscope.flash.torch_side.frames import is_wrapper, original_of, refuse_compiled_forwards
from dpscope.flash.torch_side.shards import is_sharded


class TappedModule(NamedTuple):
    """A module that is tapped, under its qualified name."""

    name: str
    module: nn.Module
    make: type[EngineTap]

    @property
    def is_layer(self) -> bool:
        return issubclass(self.make, LayerTap)


class Ladder:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.followed: set[nn.Module] = set()
        self.whole: dict[nn.Module, str] = {}  # with the reason
        self.derived: set[nn.Module] = set()  # wholes that are given parameters, and nothing of the samples
        self.constants: dict[nn.Module, set[object]] = {}  # operators of followed modules that meet no samples
        self._strays: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._parents = {child: parent for parent in model.modules() for child in parent.children()}

    # -- the plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> list[TappedModule]:
        """Return the modules to tap, and how. Raise UserError for modules that cannot be made private."""
        for name, module in self._model.named_modules():
            refuse_trained(name, module)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                refuse_complex(name, parameter)
        found = list(self._tapped(self._model, "", set()))
        layers_inside = {each.module for each in found if each.is_layer}
        refuse_compiled_forwards(self._model, layers_inside, {each.module for each in found})
        return found

    def _tapped(self, module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[TappedModule]:
        if module in seen:
            return
        seen.add(module)
        if is_wrapper(module):
            yield from self._tapped(original_of(module), name, seen)
            return
        make, goes_inside = self._way(module)
        if make is not None:
            yield TappedModule(name, module, make)
        if not goes_inside:
            seen.update(module.modules())
            return
        for key, child in module.named_children():
            if not isinstance(child, nn.ParameterList | nn.ParameterDict):  # its parameters are its parent's
                yield from self._tapped(child, f"{name}.{key}" if name else key, seen)

    def _way(self, module: nn.Module) -> tuple[type[EngineTap] | None, bool]:  # noqa: PLR0911
        """Return how a module itself is tapped, if it is, and whether modules inside it are tapped as well."""
        if refusal_of(module) is not None:
            return RefusedTap, False
        if hides_samples_from_its_layers(module) or (module in self.whole and not is_recurrent(module)):
            return OpaqueTap, False
        owned = [parameter for _, _, parameter in own_parameters(module)]
        is_followed = module in self.followed
        if not owned and not is_followed:
            return None, True
        family = None if is_followed else family_of(module)
        if family is not None:
            return family, True
        frozen = not any(parameter.requires_grad for parameter in owned)
        if frozen and not is_followed and _calls_its_children(module):  # if unfrozen later, a gradient is refused
            return None, True
        if module not in self.whole and _can_be_followed(module):
            return BareTap, True
        return RecurrentTap if is_recurrent(module) else OpaqueTap, False

    # -- other ways --------------------------------------------------------------------------------------------------

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
        is_left = climb and module not in self.whole and _is_called(module)  # by itself, where nothing is around it
        return module if target is None and is_left else target

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


def _can_be_followed(module: nn.Module) -> bool:
    """Return whether a module's own parameters may be followed: it uses them in its forward, and only there."""
    if is_recurrent(module):
        return False
    if any(is_sharded(parameter) for parameter in module.parameters()):
        return False
    return _calls_its_children(module) or not any(True for child in module.children() for _ in child.parameters())


def _calls_its_children(module: nn.Module) -> bool:
    """Return whether child modules use their own parameters; some torch layers read those of their children."""
    built_in = any(
        cls.__module__.startswith("torch.nn.modules.") and cls not in _CONTAINERS for cls in type(module).__mro__
    )
    return not built_in and any(True for child in module.children() for _ in child.parameters())


_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
