"""A fake ncu, for machines without a GPU: it prints what the real one printed, and leaves a report of the real one.

`plan` says how it behaves; the messages are those of ncu 2025.3.1 and of reports by its users.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.fake_tools.python_script import FIRST_LINES

VERSION = """NVIDIA (R) Nsight Compute Command Line Profiler
Copyright (c) 2018-2025 NVIDIA Corporation
Version 2025.3.1.0 (build 36398880) (public-release)
"""
NO_PERMISSION = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4711
==WARNING== No kernels were profiled.
"""
COUNTED = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "range" - 0: Application replay pass 1
dpscope-outcome: {"status": "ok", "reason": null}
==PROF== Disconnected from process 4711
"""

PROGRAM = (
    FIRST_LINES
    + """import json, os, shutil, subprocess, sys, time
from pathlib import Path

plan = json.loads(Path({plan!r}).read_text())
arguments = sys.argv[1:]
with open(plan["calls"], "a") as calls:
    print(json.dumps(arguments), file=calls)
if "--version" in arguments:
    print(plan["version"], end="")
    sys.exit()
if "--import" in arguments:
    report = Path(arguments[arguments.index("--import") + 1])
    print(plan["csv"].get(report.name, plan["csv"].get("any", "==ERROR== Failed to load report file")))
    sys.exit()
options = dict(part.partition("=")[::2] for part in arguments if part.startswith("--"))
for option in plan["unknown_options"]:
    if option in options:
        print(f"==ERROR== unrecognised option '{{option}}'. Use --help for further details.")
        sys.exit(1)
for metric in options["--metrics"].split(","):
    if metric in plan["unknown_metrics"]:  # one at a time, as the real one
        print(f"==ERROR== Failed to find metric {{metric}}", file=sys.stderr)
        sys.exit(1)
if plan["hangs"]:
    child = subprocess.Popen(["sleep", "600"])
    Path(plan["pids"]).write_text(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(600)
kind = "kernels" if "--replay-mode=kernel" in arguments else "range"
code = 0
if plan["runs_program"]:
    first = next(i for i, part in enumerate(arguments) if i and not part.startswith("--"))
    code = subprocess.run(arguments[first:]).returncode
    if code:
        print(f"==ERROR== The application returned an error code ({{code}}).")
print(plan["says"].get(kind, plan["says"]["range"]), end="", flush=True)
if plan["reports"].get(kind) and not code:
    shutil.copyfile(plan["reports"][kind], options["--export"].replace("%%", "%"))
sys.exit(plan["code"] or code)
"""
)


class FakeNcu:
    """The path of an executable, and what it was asked."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "ncu"
        self.calls_file = folder / "calls"
        self.pids_file = folder / "pids"
        whole = {
            "version": VERSION,
            "csv": {},
            "unknown_options": [],
            "unknown_metrics": [],
            "hangs": False,
            "runs_program": False,
            "says": {"range": COUNTED},
            "reports": {},
            "code": 0,
            "calls": str(self.calls_file),
            "pids": str(self.pids_file),
        }
        (folder / "plan.json").write_text(json.dumps({**whole, **plan}))
        self.path.write_text(PROGRAM.format(python=sys.executable, plan=str(folder / "plan.json")))
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [json.loads(line) for line in lines]


# The columns of `--csv --page raw` before the metrics, with NVTX ranges as ncu prints them.
_LEFT = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")
_NVTX = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def raw_csv(rows: list[tuple[str, dict[str, float | str], str | None]]) -> str:
    """What `ncu --import … --csv --page raw --print-units base` prints: names, units, numbers with separators."""
    metrics = list(dict.fromkeys(name for _, values, _ in rows for name in values))
    lines = ["==PROF== Report: step.ncu-rep", _line([*_LEFT, "Device", "CC", _NVTX, *metrics])]
    lines.append(_line([""] * 12 + ["byte" if "bytes" in name else "sector" for name in metrics]))
    for number, (name, values, phase) in enumerate(rows):
        ranges = f"{number}:<default domain>:dpscope.phase.{phase}:none:none:none:none:none:none" if phase else ""
        place = [str(number), "4711", "python3.12", "127.0.0.1", name, "1", "7", "(1024, 1, 1)", "(16000, 66, 8)"]
        cells = [values[m] if isinstance(values.get(m), str) else f"{values.get(m, 0):,.0f}" for m in metrics]
        lines.append(_line([*place, "0", "9.0", ranges, *cells]))
    return "\n".join(lines) + "\n"


def _line(cells: list[Any]) -> str:
    return ",".join(f'"{cell}"' for cell in cells)
