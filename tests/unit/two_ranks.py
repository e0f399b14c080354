"""Two ranks: copies of this process, which need not import torch again, in the environment that torchrun gives."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable

from tests.forked import call_and_exit

WORLD = 2


def fork_ranks(main: Callable[..., None], *arguments: object) -> None:
    """Call `main` in two copies of this process, with the environment that torchrun gives; fail if one does.

    Ranks of sharded models take the fixture `clean_copy` as well.
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
