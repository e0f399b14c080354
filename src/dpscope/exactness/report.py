"""What a check found, as plain data: for people, for files, for exit codes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dpscope.audit.verdict import Audit, as_json

EXACT, NOT_EXACT, SKIPPED, FAILED = "exact", "NOT EXACT", "skipped", "failed"


@dataclass(frozen=True)
class StepErrors:
    """One noiseless step at one clip norm: largest relative errors against micro-batches of one."""

    clip_norm: float
    clipped: int  # samples above it
    factor_error: float | None  # None where samples' gradients are too nearly parallel to tell
    worst_parameter: str
    parameter_errors: dict[str, float]

    @property
    def parameter_error(self) -> float:
        return self.parameter_errors[self.worst_parameter]


@dataclass(frozen=True)
class MethodCheck:
    method: str
    verdict: str  # exact, NOT EXACT, skipped (it refuses this workload), failed (it raised an error)
    reason: str | None = None  # why there are no figures
    details: str | None = None  # the traceback of a method that failed
    norm_error: float | None = None
    steps: list[StepErrors] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing about how it trains this model
    paths: list[dict[str, str]] | None = None
    audit: Audit | None = None  # neighbours, noise and accounting, if they were asked for and the method ran

    @property
    def worst(self) -> StepErrors:
        return max(self.steps, key=lambda step: step.parameter_error)

    @property
    def factor_error(self) -> float | None:
        return max((step.factor_error for step in self.steps if step.factor_error is not None), default=None)


@dataclass(frozen=True)
class Check:
    """A workload and every method that was put to the test on it."""

    workload: str
    dtype: str
    tolerance: float
    batch_size: int
    parameters: int
    trainable: int
    norms: list[float]
    clip_norms: list[float]
    tied: list[list[str]]
    notes: list[str]  # what was changed for the check
    faults: list[str]  # of the workload itself: no method can be right on it
    warnings: list[str]  # of the workload: worth knowing
    loose: list[str]  # parameters whose rounding comes near the tolerance, and which are allowed `roundings` times it
    roundings: float
    rounding: MethodCheck | None  # micro-batches of one in the checked number format: what rounding alone does
    methods: list[MethodCheck]

    @property
    def ok(self) -> bool:
        """Some method ran, every one that ran is exact and breaches nothing, and the workload allows it."""
        ran = [method for method in self.methods if method.verdict != SKIPPED]
        breached = any(audit.breached for audit in self.audits.values())
        return bool(ran) and not self.faults and not breached and all(method.verdict == EXACT for method in ran)

    @property
    def audits(self) -> dict[str, Audit]:
        return {method.method: method.audit for method in self.methods if method.audit}

    def __str__(self) -> str:
        from dpscope.exactness.text import describe
        from dpscope.reports.text import render_plain

        return render_plain(describe(self))

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        return as_json(self.to_dict())
