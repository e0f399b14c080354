"""An installation of Nsight Systems in a folder, of executables that record nothing.

They take the same arguments, print the same messages and leave the same files as the real ones, and a report of theirs
holds the environment they were given and that of whoever started them, as a real one does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.fake_tools.python_script import FIRST_LINES

VERSION = "NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0"

# As in the help of the real tool, shortened.
HELP = """
usage: nsys profile [<args>] [application] [<application args>]

  -c, --capture-range=
      Possible values are none, cudaProfilerApi, nvtx, hotkey.
      When '-c/--capture-range' is used, profiling will start only when an appropriate
      start API or hotkey is invoked. If '-c/--capture-range' is set to none, start/stop
      API calls and hotkeys will be ignored.

  --capture-range-end=
      Possible values are none, stop, stop-shutdown, repeat[:N], repeat-shutdown:N.
      Specify the desired behavior when a capture range ends. Applicable only when used along with
      '-c/--capture-range' option.

  --cpuctxsw=
      Possible values are 'process-tree', 'system-wide' or 'none'.

  -f, --force-overwrite=
      Possible values are 'true' or 'false'.

  --gpu-metrics-devices=
      Possible values are '[GPU ID]', 'all', 'cuda-visible', 'none' or 'help'.

  -o, --output=
      Output report filename. Any %q{ENV_VAR} pattern in the filename will be substituted with the
      value of the environment variable. Any %h pattern will be substituted with the hostname of the system.

  -s, --sample=
      Possible values are 'process-tree', 'system-wide' or 'none'.

  -t, --trace=
      Possible values are 'cuda', 'nvtx', 'cublas', 'cudnn', 'osrt', 'none'.
"""
OLD_HELP = HELP.replace("--capture-range-end=", "--stop-on-range-end=").replace("metrics-devices", "metrics-device")

NO_IMPORTER = """Generating '/tmp/nsys-report-a844.qdstrm'
Importer error status: The importer binary and its dependencies were not found.
Unable to retrieve the importer version: skipping importation of the QDSTRM file.
"""
NOTHING_RECORDED = "Processing events...\nGenerated:\n    No reports were generated.\n"
METRICS_REFUSED = """Illegal --gpu-metrics-devices arguments.
None of the installed GPUs are supported:
\tNVIDIA H200 PCI[0000:00:06.0] - Insufficient privilege, see https://developer.nvidia.com/ERR_NVGPUCTRPERM

usage: nsys profile [<args>] [application] [<application args>]
Try 'nsys profile --help' for more information.
"""
NO_LIBDW = (
    "QdstrmImporter: error while loading shared libraries: libdw.so.1: cannot open shared object file: "
    "No such file or directory\n"
)

NSYS = (
    FIRST_LINES
    + """import json, os, shutil, subprocess, sys
from pathlib import Path

plan = json.loads({plan!r})
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print(plan["version"])
elif arguments == ["profile", "--help"]:
    print(plan["help"])
elif arguments[0] == "profile":
    options = dict(a.split("=", 1) for a in arguments[1:] if a.startswith("--") and "=" in a)
    program = arguments[1 + next(i for i, a in enumerate(arguments[1:]) if not a.startswith("--")):]
    code = subprocess.run(program).returncode if plan["runs"] else 0
    output = options["--output"]
    recorded = {{"environment": dict(os.environ), "arguments": arguments}}
    seen = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            seen.append(path.read_text(errors="replace"))
        except OSError:
            continue  # another user's, or gone
    recorded["of other processes"] = chr(0).join(seen)
    recorded = json.dumps(recorded)
    if plan["leaves"] is not None:
        Path(output + plan["leaves"]).write_text(recorded)
    if plan["leaves"] == ".nsys-rep":
        print("Collecting data...\\nGenerating '/tmp/nsys-report-4279.qdstrm'")
        print("Generated:\\n    " + output + ".nsys-rep")
    print(plan["says"], end="")
    sys.exit(code or plan["exit"])
elif arguments[0] == "export":
    output = next(a.split("=", 1)[1] for a in arguments if a.startswith("--output="))
    if plan["export"] is None:
        sys.exit(print("nsys: error while loading shared libraries: libdw.so.1: cannot open shared object file") or 127)
    assert Path(arguments[-1]).exists()
    shutil.copyfile(plan["export"], output)
"""
)
IMPORTER = (
    FIRST_LINES
    + """import shutil, sys
if {says!r}:
    sys.exit(print({says!r}, end="") or 127)
assert sys.argv[1] == "-i" and sys.argv[3] == "-o"
shutil.copyfile(sys.argv[2], sys.argv[4])
"""
)


def install(
    folder,
    *,
    leaves=".nsys-rep",
    export=None,
    says="",
    exit_code=0,
    runs=False,
    help_text=HELP,
    version=VERSION,
    importer: str | None = None,
) -> Path:
    """Put nsys into a folder laid out like Nsight Compute's; `importer`: what QdstrmImporter says ("": it works)."""
    nsys = folder / "host" / "target-linux-x64" / "nsys"
    plan = {"leaves": leaves, "export": None if export is None else str(export), "says": says, "exit": exit_code}
    plan |= {"runs": runs, "help": help_text, "version": version}
    _executable(nsys, NSYS.format(python=sys.executable, plan=json.dumps(plan)))
    if importer is not None:
        place = folder / "host" / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter"
        _executable(place, IMPORTER.format(python=sys.executable, says=importer))
    return nsys


def _executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
