"""Clipping rules: how a sample's factors follow from its norms, and how far one sample can move the sum.

With n the norm of a sample's gradient (over all parameters, or over the parameters of a group) and C its bound:

| rule         | factor                | groups                 | remarks                                      |
| ------------ | --------------------- | ---------------------- | -------------------------------------------- |
| `flat`       | min(1, C / n)         | one                    | the default                                  |
| `automatic`  | C / (n + γ)           | one                    | Bu et al. 2022 (AUTO-S): no C to tune        |
| `normalised` | C / n                 | one                    | every sample has the norm C                  |
| `psac`       | C / (n + r / (n + r)) | one                    | Xia et al. 2023: small gradients stay small  |
| `per_layer`  | min(1, C_g / n_g)     | one for each parameter | Opacus's `per_layer`                         |
| `per_group`  | min(1, C_g / n_g)     | by patterns of names   |                                              |
| `adaptive`   | min(1, C / n)         | one                    | C follows a quantile of the norms, privately |

A sample has no share in a group where its gradient is not finite. In each group its share has a norm of at most C_g, so
its total norm is at most `sensitivity()`. The standard deviation of the noise is the noise multiplier times that. A new
rule is a class here and an entry of `CLIP_RULES`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpscope.errors import UserError

Bounds = float | Sequence[float] | Mapping[str, float]


class ClipRule:
    """Clipping rule `flat`: each sample's gradient, over all parameters, is clipped at C. Base class of all rules.

    Subclasses change the factors, the groups, or how C changes between steps. Each engine has a copy of the rule that
    it is given: `engine.clip`.

    Args:
        max_grad_norm: The bound C.

    Raises:
        UserError: The bound is not a finite number above 0.

    Example:
        >>> class Halved(ClipRule):
        ...     def factors(self, norms, bounds):
        ...         return super().factors(norms, bounds) / 2
        >>> engine = FlashEngine(model, clipping=Halved(1.0))
    """

    name: ClassVar[str] = "flat"
    learns: ClassVar[bool] = False  # whether a step changes the bounds
    bounds: list[float]

    def __init__(self, max_grad_norm: float = 1.0) -> None:
        self.bounds = [_bound(max_grad_norm)]

    def bind(self, names: Sequence[str]) -> None:
        """Receive the `names` of the trained parameters. Called once, before the first step."""

    def group_of(self, name: str) -> int:
        """Return the index in `bounds` of the group of parameter `name`."""
        return 0

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        """Return factors for `norms`, (G, B), given `bounds`: (G, 1), or a number for one group.

        A factor times its norm must be at most the bound.
        """
        return (bounds / norms).clamp(max=1.0)

    def sensitivity(self) -> float:
        """Return how far adding or removing one sample can move the clipped sum, in the Euclidean norm."""
        return math.hypot(*self.bounds)

    @property
    def max_grad_norm(self) -> float:
        """The bound C of all groups together. Setting it scales the bound of every group."""
        return self.sensitivity()

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        before = self.sensitivity()
        alone = self.bounds == [before]  # then no rounding
        self.bounds = [_bound(value)] if alone else [bound * _bound(value) / before for bound in self.bounds]

    # -- rules that learn from a step ----------------------------------------------------------------------------------

    def observe(self, norms: Tensor, finite: Tensor, bounds: Tensor | Sequence[float]) -> Tensor | None:
        """Return the rule's count for a micro-batch, given norms (G, B), finite samples (B,) and bounds.

        The bounds may be a tensor, (G, 1), that a CUDA graph reads: the rule's own would be those of the capture.
        """

    def noise_multiplier(self, given: float) -> float:
        """Return the noise multiplier of the sums: larger than the given one if the rule also releases a count."""
        return given

    def count_noise(self, normal: float) -> float:
        """Return the noise of the count that the step releases beside the sums, made of a standard normal."""
        return 0.0

    def end_step(self, released: float, samples: float) -> None:
        """Change the bounds by the noisy count of the step on all ranks. `samples` is the expected batch size."""


class Automatic(ClipRule):
    """Clipping rule `automatic`: every sample is scaled by C / (n + γ), without a threshold (Bu et al. 2022, AUTO-S).

    Args:
        max_grad_norm: The bound C.
        gamma: γ above 0: keeps small gradients small.

    Example:
        >>> engine = FlashEngine(model, clipping=Automatic(1.0, gamma=0.05))
    """

    name = "automatic"

    def __init__(self, max_grad_norm: float = 1.0, *, gamma: float = 0.01) -> None:
        super().__init__(max_grad_norm)
        self.gamma = _bound(gamma, "gamma")

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        return bounds / (norms + self.gamma)


class Normalised(ClipRule):
    """Clipping rule `normalised`: every sample gets the norm C. A gradient below 1e-7 of C counts as zero.

    Args:
        max_grad_norm: The norm C.

    Example:
        >>> engine = FlashEngine(model, clipping=Normalised(1.0))
    """

    name = "normalised"

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        return torch.where(norms > 1e-7 * bounds, bounds / norms, 0.0)


class Psac(ClipRule):
    """Clipping rule `psac`: each sample is scaled by C / (n + r / (n + r)); small ones stay small (Xia et al. 2023).

    Args:
        max_grad_norm: The bound C.
        r: The stability constant r above 0.

    Example:
        >>> engine = FlashEngine(model, clipping=Psac(1.0, r=0.2))
    """

    name = "psac"

    def __init__(self, max_grad_norm: float = 1.0, *, r: float = 0.1) -> None:
        super().__init__(max_grad_norm)
        self.r = _bound(r, "r")

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        return bounds / (norms + self.r / (norms + self.r))


class PerLayer(ClipRule):
    """Clipping rule `per_layer`: each parameter is clipped by itself, as Opacus's `per_layer` does.

    Args:
        max_grad_norm: One bound for each trained parameter, in the model's order; or one number C for all of them
            together, of which each of G parameters gets C / √G.

    Example:
        >>> engine = FlashEngine(model, clipping=PerLayer([0.5, 0.1, 0.5, 0.1]))
        >>> print(round(engine.max_grad_norm, 3))
        0.721
    """

    name = "per_layer"

    def __init__(self, max_grad_norm: float | Sequence[float] = 1.0) -> None:
        self._is_shared = isinstance(max_grad_norm, int | float)
        given: Any = [max_grad_norm] if self._is_shared else max_grad_norm
        self.bounds = [_bound(each) for each in given]
        self._groups: dict[str, int] = {}

    def bind(self, names: Sequence[str]) -> None:
        self._groups = {name: index for index, name in enumerate(names)}
        if self._is_shared:
            number = max(1, len(names))
            self.bounds = [self.sensitivity() / math.sqrt(number)] * number
        elif len(self.bounds) != len(names):
            raise UserError(
                f"clipping='per_layer' was given {len(self.bounds)} bounds for {len(names)} trained parameters: "
                "give one for each, or one number for all of them together"
            )

    def group_of(self, name: str) -> int:
        if name not in self._groups:
            raise UserError(
                f"{name} was frozen when clipping='per_layer' was set up and has no bound: make the model private anew "
                "after unfreezing it"
            )
        return self._groups[name]


class PerGroup(ClipRule):
    """Clipping rule `per_group`: groups of parameters, each clipped by itself.

    Args:
        max_grad_norm: Pattern of names (as in `fnmatch`) -> bound of its group. A parameter belongs to the first
            pattern that matches its name; every trained parameter has to match one.

    Example:
        >>> engine = FlashEngine(model, clipping=PerGroup({"*bias": 0.1, "*": 1.0}))
    """

    name = "per_group"

    def __init__(self, max_grad_norm: Mapping[str, float]) -> None:
        if not isinstance(max_grad_norm, Mapping) or not max_grad_norm:
            raise UserError(
                "clipping='per_group' needs max_grad_norm as a dictionary, pattern of parameter names -> bound, "
                'for example {"*embed*": 0.5, "*": 1.0}'
            )
        self.patterns = list(max_grad_norm)
        self.bounds = [_bound(each) for each in max_grad_norm.values()]

    def bind(self, names: Sequence[str]) -> None:
        used = {self.group_of(name) for name in names}
        for unused in sorted(set(range(len(self.patterns))) - used):
            warnings.warn(
                f'no trained parameter is in the group "{self.patterns[unused]}" of clipping="per_group", whose bound '
                "makes the noise larger: correct the pattern, or leave it out",
                stacklevel=4,
            )

    def group_of(self, name: str) -> int:
        for index, pattern in enumerate(self.patterns):
            if fnmatchcase(name, pattern):
                return index
        raise UserError(f'{name} matches no pattern of clipping="per_group": add a last group "*" for all others')


class Adaptive(ClipRule):
    """Clipping rule `adaptive`: C follows a quantile of the norms, by a noisy count of samples (Andrew et al. 2021).

    The count has noise of standard deviation `unclipped_num_std`. The sums get more noise in return:
    σ_sums = (σ⁻² − (2 · unclipped_num_std)⁻²)^(−½). Both releases together are one Gaussian mechanism with the noise
    multiplier σ that is accounted for. Arguments are named as in Opacus.

    Args:
        max_grad_norm: C of the first step.
        target_unclipped_quantile: Share of samples that should stay unclipped, between 0 and 1.
        clipbound_learning_rate: How fast C follows.
        max_clipbound: Largest C.
        min_clipbound: Smallest C.
        unclipped_num_std: Standard deviation of the noise on the count; above half of the noise multiplier.

    Example:
        >>> _, private, _ = PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0,
        ...     clipping=Adaptive(1.0, target_unclipped_quantile=0.7),
        ... )
    """

    name = "adaptive"
    learns = True

    def __init__(
        self,
        max_grad_norm: float = 1.0,
        *,
        target_unclipped_quantile: float = 0.5,
        clipbound_learning_rate: float = 0.2,
        max_clipbound: float = 1e8,
        min_clipbound: float = 1e-8,
        unclipped_num_std: float = 10.0,
    ) -> None:
        super().__init__(max_grad_norm)
        if not 0 < target_unclipped_quantile < 1:
            raise UserError(f"target_unclipped_quantile must lie between 0 and 1, not {target_unclipped_quantile}")
        if not 0 < min_clipbound < max_clipbound:
            raise UserError("max_clipbound must be larger than min_clipbound, and both above 0")
        self.target = float(target_unclipped_quantile)
        self.rate = float(clipbound_learning_rate)
        self.max_clipbound, self.min_clipbound = float(max_clipbound), float(min_clipbound)
        self.unclipped_num_std = _bound(unclipped_num_std, "unclipped_num_std")

    def observe(self, norms: Tensor, finite: Tensor, bounds: Tensor | Sequence[float]) -> Tensor:
        # Centred: a sample moves the count by one half in either direction, which is the 2 in `noise_multiplier`.
        return ((norms[0] <= bounds[0]) & finite).sum() - finite.sum() / 2

    def noise_multiplier(self, given: float) -> float:
        if given == 0:
            return 0.0
        if given >= 2 * self.unclipped_num_std:
            raise UserError(
                f"clipping='adaptive': noise_multiplier {given:g} must be smaller than 2 · unclipped_num_std "
                f"({2 * self.unclipped_num_std:g}); give a larger unclipped_num_std"
            )
        return float((given**-2 - (2 * self.unclipped_num_std) ** -2) ** -0.5)

    def count_noise(self, normal: float) -> float:
        return normal * self.unclipped_num_std

    def end_step(self, released: float, samples: float) -> None:
        share = released / max(samples, 1.0) + 0.5
        bound = self.bounds[0] * math.exp(-self.rate * (share - self.target))
        self.bounds = [min(self.max_clipbound, max(self.min_clipbound, bound))]


class PartOfRule(ClipRule):
    """Some groups of a rule, numbered from 0."""

    def __init__(self, rule: ClipRule, groups: Sequence[int]) -> None:
        self._rule = rule
        self._places = {group: place for place, group in enumerate(groups)}
        self.bounds = [rule.bounds[group] for group in groups]

    def group_of(self, name: str) -> int:
        return self._places[self._rule.group_of(name)]

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        return self._rule.factors(norms, bounds)


CLIP_RULES: dict[str, type[ClipRule]] = {
    rule.name: rule for rule in (ClipRule, Automatic, Normalised, Psac, PerLayer, PerGroup, Adaptive)
}


def make_rule(clipping: str | ClipRule, max_grad_norm: Any, **options: Any) -> ClipRule:
    """Return the rule of that name with these bounds and options, or a copy of the rule that is given."""
    if isinstance(clipping, ClipRule):
        if options:
            raise UserError(f"{', '.join(options)}: give such options to the rule itself")
        return deepcopy(clipping)
    if clipping not in CLIP_RULES:
        raise UserError(f"clipping must be one of {', '.join(CLIP_RULES)}, not {clipping!r}")
    try:
        return CLIP_RULES[clipping](max_grad_norm, **options)
    except TypeError as error:
        raise UserError(f"clipping={clipping!r}: {error}") from None


# Norms that a rule is tried on, as multiples of its bound.
TRIED = [0.0, 1e-320, 1e-45, 1e-20, 1e-10, 1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-6, 1.0, 1 + 1e-6, 1.1, 2.0, 10.0]
TRIED += [1e3, 1e6, 1e10, 1e20, 1e38, math.inf, math.nan]


def check_rule(rule: ClipRule, device: torch.device) -> None:
    """Raise UserError if a rule of the user's can give a sample a larger share than its sensitivity.

    It is tried on norms of all sizes, with its own bounds and others, because bounds may change while training. A
    factor may depend on its own norm and bound alone: blocks and groups may be closed one after the other.
    """
    kind = type(rule)
    if kind in CLIP_RULES.values():
        return
    name = f"the clipping rule {kind.__name__}"
    if kind.observe is not ClipRule.observe and kind.noise_multiplier is ClipRule.noise_multiplier:
        raise UserError(f"{name} releases a count (observe) that costs no privacy: define noise_multiplier, too")
    sizes = torch.tensor(TRIED, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    random = torch.randint(len(TRIED), (len(rule.bounds), 64), generator=torch.Generator().manual_seed(0), device="cpu")
    places = torch.cat([torch.arange(len(TRIED), device="cpu").expand(len(rule.bounds), -1), random], 1).to(
        sizes.device
    )
    for scale in (1.0, 0.1, 10.0):
        other = deepcopy(rule)
        other.max_grad_norm *= scale
        bounds = sizes.new_tensor(other.bounds)[:, None]
        norms = sizes[places] * bounds
        ways: list[Tensor | float] = [bounds] if len(bounds) > 1 else [bounds, other.bounds[0]]
        for given in ways:  # in a CUDA graph, and elsewhere
            factors = rule.factors(norms, given)
            if factors.shape != norms.shape:
                raise UserError(f"{name} gives factors of shape {tuple(factors.shape)} for norms {tuple(norms.shape)}")
            finite = norms.isfinite()  # others have no share
            shares = torch.where(finite, factors * norms, 0.0).norm(dim=0)
            too_large = ~(shares <= other.sensitivity() * (1 + 1e-6)) & finite
            alone = torch.cat([rule.factors(column, given) for column in torch.split(norms, 1, 1)], 1)
            for wrong, why in (
                (
                    too_large,
                    f"its share may be at most sensitivity(), which is {other.sensitivity():g} for these bounds",
                ),
                (_differ(factors, alone) & finite, "it changes with the other samples of the batch"),
                (_differ(factors, factors.gather(1, places)) & finite, "it changes with the norms of other groups"),
            ):
                for group, sample in wrong.nonzero().tolist()[:1]:
                    raise UserError(
                        f"{name} gives a sample of norm {float(norms[group, sample]):g} the factor "
                        f"{float(factors[group, sample]):g} for the bound {other.bounds[group]:g}: {why}"
                    )


def _differ(factors: Tensor, others: Tensor) -> Tensor:
    return ~torch.isclose(factors, others, rtol=1e-6, atol=0.0)


def options_of(clipping: str | ClipRule) -> set[str]:
    """Return the names of the options that a rule takes besides its bounds."""
    rule = CLIP_RULES.get(clipping) if isinstance(clipping, str) else None
    return set() if rule is None else set(inspect.signature(rule).parameters) - {"max_grad_norm"}


def _bound(value: Any, name: str = "max_grad_norm") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} must be a finite number above 0, not {value!r}")
    return float(value)
