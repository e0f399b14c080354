"""Benchmarks that need no GPU run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_benchmark_of_host_time_shows_both_methods_and_what_a_layer_costs_more():
    command = [sys.executable, str(BENCHMARKS / "host_time.py"), "--layers", "1", "--steps", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.startswith("12 layers, cpu")
    assert [row.split()[0] for row in rows[1:3]] == ["standard", "flash"]
    assert sum("µs more a layer" in row for row in rows) == 2
