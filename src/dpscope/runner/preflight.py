"""What can be known to fail before a single child is started."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.trainers.registry import resolve_method


def require_measurable(specs: Sequence[RunSpec]) -> None:
    """Raise `UserError` if the workload cannot be trained by a method that was asked for.

    The model is built without memory, on torch's meta device.
    """
    private = next((spec for spec in specs if resolve_method(spec.method).private), None)
    if private is None:
        return
    import torch

    from dpscope.trainers.privacy_rules import NotPrivateError, require_private_trainable
    from dpscope.workloads.workload import build_workload

    workload = build_workload(private.workload, batch_size=private.batch_size, seq_len=private.seq_len)
    with torch.device("meta"):
        model = workload.model()
    try:
        require_private_trainable(model)
    except NotPrivateError as error:
        raise UserError(f"model {private.workload.name!r} {error}. Or compare --methods standard alone") from None
