"""Flash clipping: exact per-sample gradient clipping in one backward pass.

Names are loaded when they are asked for; importing this package imports neither torch nor Opacus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpscope.places import names_at

if TYPE_CHECKING:
    from dpscope.flash.engine import FlashEngine as FlashEngine
    from dpscope.flash.gradients.clip_rules import Adaptive as Adaptive
    from dpscope.flash.gradients.clip_rules import Automatic as Automatic
    from dpscope.flash.gradients.clip_rules import ClipRule as ClipRule
    from dpscope.flash.gradients.clip_rules import Normalised as Normalised
    from dpscope.flash.gradients.clip_rules import PerGroup as PerGroup
    from dpscope.flash.gradients.clip_rules import PerLayer as PerLayer
    from dpscope.flash.gradients.clip_rules import Psac as Psac
    from dpscope.flash.gradients.explanation import PathTable as PathTable
    from dpscope.flash.gradients.paths import Decision as Decision
    from dpscope.flash.gradients.paths import Product as Product
    from dpscope.flash.gradients.paths import choose_path as choose_path
    from dpscope.flash.graphed.step import make_graphed_step as make_graphed_step
    from dpscope.flash.layers import register_layer as register_layer
    from dpscope.flash.opacus.opacus_arguments import UnsupportedModelError as UnsupportedModelError
    from dpscope.flash.opacus.privacy_engine import PrivacyEngine as PrivacyEngine
    from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer as DPFlashOptimizer
    from dpscope.flash.opacus.scaler import GradScaler as GradScaler
    from dpscope.flash.opacus.training_state import TrainingState as TrainingState
    from dpscope.flash.oracle import OracleResult as OracleResult
    from dpscope.flash.oracle import run_oracle as run_oracle
    from dpscope.flash.padding.rows import pad_batch as pad_batch
    from dpscope.flash.padding.rows import real_rows as real_rows
    from dpscope.flash.padding.rows import same_rows as same_rows
    from dpscope.flash.taps.taps import LayerTap as LayerTap

__getattr__, __all__ = names_at(
    __name__,
    {
        "engine": "FlashEngine",
        "gradients.clip_rules": "Adaptive Automatic ClipRule Normalised PerGroup PerLayer Psac",
        "gradients.explanation": "PathTable",
        "gradients.paths": "Decision Product choose_path",
        "graphed.step": "make_graphed_step",
        "layers": "register_layer",
        "opacus.opacus_arguments": "UnsupportedModelError",
        "opacus.privacy_engine": "PrivacyEngine",
        "opacus.private_optimizer": "DPFlashOptimizer",
        "opacus.scaler": "GradScaler",
        "opacus.training_state": "TrainingState",
        "oracle": "OracleResult run_oracle",
        "padding.rows": "pad_batch real_rows same_rows",
        "taps.taps": "LayerTap",
    },
)


def __dir__() -> list[str]:
    return __all__
