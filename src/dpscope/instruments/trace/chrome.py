"""Chrome trace of what torch.profiler recorded, as text."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from torch.profiler import profile

LAST_KEY = b'"traceName"'  # of the document that torch.profiler writes


def chrome_trace(profiler: profile) -> bytes:
    """Return the trace as JSON, once for each recording; torch writes it by way of a file in TMPDIR.

    Raises `OSError` (no room) where the file is missing or cut short: torch.profiler returns as if all were well.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes() if path.exists() else b""
        if LAST_KEY not in text[-4096:] or not text.rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, "torch.profiler could not write its trace", folder)
        return text
