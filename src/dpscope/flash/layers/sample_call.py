"""One call of a per-sample module, taken apart into samples and what they share, and run sample by sample."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from dpscope.errors import UserError
from dpscope.flash.layers.per_sample import PerSampleTap, parameter_key
from dpscope.flash.sample_rows.proxy import Proxy
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST, number_of, renumbered, take
from dpscope.flash.torch_side.frames import eagerly
from dpscope.flash.torch_side.module_state import Remains, token, uncached_parametrizations
from dpscope.flash.torch_side.own_functions import torchs_own

# What a forward may return besides tensors.
_RETURNED = (type(None), bool, int, float, str)

_EMBEDDING = F.embedding
_EMBEDDING_ARGUMENTS = inspect.signature(F.embedding)


class _Semantics(TorchFunctionMode):
    """Operators that behave differently for a single sample than in ordinary training.

    Row `padding_idx` of an embedding receives no gradient; vmap's rule, where weights are batched, gives it one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = torchs_own(func), kwargs or {}
        output = func(*args, **kwargs)
        if func is not _EMBEDDING:
            return output
        call = _EMBEDDING_ARGUMENTS.bind(*args, **kwargs).arguments
        padding_idx, rows = call.get("padding_idx"), call["weight"].shape[0]
        if padding_idx is None:
            return output
        return torch.where((call["input"] == padding_idx % rows).unsqueeze(-1), output.detach(), output)


@contextmanager
def _no_efficient_attention() -> Iterator[None]:
    """Switch off CUDA's memory-efficient attention: its backward fails under vmap ("LSE is not correctly aligned")."""
    cuda: Any = torch.backends.cuda
    efficient, by_hand = cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_math_sdp(efficient or by_hand)
    try:
        yield
    finally:
        cuda.enable_mem_efficient_sdp(efficient)
        cuda.enable_math_sdp(by_hand)


@contextmanager
def _no_checkpoints() -> Iterator[None]:
    """Let a checkpoint inside vmap fail now, because backward would rerun it outside of vmap; a loop then takes over.

    Hooks on saved tensors that are active already, as in a checkpoint around the module, cannot be forbidden.
    """
    with ExitStack() as stack:
        with suppress(RuntimeError):
            stack.enter_context(disable_saved_tensors_hooks("checkpoints and other hooks on saved tensors"))
        yield


class SampleCall:
    """Call of a per-sample module.

    leaves  its arguments, flat
    mapped  which of them hold one entry a sample, and in which dimension
    """

    def __init__(self, tap: PerSampleTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tap = tap
        self.args_count = len(args)
        self.kwarg_names = list(kwargs)
        self.leaves: list[Any] = []
        self.specs: list[Any] = []
        self.names: list[str] = []  # of the argument each leaf belongs to
        names = _argument_names(tap.original, args, kwargs)
        for name, value in zip(names, (*args, *kwargs.values()), strict=True):
            leaves, spec = pytree.tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
            self.leaves += [leaf.samples(tap.module) if isinstance(leaf, Proxy) else leaf for leaf in leaves]
            self.specs.append(spec)
            self.names += [name] * len(leaves)
        self.batch: int = tap.engine.forwards.batch_for(tap, args, kwargs)
        self.packed = [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, PackedSequence)]
        self.mapped: dict[int, int] = {}  # leaf -> dimension of samples
        self.expanded: set[int] = set()  # leaves that had one row for all samples
        main = not self.packed
        for index, leaf in enumerate(self.leaves):
            number = number_of(leaf)
            if isinstance(leaf, Tensor):
                self._place(index, leaf, main)
                main = False
            if number is not None and number != self.batch:
                tap.shared_arguments.add(self._number_key(index))

    def admit(self) -> None:
        self.tap.engine.forwards.admit_call(self.tap, self.main()[0].dim(), shared=self.is_shared())

    def main(self) -> tuple[Tensor, int]:
        """Return the first tensor that has a row for each sample, and the dimension of samples."""
        index = next((index for index in self.mapped if index not in self.expanded), next(iter(self.mapped), None))
        return (torch.empty(0), 0) if index is None else (self.leaves[index], self.mapped[index])

    def is_shared(self) -> bool:
        """Return whether all arguments are shared by the samples."""
        return self.batch != 1 and not self.packed and self.expanded >= self.mapped.keys()

    def kind(self) -> Any:
        """Return a key of everything that output dtypes and the treatment of arguments may depend on."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        devices = {leaf.device.type for leaf in tensors} or {"cpu"}
        return (
            self.batch > 1,  # one sample alone shows nothing of how a module treats several
            tuple((leaf.dtype, leaf.dim()) for leaf in tensors),
            tuple(self.mapped),
            self.tap.module.training,
            *(torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)),
        )

    # -- which arguments are per sample --------------------------------------------------------------------------------

    def key(self, index: int) -> tuple[Any, ...]:
        """Return a key for an argument's place in every call of the module."""
        return self.names[index], index - self.names.index(self.names[index]), self.leaves[index].dim()

    def _number_key(self, index: int) -> tuple[Any, ...]:
        return self.names[index], index - self.names.index(self.names[index]), "number"

    def open_arguments(self) -> list[int]:
        """Return leaves that had as many rows as there were samples for one number of samples alone."""
        seen = self.tap.numbers_of
        return [index for index in self.mapped if len(seen.get(self.key(index), ())) == 1]

    def _place(self, index: int, leaf: Tensor, main: bool) -> None:
        """Decide by the size in this call if that is conclusive, otherwise by what other calls have shown.

        If a size differs from the number of samples once, the argument is shared for good: a mask (T, T) stays shared
        in a later batch of T samples. An equal size may be a coincidence until two numbers of samples were seen.
        """
        name, key = self.names[index], self.key(index)
        is_shared, numbers = key in self.tap.shared_arguments, self.tap.numbers_of.get(key, set())
        dim = self.tap.input_dims.get(name, 0)
        size = leaf.shape[dim] if dim is not None and leaf.dim() > dim else None
        certain = main or leaf.requires_grad or dim is None or name in self.tap.input_dims
        if dim is not None and size == self.batch and (certain or not is_shared):
            self.mapped[index] = dim
            if not certain and self.batch > 1:
                self.tap.numbers_of.setdefault(key, set()).add(self.batch)
        elif dim is not None and size == 1 and (leaf.requires_grad or main):
            shape = [self.batch if axis == dim else length for axis, length in enumerate(leaf.shape)]
            self.leaves[index] = leaf.expand(shape)
            self.mapped[index] = dim
            self.expanded.add(index)
        elif leaf.requires_grad or (main and leaf.dim()) or (certain and leaf.dim() > 2) or len(numbers) > 1:
            raise self.tap.does_not_fit(
                f"{self.tap.name} was given a tensor of shape {tuple(leaf.shape)} ({name}) in a batch of {self.batch} "
                f"samples: {KEEP_BATCH_FIRST}"
            )
        elif size is not None and size != self.batch:
            self.tap.shared_arguments.add(key)

    # -- running -------------------------------------------------------------------------------------------------------

    def call(self, parameters: dict[str, Tensor], leaves: Sequence[Any]) -> tuple[list[Any], Any, dict[str, Any]]:
        """Run the module's forward. Return its outputs, flat, their structure, and what it left on the module."""
        values, start = [], 0
        for spec in self.specs:
            values.append(pytree.tree_unflatten(list(leaves[start : start + spec.num_leaves]), spec))
            start += spec.num_leaves
        args = tuple(values[: self.args_count])
        kwargs = dict(zip(self.kwarg_names, values[self.args_count :], strict=True))
        buffers = dict(self.tap.module.named_buffers())
        given = {parameter_key(key): buffer.clone() for key, buffer in buffers.items()}
        replaced = {**given, **parameters}
        untouched = token(values)
        with uncached_parametrizations(), eagerly():  # modules inside may be compiled
            output, changes = functional_call(self.tap.functional, replaced, args, kwargs)
        if token(values) != untouched:
            self._refuse_written_arguments()
        for name, (key, buffer) in zip(buffers, given.items(), strict=True):
            if key not in parameters and (replaced[key] is not buffer or buffer._version):
                changes[name] = replaced[key]
        found, spec = pytree.tree_flatten(output)
        for leaf in found:
            if not isinstance(leaf, (Tensor, *_RETURNED)):
                raise self.tap.does_not_fit(
                    f"{self.tap.name} returns a {type(leaf).__name__}; flash clipping needs tensors, in tuples, lists "
                    "or dictionaries"
                )
        return found, spec, changes

    def _refuse_written_arguments(self) -> NoReturn:
        raise UserError(
            f"{self.tap.name} ({type(self.tap.module).__name__}) changes its arguments in forward (a cache, a "
            "dictionary, a tensor written in place), and its samples run one by one here: whoever reads them "
            "afterwards would miss what it wrote; return it from forward instead, or switch the cache off "
            "(use_cache=False)"
        )

    def _with(self, replacements: Any) -> list[Any]:
        """Return the arguments for one sample, of which `replacements` are its own."""
        leaves = list(self.leaves)
        for index, leaf in enumerate(leaves if self.tap.engine.verification.told else ()):
            if number_of(leaf) == self.batch and self._number_key(index) not in self.tap.shared_arguments:
                leaves[index] = renumbered(leaf, 1)
        for index, leaf in zip(self.mapped, replacements, strict=True):
            leaves[index] = leaf
        return leaves

    def output_dim(self, position: int) -> int:
        dims = self.tap.output_dims
        return dims[position] if position < len(dims) else 0

    def run(self, expanded: dict[str, Tensor], *, commit: bool) -> Any:
        """Run all samples, by vmap or one by one. `commit` writes the state that all of them left to the module."""
        if self.batch == 0:
            return self.on_empty_batch(expanded)
        if self.packed and not self.tap.by_loop:
            self.tap.by_loop = True
            self.tap.describe("a loop over samples, for they are packed")
        if not self.tap.by_loop:
            try:
                return self.by_vmap(expanded, commit=commit)
            except (UserError, _StopRecomputationError):
                raise  # a checkpointed forward that runs again is stopped, by an exception, once it has all it needs
            except Exception as error:  # whatever vmap cannot follow; the loop meets real mistakes again
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.tap.by_loop = True
                self.tap.describe(f"a loop over samples, for vmap failed: {reason}")
        return self.by_loop(expanded, commit=commit)

    def on_empty_batch(self, expanded: dict[str, Tensor]) -> Any:
        found, spec, _ = self.call({key: value.sum(0) for key, value in expanded.items()}, self.leaves)
        return pytree.tree_unflatten(found, spec)

    def by_vmap(self, expanded: dict[str, Tensor], *, commit: bool) -> Any:
        shape: list[Any] = []
        remains = Remains(self.tap.module, self.tap.name)

        def one(parameters: dict[str, Tensor], *inputs: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            inputs = tuple(leaf.unsqueeze(dim) for leaf, dim in zip(inputs, self.mapped.values(), strict=True))
            found, spec, changes = self.call(parameters, self._with(inputs))
            state = {path: value for path, value in changes.items() if isinstance(value, Tensor)}
            plain = {path: value for path, value in changes.items() if path not in state}
            shape[:] = [found, spec, remains.agreed([plain])]
            tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
            return tuple(self._with_rows(leaf, position) for position, leaf in enumerate(tensors)), state

        inputs = [self.leaves[index] for index in self.mapped]
        with _Semantics(), _no_efficient_attention(), _no_checkpoints():
            run = vmap(one, in_dims=(0, *self.mapped.values()), randomness="different")
            stacked, state = run(expanded, *inputs)
        found, spec, agreed = shape
        agreed.update({path: remains.agreed_rows(path, rows) for path, rows in state.items()})
        if commit:
            remains.commit(agreed)
        dims = map(self.output_dim, range(len(stacked)))
        tensors = iter([leaf.movedim(0, dim).flatten(dim, dim + 1) for leaf, dim in zip(stacked, dims, strict=True)])
        return pytree.tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in found], spec)

    def _with_rows(self, leaf: Tensor, position: int) -> Tensor:
        """Return an output of one sample: a row of the batch's output, or a block of rows (a router's, of tokens)."""
        if leaf.dim() <= self.output_dim(position):
            raise self.tap.does_not_fit(
                f"{self.tap.name} gave a tensor of shape {tuple(leaf.shape)} for one sample: {KEEP_BATCH_FIRST}"
            )
        return leaf

    def by_loop(self, expanded: dict[str, Tensor], *, commit: bool) -> Any:
        split = {key: value.unbind(0) for key, value in expanded.items()}
        inputs = [self.leaves[index].split(1, dim) for index, dim in self.mapped.items()]
        answers, left = [], []
        with _Semantics():
            for b in range(self.batch):
                parameters = {key: values[b] for key, values in split.items()}
                given = self._with(chunks[b] for chunks in inputs)
                for index in self.packed:
                    given[index] = take(given[index], torch.tensor([b]), 0)
                found, spec, changes = self.call(parameters, given)
                answers.append(found)
                left.append(changes)
        remains = Remains(self.tap.module, self.tap.name)
        agreed = remains.agreed(left)
        if commit:
            remains.commit(agreed)
        joined, position = [], 0
        for leaves in zip(*answers, strict=True):
            if isinstance(leaves[0], Tensor):
                rows = [self._with_rows(leaf, position) for leaf in leaves]
                joined.append(torch.cat(rows, self.output_dim(position)))
                position += 1
            else:
                joined.append(leaves[0])
        return pytree.tree_unflatten(joined, spec)


def _argument_names(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the parameter names of forward for args, then those of kwargs."""
    positional = [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = [*positional, *(f"argument {index}" for index in range(len(positional), len(args)))]
    return [*names[: len(args)], *kwargs]
