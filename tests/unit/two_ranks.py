"""Two ranks: new processes under torchrun, or copies of this one, which need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

from tests import ROOT
from tests.forked import call_and_exit

WORLD = 2


def run_ranks(module: str, *arguments: object) -> None:
    """Run `python -m module` as two ranks on this CPU; fail with what they wrote if one does."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "-m", module]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    run = subprocess.run(
        [*ranks, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def fork_ranks(main: Callable[..., None], *arguments: object) -> None:
    """Call `main` in two copies of this process, with the environment that torchrun gives; fail if one does.

    Not for sharded models: what DTensors remember in a process that was rank 0 is wrong on other ranks.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> None:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
        os.environ.update({name: str(value) for name, value in {**place, **meeting}.items()})
        main(*map(str, arguments))

    with tempfile.TemporaryFile("w+") as output:
        started = [
            multiprocessing.get_context("fork").Process(
                target=call_and_exit, args=(lambda number=number: rank(number), output, output)
            )
            for number in range(WORLD)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(180)
            process.kill()
            process.join()
        output.seek(0)
        assert [process.exitcode for process in started] == [0] * WORLD, output.read()[-3000:]
