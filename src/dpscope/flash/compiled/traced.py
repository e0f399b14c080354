"""A tapped call inside a compiled graph: a pure function, whose backward gives x and g as gradients of capture leaves.

Recording is a side effect, and side effects of a backward pass can vanish from a compiled graph. So a traced call
takes, besides x, a capture leaf for each tensor that the engine wants of its backward: x, g, per-sample sums. They are
zeros of the right shape that nothing reads. Only their *gradients* are needed, and no compiler may drop a gradient. The
node that made the capture leaves (regions.py) runs outside of the graph and receives them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.comptime import comptime

from dpscope.flash.gradients.contributions import wide
from dpscope.flash.kernels import rms_norm
from dpscope.flash.taps.recorder import Engine, Recorder
from dpscope.flash.taps.taps import LayerTap
from dpscope.flash.torch_side.frames import break_graph


class Leaves(NamedTuple):
    """Capture leaves of a tap for one call. `like`: a tensor of the shape and dtype that x has to have."""

    like: Tensor
    leaves: tuple[Tensor, ...]
    last: bool  # of the calls in this forward


class _TraceVersions:
    """Versions of tensors of a graph, looked up while it is traced: they show writes into a tensor.

    In a graph a tensor's version is a number of the run. While code is traced, the fake tensor on which the compiler
    tries each operation counts writes too.
    """

    def __init__(self) -> None:
        self._traces: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self.last = ""

    def look(self, context: Any) -> None:
        """Note the version of the caller's local variable x; in a trace, of its fake tensor."""
        try:
            fake = context.get_local("x").as_fake()
            trace = self._traces.setdefault(fake.fake_mode, next(self._numbers))
            self.last = f"{trace}.{fake._version}"
        except Exception:  # a version of torch that does not tell: a tensor is then never the one before
            self.last = f"? {next(self._numbers)}"


_versions = _TraceVersions()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _version_seen() -> str:
    return _versions.last


def _look(context: Any) -> None:
    _versions.look(context)


class GraphCast:
    """The last cast of an input that a graph holds: q, k and v read one tensor, and give out one cast of it.

    A compiler would merge equal casts, but not those that leave the graph. Both tensors are dropped at the last call,
    before the graph ends: tensors that Python objects still hold then would become outputs of the graph.
    """

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.result: Tensor | None = None
        self.version = ""

    def of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x in `dtype`, without a history."""
        comptime(_look)
        version = _version_seen()
        if self.source is not x or self.version != version or self.result is None or self.result.dtype != dtype:
            self.source, self.version, self.result = x, version, x.detach().to(dtype)
        return self.result

    def clear(self) -> None:
        self.source = self.result = None
        self.version = ""


class Traced(torch.autograd.Function):
    """Autograd function of `tap.forward` and `tap.gradients`. Its pieces become the gradients of the capture leaves.

    A call in a checkpoint has one capture leaf more, a ticket: its gradient is 1. The sum of two calls would be 2.
    """

    @staticmethod
    def forward(
        ctx: Any, tap: LayerTap, x: Tensor, cast: Tensor | None, live: tuple[bool, ...], *leaves: Tensor
    ) -> Tensor:
        """Run the layer on `cast`, which is x in the layer's dtype without history; on x if there is none."""
        ctx.tap, ctx.live, ctx.recorder = tap, live, tap.engine.graphs
        ctx.dtypes = tuple(each.dtype for each in leaves)
        output = tap.forward(ctx, x if cast is None else cast)
        # Autograd forbids in-place operations on a view made in here, such as ReLU(inplace=True).
        return torch.ops.aten._unsafe_view.default(output, output.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx, *pieces = ctx.tap.gradients(ctx, g)
        # A graph gives no integers out as a gradient. float64 holds those of any table of embeddings.
        left = [piece for piece in pieces if piece is not None]
        given = [piece if piece.is_floating_point() else piece.to(torch.float64) for piece in left]
        if len(given) < len(ctx.dtypes):
            given.append(torch.ones((), dtype=torch.float32, device=g.device))
        # Autograd would round a gradient to its capture leaf's dtype in silence.
        for piece, dtype in zip(given, ctx.dtypes, strict=True):
            assert torch.promote_types(piece.dtype, dtype) == dtype
        return None, dx, None, None, *given


class GraphCalls:
    """Capture leaves of a tap for its calls in one forward, in their order. `used`: how many of them graphs hold.

    Calls in checkpoints are not `counted`: a checkpoint's graph may not remember anything.
    """

    def __init__(self, leaves: tuple[Leaves, ...], *, counted: bool) -> None:
        self.leaves = leaves
        self.counted = counted
        self.used = 0


class GraphRecorder(Recorder):
    """Recorder of calls in compiled graphs: pure tensor work. The checks of eager calls ran before the graph began."""

    notes_inputs = False
    sums_at_once = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.last_cast = GraphCast()

    @staticmethod
    def save(ctx: Any, *tensors: Tensor | None) -> None:
        ctx.save_for_backward(*tensors)

    @staticmethod
    def saved(ctx: Any) -> tuple[Any, ...]:
        tensors: tuple[Any, ...] = ctx.saved_tensors
        return tensors

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def bias_sums(g: Tensor) -> Tensor:
        return g.sum(1, dtype=wide(g.dtype))

    # The compiler fuses each of these into one pass without a temporary.

    @staticmethod
    def rms_norm_gradients(*operands: Any, **options: Any) -> tuple[Tensor | None, Tensor | None]:
        return rms_norm.by_torch(*operands, **options)

    @staticmethod
    def layer_norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        dtype = wide(torch.promote_types(g.dtype, x.dtype))
        of_g, (mean, rstd) = g.to(dtype), (each.to(dtype).reshape(*x.shape[:2], 1) for each in (mean, rstd))
        return ((x.to(dtype) - mean) * rstd * of_g).sum(1), of_g.sum(1)

    def call(self, tap: LayerTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the tap in a graph, if it was handed capture leaves that fit; otherwise break the graph around it."""
        live = tap.live()
        if not torch.is_grad_enabled() or True not in live:
            return tap.original(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        calls = tap.graph_calls
        if calls is None or calls.used >= len(calls.leaves):
            return break_graph(tap, (x,), {})
        like, leaves, last = calls.leaves[calls.used]
        if like.dim() == x.dim() + 1 and like.shape[0] * like.shape[1] == x.shape[0]:  # a block of rows for each sample
            return self.call(tap, (x.reshape(like.shape[0], like.shape[1], *x.shape[1:]),), {}).flatten(0, 1)
        given, x = x, tap.prepare(x)
        if x.shape != like.shape or x.dtype != like.dtype:
            return break_graph(tap, (given,), {})
        rows = leaves[0].shape[0]
        if x.shape[0] != rows:  # one row for all samples
            x = x.expand(rows, *x.shape[1:])
        cast, dtype = None, tap.operand_dtype(x)
        # Autocast may have been on when the leaves were made, and be off now: what the layer leaves would be rounded.
        if any(each.dim() and torch.promote_types(dtype or x.dtype, each.dtype) != each.dtype for each in leaves):
            return break_graph(tap, (given,), {})
        if dtype is not None and dtype != x.dtype:
            cast = self.last_cast.of(x, dtype) if calls.counted else x.detach().to(dtype)
        if calls.counted:
            calls.used += 1
            if last:
                self.last_cast.clear()
        return Traced.apply(tap, x, cast, live, *leaves)  # type: ignore[no-untyped-call]
