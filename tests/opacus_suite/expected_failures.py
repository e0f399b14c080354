"""Opacus's tests that do not pass against flash clipping, and why. Only ever made shorter."""

EXPECTED_FAILURES: dict[str, str] = {}
