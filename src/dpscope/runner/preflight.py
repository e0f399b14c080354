"""What can be known to fail before a single child is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.runner.worker import claim_stdout
from dpscope.trainers.registry import resolve_method
from dpscope.workloads.configs import CustomConfig

REFUSED = 4  # the exit code of the child that looks at the user's code; the sentence is its standard output


def require_measurable(specs: Sequence[RunSpec]) -> None:
    """Raise `UserError` if the workload cannot be trained by a method that was asked for.

    The model is built without memory, on torch's meta device. The user's own code runs in a process of its own, which
    is gone before the first row: whatever it does to the GPU while it is loaded is no part of a measurement.
    """
    first = next((spec for spec in specs if resolve_method(spec.method).private), specs[0])
    if isinstance(first.workload, CustomConfig):
        _require_in_child(first)
    else:
        require_buildable(first)


def require_buildable(spec: RunSpec) -> None:
    import torch

    from dpscope.trainers.privacy_rules import NotPrivateError, require_private_trainable
    from dpscope.workloads.workload import build_workload

    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    with torch.device("meta"):
        model = workload.model()
    if not resolve_method(spec.method).private:
        return
    try:
        require_private_trainable(model)
    except NotPrivateError as error:
        raise UserError(f"model {spec.workload.name!r} {error}. Or compare --methods standard alone") from None


def _require_in_child(spec: RunSpec) -> None:
    command = [sys.executable, "-m", "dpscope.runner.preflight"]
    child = subprocess.run(
        command, input=json.dumps(spec.to_dict()), capture_output=True, text=True, check=False, errors="replace"
    )
    if child.returncode == REFUSED:
        raise UserError(child.stdout.rstrip())
    if child.returncode:
        raise UserError(
            f"{spec.workload.name} ended its process with code {child.returncode} while it was loaded:\n"
            f"{child.stderr.rstrip()}"
        )


def explain(spec: RunSpec) -> str | None:
    """What is wrong with the user's workload, as far as it shows without memory or a GPU."""
    import torch

    from dpscope.runner.assembly import require_batch_of
    from dpscope.runner.tracebacks import details_of
    from dpscope.workloads.workload import build_workload

    name = spec.workload.name
    try:
        workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
        require_batch_of(workload.batch(spec.seed, torch.device("cpu")), spec.batch_size)
    except UserError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return f"{name} failed:\n{details_of(error, spec.workload)}"
    try:
        require_buildable(spec)
    except UserError as error:
        return str(error)
    except Exception:
        return None  # it may not be made for the meta device; the rows will tell
    return None


def main() -> None:
    results = claim_stdout()
    sentence = explain(RunSpec.from_dict(json.loads(sys.stdin.readline())))
    if sentence is not None:
        print(sentence, file=results, flush=True)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
