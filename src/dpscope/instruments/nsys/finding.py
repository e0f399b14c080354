"""Which nsys there is, what its version can do, and where the importer lies that turns a raw capture into a report."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpscope.instruments.ncu.command import find_ncu

# Where installers put it when it is not on the PATH; of several versions the last, the newest, is taken. Nsight Compute
# brings an nsys of its own.
INSTALLED = (
    "opt/nvidia/nsight-systems/*/bin/nsys",
    "opt/nvidia/nsight-systems/*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/local/cuda*/nsight-systems*/bin/nsys",
    "usr/local/cuda*/nsight-systems*/target-linux-*/nsys",
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
    "usr/lib/nsight-compute*/host/target-linux-*/nsys",
    "usr/lib/*/nsight-compute*/host/target-linux-*/nsys",
)
BESIDE_NCU = ("host/target-linux-*/nsys", "nsight-compute*/host/target-linux-*/nsys")
IMPORTER = "QdstrmImporter"
# Seen from the folder that nsys lies in, then where distributions put it.
IMPORTER_BESIDE = ("", "../host-linux-*", "../linux-desktop-*", "../host/linux-desktop-*", "../../host-linux-*")
IMPORTER_INSTALLED = ("usr/lib/nsight-systems/host-linux-*", "opt/nvidia/nsight-systems/*/host-linux-*")

ROOT = Path("/")


@dataclass(frozen=True)
class Nsys:
    """An nsys executable, its version, and the long options that `nsys profile` of it knows."""

    path: str
    version: str | None
    options: frozenset[str]

    def knows(self, option: str) -> bool:
        """Does this version know the option? Yes if its help could not be read: then nsys itself will say."""
        return not self.options or option in self.options


def find_nsys() -> str | None:
    """$NSYS, or `nsys` on the PATH, or beside ncu, or the newest in the usual folders."""
    if asked := os.environ.get("NSYS"):
        return shutil.which(asked)
    return shutil.which("nsys") or _beside_ncu() or _newest(INSTALLED)


def look_at(path: str) -> Nsys:
    """Ask nsys for its version and its options."""
    match = re.search(r"version\s+(\d+(?:\.\d+){1,3})", _ask([path, "--version"]))
    options = re.findall(r"--[a-z][a-z0-9-]*", _ask([path, "profile", "--help"]))
    return Nsys(path, match.group(1) if match else None, frozenset(options))


def find_importer(nsys: str) -> str | None:
    """What turns a `.qdstrm` into a `.nsys-rep`: in the host folder of the same installation, or of another."""
    home = Path(nsys).resolve().parent
    for place in IMPORTER_BESIDE:
        found = sorted(home.glob(f"{place}/{IMPORTER}" if place else IMPORTER))
        if found:
            return str(found[-1].resolve())
    return shutil.which(IMPORTER) or _newest(f"{place}/{IMPORTER}" for place in IMPORTER_INSTALLED)


def _beside_ncu() -> str | None:
    ncu = find_ncu()
    if ncu is None:
        return None
    homes = Path(ncu).resolve().parents[:3]  # ncu, or a script that calls it, lies in the installation or below
    found = (sorted(home.glob(pattern), key=_by_number) for home in homes for pattern in BESIDE_NCU)
    return next((str(paths[-1]) for paths in found if paths), None)


def _newest(patterns: Iterable[str]) -> str | None:
    found = (sorted(ROOT.glob(pattern), key=_by_number) for pattern in patterns)
    return next((str(paths[-1]) for paths in found if paths), None)


def _by_number(path: Path) -> list[tuple[bool, int | str]]:
    """2024.10 is newer than 2024.9."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts]


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
