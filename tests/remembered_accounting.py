"""What Opacus's accountants computed is remembered: tests ask for the same noise again and again, in pure Python."""

from __future__ import annotations

from functools import cache

from opacus.accountants.analysis import rdp


def install() -> None:
    rdp._compute_log_a = cache(rdp._compute_log_a)  # of a sampling rate, a noise multiplier and an order
