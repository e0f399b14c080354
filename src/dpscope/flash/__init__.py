"""Flash clipping: exact per-sample gradient clipping in one backward pass.

Names are loaded when they are asked for; importing this package imports neither torch nor Opacus.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpscope.flash.engine import FlashEngine
    from dpscope.flash.gradients.clip_rules import Adaptive, Automatic, ClipRule, Normalised, PerGroup, PerLayer, Psac
    from dpscope.flash.gradients.explanation import PathTable
    from dpscope.flash.gradients.paths import Decision, Product, choose_path
    from dpscope.flash.graphed.step import make_graphed_step
    from dpscope.flash.layers import register_layer
    from dpscope.flash.opacus.opacus_arguments import UnsupportedModelError
    from dpscope.flash.opacus.privacy_engine import PrivacyEngine
    from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
    from dpscope.flash.opacus.scaler import GradScaler
    from dpscope.flash.opacus.training_state import TrainingState
    from dpscope.flash.oracle import OracleResult, run_oracle
    from dpscope.flash.padding.rows import pad_batch, real_rows, same_rows
    from dpscope.flash.taps.taps import LayerTap

_HOME = {
    "Adaptive": "gradients.clip_rules",
    "Automatic": "gradients.clip_rules",
    "ClipRule": "gradients.clip_rules",
    "Decision": "gradients.paths",
    "DPFlashOptimizer": "opacus.private_optimizer",
    "FlashEngine": "engine",
    "GradScaler": "opacus.scaler",
    "LayerTap": "taps.taps",
    "Normalised": "gradients.clip_rules",
    "OracleResult": "oracle",
    "PathTable": "gradients.explanation",
    "PerGroup": "gradients.clip_rules",
    "PerLayer": "gradients.clip_rules",
    "PrivacyEngine": "opacus.privacy_engine",
    "Product": "gradients.paths",
    "Psac": "gradients.clip_rules",
    "TrainingState": "opacus.training_state",
    "UnsupportedModelError": "opacus.opacus_arguments",
    "choose_path": "gradients.paths",
    "make_graphed_step": "graphed.step",
    "pad_batch": "padding.rows",
    "real_rows": "padding.rows",
    "register_layer": "layers",
    "run_oracle": "oracle",
    "same_rows": "padding.rows",
}

__all__ = [
    "Adaptive",
    "Automatic",
    "ClipRule",
    "DPFlashOptimizer",
    "Decision",
    "FlashEngine",
    "GradScaler",
    "LayerTap",
    "Normalised",
    "OracleResult",
    "PathTable",
    "PerGroup",
    "PerLayer",
    "PrivacyEngine",
    "Product",
    "Psac",
    "TrainingState",
    "UnsupportedModelError",
    "choose_path",
    "make_graphed_step",
    "pad_batch",
    "real_rows",
    "register_layer",
    "run_oracle",
    "same_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
