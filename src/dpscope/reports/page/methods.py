"""What each method on the page is, in a sentence, and what to write to train with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscope.reports.palette import looks_of
from dpscope.reports.tables import Row

WHAT = {
    "standard": "Ordinary training, not private: what the others are divided by.",
    "flat": "Opacus as it comes: keeps every sample's gradient of every parameter, clips each and sums them.",
    "ghost": (
        "Opacus's ghost clipping: a first backward pass for the norms of the samples' gradients, a second one for "
        "their clipped sum; no sample's gradient is kept."
    ),
    "flash": (
        "dpscope's flash clipping: one ordinary backward pass, the norms from what it leaves behind, then the clipped "
        "sum with one product a layer; exact, and with Opacus's accountants, loaders and noise."
    ),
}
FOREIGN = "A method of another package than dpscope: its own documentation says what it is."

# Method -> where its engine is imported from, what make_private returns, and what it is asked for beyond the rest.
SWITCHES = {
    "flat": ("opacus", "model, optimizer, loader", ""),
    "ghost": ("opacus", "model, optimizer, criterion, loader", '\n    criterion=criterion, grad_sample_mode="ghost",'),
    "flash": ("dpscope.flash", "model, optimizer, loader", ""),
}
CODE = """\
from {package} import PrivacyEngine

engine = PrivacyEngine()
{returned} = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier={noise_multiplier}, max_grad_norm={max_grad_norm},{more}
)"""


@dataclass(frozen=True)
class MethodNote:
    method: str
    colour: str
    what: str
    code: str  # "" where there is nothing to write


def describe_methods(rows: Sequence[Row]) -> list[MethodNote]:
    """Of the methods of all rows, in their order; with the noise and the clipping norm of the first."""
    looks = looks_of(rows)
    return [
        MethodNote(method, looks[method]["colour"], WHAT.get(method, FOREIGN), switch(method, rows[0]))
        for method in dict.fromkeys(row.method for row in rows)
    ]


def switch(method: str, row: Row) -> str:
    """The lines before the training loop, which stays as it is."""
    if method not in SWITCHES:
        return ""
    package, returned, more = SWITCHES[method]
    spec = row.first.spec
    settings = {name: float(spec.get(name, 1.0)) for name in ("noise_multiplier", "max_grad_norm")}
    return CODE.format(package=package, returned=returned, more=more, **settings)
