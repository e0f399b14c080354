"""Location of nsys, what its version can do, and the importer that turns a raw capture into a report."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dpscope.instruments.ncu.command import find_ncu
from dpscope.instruments.nsight import ask, find_version, newest

# Where installers put it when it is not on the PATH. Nsight Compute brings an nsys of its own.
NSYS_PATTERNS = (
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
_BESIDE = (".", "../host-linux-*", "../linux-desktop-*", "../host/linux-desktop-*", "../../host-linux-*")
IMPORTER_BESIDE = tuple(f"{folder}/{IMPORTER}" for folder in _BESIDE)
IMPORTER_INSTALLED = tuple(
    f"{folder}/{IMPORTER}"
    for folder in ("usr/lib/nsight-systems/host-linux-*", "opt/nvidia/nsight-systems/*/host-linux-*")
)


@dataclass(frozen=True)
class Nsys:
    """An nsys executable, its version, and the long options that `nsys profile` of it knows."""

    path: str
    version: str | None
    options: frozenset[str]

    def knows(self, option: str) -> bool:
        """Tell if this version has the option. If its help could not be read, nsys itself will refuse it."""
        return not self.options or option in self.options


def find_nsys() -> str | None:
    """Return $NSYS, or `nsys` on the PATH, or beside ncu, or the newest in the usual folders."""
    if asked := os.environ.get("NSYS"):
        return shutil.which(asked)
    return shutil.which("nsys") or _beside_ncu() or newest(NSYS_PATTERNS)


def inspect_nsys(path: str) -> Nsys:
    """Ask nsys for its version and its options."""
    options = re.findall(r"--[a-z][a-z0-9-]*", ask(path, "profile", "--help"))
    return Nsys(path, find_version(ask(path, "--version"), numbers=4), frozenset(options))


def find_importer(nsys: str) -> str | None:
    """Return the program that turns a `.qdstrm` into a `.nsys-rep`, of the same installation or of another."""
    if beside := newest(IMPORTER_BESIDE, [Path(nsys).resolve().parent]):
        return str(Path(beside).resolve())
    return shutil.which(IMPORTER) or newest(IMPORTER_INSTALLED)


def _beside_ncu() -> str | None:
    ncu = find_ncu()
    # ncu, or a script that calls it, lies in the installation or below.
    return None if ncu is None else newest(BESIDE_NCU, Path(ncu).resolve().parents[:3])
