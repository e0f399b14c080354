"""How a measurement ended."""

from __future__ import annotations

OK, OOM, FAILED, TIMEOUT, SKIPPED = STATUSES = ("ok", "oom", "failed", "timeout", "skipped")
