"""Models that Opacus cannot train, each with a sentence that names the module and what to write instead.

It is checked at three moments: before the model is wrapped (`require_supported`), at the first call of each hooked
module (`CallWatch`), and in the errors that Opacus raises (`refusals`). Calls matter because Opacus's hooks see
positional arguments alone, and run a module without a rule again under torch.func.vmap with its first argument: a mask
or a flag is left out without an error.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import opacus.layers
import torch
from opacus.grad_sample import GradSampleModule
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, RNNLinear
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpscope.errors import UserError
from dpscope.flash.ranks.layout import is_fsdp
from dpscope.flash.torch_side import dry_run
from dpscope.units import list_names, name_module

REFUSES = "Opacus refuses this model"  # Opacus's own word
CANNOT = "Opacus cannot train this model"  # what follows from how it works

HALF_PRECISION = (torch.bfloat16, torch.float16)

CHECKPOINTED = (
    "Opacus cannot train checkpointed blocks: backward runs a block's forward again, Opacus's hooks take that for a "
    "second call of every layer, and no per-sample gradient is ever complete. Leave out --checkpoint-blocks, or "
    "compare --methods standard,flash"
)

NOT_COMPILED = (
    "Opacus cannot train a compiled model: it takes per-sample gradients in hooks of modules, which torch.compile does "
    "not trace (github.com/pytorch/opacus/issues/575). Compare --methods standard,flash, or measure it "
    "with --compile none"
)

BATCH_FIRST = "keep the batch first and unfolded, and expand positions to a row for each sample"


def require_supported(model: nn.Module) -> None:
    """Raise `UserError` for what Opacus says it does not support, and for layers that its rules do not cover."""
    refused = [
        f"{name_module(name, module)}: {_one_line(error)}"
        for name, module in trainable_modules(model)
        for error in ModuleValidator.VALIDATORS.get(type(module), lambda _: [])(module)
    ]
    if refused:
        raise UserError(
            f"{REFUSES}: {_first_of(refused)} opacus.validators.ModuleValidator.fix(model) makes the replacement"
        )
    if errors := ModuleValidator.validate(model):  # of the model as a whole: its mode
        raise UserError(f"{REFUSES}: {_one_line(errors[0])}: call model.train()")
    if narrow := [name for name, p in model.named_parameters() if p.requires_grad and p.dtype in HALF_PRECISION]:
        raise UserError(
            f"{CANNOT}: it trains parameters of 16 bits ({list_names(narrow, 1)}), and Opacus rounds sums before the "
            "noise. Leave out --param-dtype, train adapters (--lora), or compare --methods standard,flash"
        )
    if GradSampleModule.validate(model):
        holders = [
            f"{name_module(name, module)} holds the buffer {list_names(dict(module.named_buffers()))}"
            for name, module in trainable_modules(model)
            if any(True for _ in module.buffers())
        ]
        raise UserError(
            f"{REFUSES}: {_first_of(holders)}, and buffers in a module with trainable parameters of its own are not "
            "supported: give these parameters to a submodule without buffers"
        )
    for name, module in trainable_modules(model):
        if type(module) is nn.LayerNorm and module.bias is None:
            raise UserError(
                f"{CANNOT}: {name_module(name, module)} has no bias, which Opacus's rule for LayerNorm needs: "
                "make it with bias=True, or use nn.RMSNorm"
            )


class CallWatch:
    """Check of the first call of each hooked module; it refuses inputs that Opacus would not see."""

    def __init__(self, wrapped: GradSampleModule, model: nn.Module) -> None:
        self._rules = wrapped.GRAD_SAMPLERS
        self._sizes: dict[str, torch.Size] = {}  # name of a module -> shape of what Opacus takes for its batch
        self._handles: list[RemovableHandle] = []
        names = {module: name_module(name, module) for name, module in model.named_modules()}
        for module in wrapped.iterate_submodules(wrapped._module):
            if type(module) not in (DPRNN, DPLSTM, DPGRU, RNNLinear):
                self._handles += self._watch(names[module], module)

    def require_batch_first(self, samples: int) -> None:
        """Raise `UserError` if a module saw another number of samples than the loss, and stop watching."""
        while self._handles:
            self._handles.pop().remove()
        for called, shape in self._sizes.items():
            if not shape or shape[0] != samples:
                raise UserError(
                    f"{CANNOT}: {called} was given a tensor of shape {tuple(shape)} in a batch of {samples} samples, "
                    f"and Opacus takes dimension 0 for the samples: {BATCH_FIRST}"
                )

    def _watch(self, called: str, module: nn.Module) -> Iterator[RemovableHandle]:
        # fully_shard gives a Linear the class FSDPLinear, of FSDPModule and Linear.
        has_rule = (type(module).__bases__[1] if is_fsdp(module) else type(module)) in self._rules

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not module.training:
                raise UserError(f"{CANNOT}: {called} is in evaluation mode, where its hooks see nothing: call train()")
            if why := _unseen_input(module, args, kwargs):
                raise UserError(f"{CANNOT}: {called} {why}")
            self._sizes[called] = args[-1].shape if isinstance(module, nn.EmbeddingBag) else args[0].shape

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not isinstance(output, Tensor):
                raise UserError(
                    f"{CANNOT}: {called} owns parameters and returns a {type(output).__name__}, where Opacus's hooks "
                    f"need one tensor: {_replacement_for(module)}"
                )
            further = [f"argument {place}" for place in range(2, len(args) + 1)]
            further += [name for name, value in kwargs.items() if value is not None]
            ignored = _ignores_further_arguments(module, args[0], output) if further and not has_rule else True
            if ignored is None:
                raise UserError(
                    f"whether Opacus can train {called}, which is given {list_names(further)}, depends on values that "
                    "a plan does not know: measure it (dpscope compare)"
                )
            if not ignored:
                raise UserError(
                    f"{CANNOT}: {called} owns parameters, and Opacus, which has no rule for it, takes their gradients "
                    f"from its first argument alone, without {list_names(further)}: {_replacement_for(module)}"
                )

        yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(after, with_kwargs=True, prepend=True)


def _unseen_input(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return why Opacus's hooks would not see a module's input, and what to do about it."""
    strange = [type(value).__name__ for value in args if not isinstance(value, Tensor)]
    if strange:
        instead = _replacement_for(module)
        return f"owns parameters and is given a {strange[0]}, where Opacus's hooks need tensors: {instead}"
    if not args:
        expected = inspect.signature(module.forward).parameters
        first = expected.get(next(iter(kwargs), ""))
        by_position = len(kwargs) == 1 and first is not None and first.kind in _POSITIONAL
        return (
            f"owns parameters and is given {list_names(kwargs) or 'nothing'} by keyword, which Opacus's hooks do not "
            f"see: {'pass it by position' if by_position else _replacement_for(module)}"
        )
    if isinstance(module, nn.EmbeddingBag) and len(args) < 2:
        return "is called without offsets, which Opacus's rule for EmbeddingBag needs: use nn.Embedding and a sum"
    return None


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@torch.no_grad()
def _ignores_further_arguments(module: nn.Module, first: Tensor, output: Tensor) -> bool | None:
    """Return whether the module's output depends on its first argument alone, which is all that Opacus passes on.

    None if there are no values to tell it from.
    """
    with torch.random.fork_rng([output.device] if output.is_cuda else []):
        try:
            alone = module.forward(first)
        except Exception:
            return False
    alike = isinstance(alone, Tensor) and alone.shape == output.shape
    if alike and dry_run.current() is not None:
        return None
    return alike and torch.allclose(alone.double(), output.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _replacement_for(module: nn.Module) -> str:
    """Return what to write in place of a module that owns parameters and that Opacus cannot run through vmap."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn."):
            if replacement := getattr(opacus.layers, f"DP{kind.__name__}", None):
                return f"use opacus.layers.{replacement.__name__}"
            if kind is not nn.Module:
                return "write it with layers that Opacus has rules for, such as nn.Linear"
    return "give its own parameters to a submodule that takes one tensor and returns one"


@contextmanager
def refusals(model: nn.Module) -> Iterator[None]:
    """Turn Opacus's errors about models that it cannot train into `UserError`; others pass."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        sentence = _explained(error, model)
        if sentence is None:
            raise
        raise UserError(sentence) from error


def _explained(error: Exception, model: nn.Module) -> str | None:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_opacus = bool(frames) and _is_opacus(frames[-1])
    said = _one_line(error)
    hooks = ("capture_activations_hook", "capture_backprops_hook")
    at = next((frame.f_locals.get("module") for frame in frames if frame.f_code.co_name in hooks), None)
    names = {module: name for name, module in model.named_modules()}
    where = "a layer" if at is None else name_module(names.get(at, ""), at)
    if isinstance(error, NotImplementedError) and in_opacus:
        return f"{REFUSES}: {said}{'' if at is None else f' (at {where})'}"
    if "BackwardHookFunction" in said and "inplace" in said:
        return (
            f"{CANNOT}: an operation changes the output of one of its layers in place, which backward hooks forbid: "
            "write h = h + x for h += x, and ReLU() for ReLU(inplace=True)"
        )
    if in_opacus and _NOT_REACHED.search(said) and (unreached := _not_reached(model)):
        return (
            f"{CANNOT}: no per-sample gradient reaches {list_names(unreached)}. Opacus sees what goes through the "
            "forward of the module that owns a parameter: call that module, or freeze what is not used "
            "(requires_grad_(False))"
        )
    if "view size is not compatible" in said and any(_is_opacus(frame) for frame in frames):
        return f"{CANNOT}: {where} is given a tensor that is not contiguous: call .contiguous() on it"
    by_vmap = any(_module_of(frame) == "opacus.grad_sample.functorch" for frame in frames)
    if by_vmap and at is not None and not _DEVICE_ERROR.search(said):
        return (
            f"{CANNOT}: it has no rule for {where} and runs it through torch.func.vmap, which cannot follow "
            f"it ({type(error).__name__}: {said if len(said) <= 120 else said[:120] + '…'}): {_replacement_for(at)}"
        )
    return None


# How flat, ghost and ghost's optimizer stumble over a parameter without per-sample gradient.
_NOT_REACHED = re.compile(
    r"Per sample gradient is not initialized|'_norm_sample'|'NoneType' object has no attribute 'data'"
)
_DEVICE_ERROR = re.compile(r"CUDA|CUBLAS|CUDNN|allocate memory|not enough memory")


def _not_reached(model: nn.Module) -> list[str]:
    def reached(parameter: nn.Parameter) -> bool:
        seen = getattr(parameter, "grad_sample", None) is not None or hasattr(parameter, "_norm_sample")
        return seen and (parameter.grad is not None or not hasattr(parameter, "_norm_sample"))

    return [name for name, p in model.named_parameters() if p.requires_grad and not reached(p)]


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_opacus(frame: FrameType) -> bool:
    return _module_of(frame).partition(".")[0] == "opacus"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _first_of(sentences: Sequence[str]) -> str:
    more = f" (and {len(sentences) - 1} more such)" if len(sentences) > 1 else ""
    return f"{sentences[0]}{more}"
