"""Methods that dpscope can compare. A new one is a trainer class in a file of its own and one line here.

Other packages add theirs through the entry-point group `dpscope.methods` (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from dpscope.errors import UserError
from dpscope.packages import require

ENTRY_POINT_GROUP = "dpscope.methods"
STANDARD = "standard"  # the denominator of every ratio


@dataclass(frozen=True)
class Method:
    """Method: the name people type, and the place of its trainer class."""

    name: str
    trainer: str  # "package.module:Class"
    label: str
    aliases: tuple[str, ...] = ()
    private: bool = True
    package: str = ""  # that has to be installed, by its import name


BUILT_IN = (
    Method(STANDARD, "dpscope.trainers.base:StandardTrainer", "not private", ("vanilla",), private=False),
    Method("flat", "dpscope.trainers.opacus:DPSGDTrainer", "Opacus per-sample gradients", ("dpsgd",)),
    Method("ghost", "dpscope.trainers.opacus:DPGhostClippingTrainer", "Opacus ghost clipping", ("dpsgd_ghost",)),
    Method("flash", "dpscope.trainers.flash:DPFlashClippingTrainer", "flash clipping", ("flash_clip",)),
)

# Other ways to the same step, compared where they are asked for by name: each as its own documentation runs it.
RIVALS = (
    Method("functorch", "dpscope.trainers.opacus:DPFunctorchTrainer", "Opacus through torch.func"),
    Method("fastdp", "dpscope.trainers.fastdp:FastDPTrainer", "fastDP's book-keeping", package="fastDP"),
    Method("opake", "dpscope.trainers.opake:OpakeTrainer", "opake's vmap of grad", package="opake"),
)


@cache
def methods() -> dict[str, Method]:
    """Return every method by name: the built-in ones first, then those of installed packages."""
    found = {method.name: method for method in BUILT_IN}
    taken = {name for method in (*BUILT_IN, *RIVALS) for name in (method.name, *method.aliases)}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name not in taken:  # a package can add a method, not replace one
            found[entry.name] = Method(entry.name, entry.value, f"from {entry.module.partition('.')[0]}")
    return found


def resolve_method(name: str) -> Method:
    """Return the method of a name or alias."""
    known = {**methods(), **{method.name: method for method in RIVALS}}
    aliases = {alias: method for method in known.values() for alias in method.aliases}
    try:
        found = known.get(name) or aliases[name]
    except KeyError:
        raise UserError(f"unknown method {name!r}: choose from {', '.join([*known, *aliases])}") from None
    if found.package:
        require(found.package)
    return found
