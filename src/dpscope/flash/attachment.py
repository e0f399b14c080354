"""Changes of an engine to a model, which it can undo: taps on modules, guards on parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpscope.errors import UserError
from dpscope.flash import layers
from dpscope.flash.compiled.region_taps import RegionTap, RootTap, ZeroGradTap, region_taps
from dpscope.flash.gradients.slots import OWN_GRADIENTS, Slot, refuse_hooks
from dpscope.flash.layers.bare import BareTap
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.layers.plan import Ladder
from dpscope.flash.layers.torchs_own import class_is_own, foreign_mode_is_active, instance_is_own
from dpscope.flash.ranks.layout import ReplicaTap, refuse_spread_inside
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.sample_rows.proxy import NotFollowed, Unclipped
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import LayerTap
from dpscope.flash.torch_side.frames import original_of, refuse_compiled_forwards
from dpscope.flash.torch_side.instance_method import InstanceMethod, instance_method
from dpscope.flash.torch_side.module_state import BufferWatch


@dataclass
class _KnownLayer:
    """A layer of a family. `key`: its class, torch's class that it stands for, and the names of its parameters."""

    module: nn.Module
    key: tuple[type[nn.Module], type[nn.Module], tuple[str, ...]]
    size: int  # of its dictionary


class Attachment:
    """Taps and guards of an engine on its model, which torch.compile and DDP may have wrapped (`ranks`)."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.taps: list[InstanceMethod] = []
        self.hooks: list[RemovableHandle] = []  # to be removed when the engine is detached
        self._engine, self._model, self._given, self._ranks = engine, engine.model, ranks.given, ranks
        self._ladder = Ladder(engine.model)

    def attach(self, slots: Collection[Slot]) -> None:
        """Tap the model and guard its parameters. If that is refused, restore the model."""
        if any(instance_method(module) for module in self._model.modules()):
            raise UserError("the model already has a FlashEngine attached; call its detach() first")
        refuse_hooks(slots, guards=0)
        try:
            self._tap()
            for slot in slots:
                self._guard(slot)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        self._untap()
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _untap(self) -> None:
        for tap in reversed(self.taps):
            if isinstance(tap, BareTap):
                tap.remove_early_hooks()
            tap.restore()
        self.taps = []

    # -- taps --------------------------------------------------------------------------------------------------------

    def _tap(self) -> None:
        ladder = self._ladder
        tapped = ladder.plan()
        refuse_spread_inside((each.name, each.module) for each in tapped if each.make is not BareTap)
        verification = self._engine.verification
        verification.buffers = BufferWatch(self._model, [each.module for each in tapped if each.make is OpaqueTap])
        verification.followed = [each.module for each in tapped if each.make is BareTap]
        for name, module, make in tapped:
            tap = make(self._engine, name, module)
            self._install(tap)
            if isinstance(tap, OpaqueTap):
                tap.derives = module in ladder.derived
                if module in ladder.whole:
                    tap.describe(f"torch.func.vmap over samples, because {ladder.whole[module]}")
            if isinstance(tap, BareTap):
                tap.places += ladder.strays_of(module)
                tap.constants = ladder.constants.setdefault(module, set())
                self.hooks += tap.early_hooks()
        self._root = RootTap(self._engine, "", self._model)
        regions = self._region_taps(self._given)
        wrappers = [self._given, self._ranks.wrapper]  # torch.compile's module, and DistributedDataParallel
        zeroed = dict.fromkeys(each for each in (self._model, *wrappers) if each is not None)
        others = (self._root, *regions, ReplicaTap(self._model), *self._ranks.taps())
        for other in (*others, *(ZeroGradTap(self._engine, each) for each in zeroed)):
            self._install(other)
        self._layers = []
        for _, module, make in tapped:
            cls = layers.own_class_of(module)
            if cls is not None and issubclass(make, LayerTap):
                self._layers.append(_KnownLayer(module, (type(module), cls, make.names), len(module.__dict__)))
        self._classes = {layer.key for layer in self._layers}
        known = {layer.module for layer in self._layers}
        self._forwards = {tap.module: type(tap.module).forward for tap in self.taps if tap.module not in known}

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Remove all taps inside the block. Guards on parameters stay."""
        for tap in reversed(self.taps):
            tap.restore()
        try:
            yield
        finally:
            for tap in self.taps:
                tap.install()

    def refresh(self) -> bool:
        """Tap again if a layer or another module's forward has changed. Return whether one has.

        It runs in every pass, so it checks each class only once, and instances by their class and dictionary size.
        """
        changed = self._changed_layers()
        if changed:
            return self.retap(NotFollowed(changed, "it is no longer the layer that it was"))
        if all(type(module).forward is forward for module, forward in self._forwards.items()):
            return False
        self._engine.verification.forget()
        self._untap()
        self._tap()
        return True

    def _changed_layers(self) -> list[nn.Module]:
        """Return layers whose class, methods or functions are no longer those that their family stands for."""
        if foreign_mode_is_active():  # it may change what any function does
            return [layer.module for layer in self._layers]
        own = {key: class_is_own(*key) for key in self._classes}
        if not all(own.values()):
            return [layer.module for layer in self._layers if not own[layer.key]]
        found = []
        for layer in self._layers:
            module = layer.module
            if type(module) is not layer.key[0]:
                found.append(module)
            elif len(module.__dict__) != layer.size:
                layer.size = len(module.__dict__)
                if not instance_is_own(module, *layer.key[1:]):
                    found.append(module)
        return found

    def _install(self, tap: InstanceMethod) -> None:
        tap.install()
        self.taps.append(tap)

    def tap_regions(self) -> None:
        """Tap modules inside the model that were compiled after it was made private."""
        taps = [tap for tap in self.taps if tap.attribute == "forward"]
        layers_inside = {tap.module for tap in taps if isinstance(tap, LayerTap)}
        refuse_compiled_forwards(self._model, layers_inside, {tap.module for tap in taps} - layers_inside)
        for region in self._region_taps(self._model):
            if region.root is None:
                self._install(region)

    def _region_taps(self, given: nn.Module) -> list[RegionTap]:
        found = region_taps(self._engine, given, self._root)
        by_sample = {each for tap in self.taps if isinstance(tap, OpaqueTap) for each in tap.module.modules()}
        for region in found:
            region.runs_eagerly = region.root is None and original_of(region.module) in by_sample
        return found

    def retap(self, misfit: NotFollowed) -> bool:
        """Tap its modules in the next way of the `Ladder`; return whether there is one.

        Without modules, those whose parameters are followed are meant: perhaps a dimension equals the batch size by
        chance.
        """
        modules, strays, reason = misfit.modules, misfit.strays, str(misfit).partition(". ")[0]
        followed = [tap for tap in self.taps if isinstance(tap, BareTap)]
        self._ladder.followed.update(tap.module for tap in followed)
        expanded = list(self._engine.verification.expanded)
        self._engine.verification.forget()
        if not strays and sum(tap.reconsider() for tap in followed if not modules or tap.module in modules):
            return True
        own = [tap.module for tap in followed if tap.module in modules]
        if strays and not own:
            moved = self._ladder.add_strays(strays) or self._ladder.move(modules, reason, climb=True)
        elif strays:
            moved = self._ladder.move(own, reason, climb=False)
        else:  # layers that were given parameters, as if they were samples, are followed first
            moved = self._ladder.follow(expanded)
            moved = moved or self._ladder.move(modules or [tap.module for tap in followed], reason, climb=misfit.climb)
        if moved:
            self._untap()
            self._tap()
        return moved

    # -- guards ------------------------------------------------------------------------------------------------------

    def _guard(self, slot: Slot) -> None:
        """Refuse an ordinary gradient of the parameter before it is added: it bypassed the taps and is not clipped.

        The hook holds only the parameter's name, because a parameter referenced by its own hook is never freed.
        """
        name = slot.name

        def refuse(gradient: Tensor | None) -> None:
            # Autograd passes by without one where a compiled graph holds the parameter.
            if gradient is None or OWN_GRADIENTS.are_taken:
                return
            raise Unclipped(name)

        parameter, trainable = slot.parameter, slot.parameter.requires_grad
        if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it can never require a gradient
        parameter.requires_grad_(True)  # hooks can be registered only so; it may be switched on later
        self.hooks.append(parameter.register_hook(refuse))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trainable)
