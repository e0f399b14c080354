"""Checks before the first row: the workload can be built and trained at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpscope.endings import outcome_of_exception
from dpscope.errors import UserError
from dpscope.runner import collector
from dpscope.runner.launcher import Limits
from dpscope.runner.measure import their_mistake
from dpscope.runner.spec import RunSpec
from dpscope.runner.worker import claim_stdout, limit_memory
from dpscope.vocabulary.methods import STANDARD, resolve_method
from dpscope.vocabulary.settings import EAGER
from dpscope.vocabulary.statuses import OOM, REFUSED
from dpscope.workloads.configs import CustomConfig


def require_measurable(specs: Sequence[RunSpec], limits: Limits | None = None) -> None:
    """Raise `UserError` if the workload cannot be trained, or a requested method cannot train it.

    A built-in model is built on torch's meta device, unless its config suffices. The user's own model takes one
    ordinary step in a separate process, so that a fault is reported once instead of in every row.
    """
    private = [spec for spec in specs if resolve_method(spec.method).private]
    smallest = min(private or specs, key=lambda spec: spec.batch_size * (spec.seq_len or 1))
    if isinstance(smallest.workload, CustomConfig):
        _require_in_child(smallest, limits or Limits())
    elif smallest.checkpoint_blocks or not smallest.workload.is_known_trainable:
        require_buildable(smallest)


def require_buildable(spec: RunSpec) -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    from dpscope.trainers.checkpointing import checkpoint_blocks
    from dpscope.trainers.privacy_rules import NotPrivateError, require_private_trainable
    from dpscope.workloads.workload import build_model, build_workload

    class Uninitialised(TorchFunctionMode):
        """Mode that skips initial values: to make them, torch would import its compiler, which is slow."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__module__", None) == torch.nn.init.__name__:
                return args[0] if args else kwargs["tensor"]
            return function(*args, **(kwargs or {}))

    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    try:
        with torch.device("meta"), Uninitialised():
            model = build_model(workload, spec.param_dtype)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError(
            f"model {spec.workload.name!r} is larger than any memory ({error}): give smaller sizes"
        ) from None
    if spec.checkpoint_blocks:
        checkpoint_blocks(model)
    if not resolve_method(spec.method).private:
        return
    try:
        require_private_trainable(model)
    except NotPrivateError as error:
        raise UserError(f"model {spec.workload.name!r} {error}. Or compare --methods standard alone") from None


def _require_in_child(spec: RunSpec, limits: Limits) -> None:
    command = [sys.executable, "-m", "dpscope.runner.preflight"]
    request = json.dumps({"spec": spec.to_dict(), "memory_limit": limits.memory})
    name = spec.workload.name
    try:
        child = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            timeout=limits.timeout,
        )
    except subprocess.TimeoutExpired:
        limit = limits.in_words
        raise UserError(
            f"{name} took no ordinary step within {limit}: raise --timeout, or see where it waits"
        ) from None
    if child.returncode == REFUSED:
        raise UserError(child.stdout.rstrip())
    if child.returncode and child.returncode != -signal.SIGKILL:  # killed for memory: the rows will say so
        raise UserError(
            f"{name} ended its process with code {child.returncode} before its first step was done:\n"
            f"{child.stderr.rstrip()}"
        )


def explain(spec: RunSpec) -> str | None:
    """Explain what is wrong with the user's workload; None if no fault was found before measuring."""
    from dpscope.runner.assembly import assemble

    try:
        trainer, batches = assemble(replace(spec, method=STANDARD, compile=EAGER))
        trainer.train_step(*batches)
    except UserError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        if outcome_of_exception(error)[0] != OOM:
            short = "".join(traceback.format_exception_only(error))
            return their_mistake(error, spec.workload) or f"{spec.workload.name} failed:\n{short}"
    try:
        require_buildable(spec)
    except UserError as error:
        return str(error)
    except Exception:
        return None  # it may not be made for the meta device; the rows will tell
    return None


def main() -> None:
    collector.rest()
    results = claim_stdout()
    request = json.loads(sys.stdin.readline())
    if request["memory_limit"] is not None:
        limit_memory(int(request["memory_limit"]))
    sentence = explain(RunSpec.from_dict(request["spec"]))
    if sentence is not None:
        print(sentence, file=results, flush=True)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
