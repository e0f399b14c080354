"""Predictions side by side, in copies of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ORIGINAL = """
import os, sys, time
from dpscope.forecast.side_by_side import run_side_by_side

def write_and_wait(say):
    print(os.getpid(), flush=True)
    time.sleep(60)

run_side_by_side([write_and_wait, write_and_wait], 2, print)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc")
def test_copies_end_when_the_original_is_killed():
    """Each copy holds the pipes of those before it, which therefore stay open."""
    with subprocess.Popen([sys.executable, "-c", ORIGINAL], stdout=subprocess.PIPE, text=True) as original:
        assert original.stdout is not None
        copies = [int(original.stdout.readline()) for _ in range(2)]
        original.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(is_running, copies)) and time.monotonic() < deadline:
        time.sleep(0.1)
    running = [copy for copy in copies if is_running(copy)]
    for copy in running:
        os.kill(copy, signal.SIGKILL)
    assert not running


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
