"""Environment of a measurement, printed as JSON by `python -m dpscope.runner.environment`.

The parent of a sweep asks a child for it, so that the parent itself never opens a CUDA context.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.packages import version_of
from dpscope.results.environments import LIBRARIES, MUST_BE_EQUAL
from dpscope.vocabulary.settings import DEVICE_CHOICES, OneOf
from dpscope.vocabulary.version import __version__


def collect(device: str) -> dict[str, Any]:
    """Return versions and hardware; open a CUDA context only if the measurement uses one."""
    import torch

    environment: dict[str, Any] = {
        "dpscope": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        **{name: version_of(name) for name in LIBRARIES},
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": None,
        "driver": None,
        "gpu": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        environment |= {
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    return environment


def collect_in_child(device: str) -> dict[str, Any]:
    """Run `collect` in a child process."""
    command = [sys.executable, "-m", "dpscope.runner.environment", device]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    environment: dict[str, Any] = json.loads(output.splitlines()[-1])
    return environment


def same_environment(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in MUST_BE_EQUAL)


def resolve_device(device: str) -> str:
    """Return cpu or cuda; `auto` is cuda where torch sees a GPU. Raise `UserError` if the device is not there."""
    if OneOf("device", DEVICE_CHOICES)(device) == "cpu":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise UserError("--device cuda, but torch sees no CUDA device here: run `dpscope doctor`, or use --device cpu")
    return "cpu"


def _git_commit() -> str | None:
    """Return the commit of a source checkout of dpscope; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return output.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    print(json.dumps(collect(sys.argv[1])))
