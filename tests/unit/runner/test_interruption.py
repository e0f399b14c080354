"""A sweep that is killed, for real and at several moments, and then resumed.

Rows of `standard` alone: their children import the least. What is killed is a process; what resumes is this one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from dpscope.results.store import ResultStore, read_result
from dpscope.vocabulary.statuses import FAILED, OK
from tests import rows_here

ROWS = (1, 2)  # batch sizes


class Sweep:
    """One `dpscope compare` of two rows, in a folder of its own."""

    def __init__(self, folder, command, start):
        self.store = ResultStore(folder)
        self._command = command
        self._start = start

    def start(self, *more):
        return self._start("-m", "dpscope", *self._command, "--out", self.store.folder, *more)

    def resume(self):
        """Run it again to its end: exit code, what it printed."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OMP_NUM_THREADS", "1")  # as `start` does: rows are kept if they had as many threads
            done = rows_here.run(*self._command, "--out", self.store.folder, "--resume")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done.exit_code, done.output

    def files_of_row(self, row):
        """The row's result and log, as soon as there are any."""
        prefix = f"standard_tiny_bs{ROWS[row]}_"
        return list(self.store.results.glob(f"{prefix}*.json")), list(self.store.logs.glob(f"{prefix}*.log"))

    def finished(self, row):
        return bool(self.files_of_row(row)[0])

    def state(self):
        """Every result file's bytes and time of writing."""
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in self.store.results.glob("*.json")}


@pytest.fixture
def sweep(tmp_path, start, tiny_flags):
    batch_sizes = ",".join(map(str, ROWS))
    rows = ["--methods", "standard", "--instruments", "time", "--batch-size", batch_sizes]
    return Sweep(tmp_path / "out", ["compare", *tiny_flags, *rows], start)


@pytest.fixture(scope="module")
def first_row(tmp_path_factory, tiny_flags):
    """The result of the first row, measured once: what a sweep has that has come so far."""
    folder = tmp_path_factory.mktemp("first")
    rows = ["--methods", "standard", "--instruments", "time", "--batch-size", str(ROWS[0]), "--out", str(folder)]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # as `start` does: rows are kept if they had as many threads
        done = rows_here.run("compare", *tiny_flags, *rows)
    assert done.exit_code == 0, done.output
    (path,) = (folder / "results").iterdir()
    return path


@pytest.fixture
def second_row_begins(sweep, first_row, frozen_worker):
    """Go on with a sweep whose first row is finished: its process, and the second row's child, which is frozen."""

    def begin():
        sweep.store.create()
        shutil.copy(first_row, sweep.store.results)
        process = sweep.start("--resume")
        return process, frozen_worker(process)

    return begin


@pytest.fixture
def frozen_worker(wait_until, running_workers):
    """Stop the child of a sweep as soon as there is one: however slow this test is, it will not be finished."""

    def freeze(process):
        wait_until(lambda: running_workers(process.pid), "a child measures")
        (worker,) = running_workers(process.pid)
        os.kill(worker, signal.SIGSTOP)
        return worker

    return freeze


def require_complete(sweep, kept, printed):
    """Every row is there and ok, `kept` was not touched, and nothing else passes for a result."""
    results, skipped = sweep.store.read_all()
    assert skipped == []
    assert sorted(result.spec["batch_size"] for result in results.values()) == list(ROWS)
    assert {result.status for result in results.values()} == {OK}
    after = sweep.state()
    assert {path: after[path] for path in kept} == kept
    assert printed.count("(kept)") == len(kept)
    assert sweep.store.summary.exists()


def require_killed_and_finished_by_resume(sweep, process, worker, wait_until, alive, rows_kept):
    process.send_signal(signal.SIGKILL)
    process.wait()
    if worker is not None:
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: not alive(worker), "the orphan is gone", seconds=20)
    kept = sweep.state()
    assert len(kept) == rows_kept
    assert all(read_result(path).ok for path in kept)
    assert not sweep.store.summary.exists()

    code, printed = sweep.resume()

    assert code == 0
    require_complete(sweep, kept, printed)


def test_a_sweep_killed_in_its_first_row_is_finished_by_resume(sweep, frozen_worker, wait_until, alive):
    process = sweep.start()
    worker = frozen_worker(process)
    require_killed_and_finished_by_resume(sweep, process, worker, wait_until, alive, rows_kept=0)


def test_a_sweep_killed_between_two_rows_is_finished_by_resume(sweep, wait_until, alive):
    """As soon as the first row's file is there, before the next child could be started."""
    process = sweep.start()
    wait_until(lambda: sweep.finished(0), "the first row is finished")
    require_killed_and_finished_by_resume(sweep, process, None, wait_until, alive, rows_kept=1)


def test_a_sweep_killed_in_its_second_row_is_finished_by_resume(sweep, second_row_begins, wait_until, alive):
    process, worker = second_row_begins()
    require_killed_and_finished_by_resume(sweep, process, worker, wait_until, alive, rows_kept=1)


def test_a_child_killed_is_a_failed_row_which_resume_measures_again(sweep, wait_until, running_workers):
    process = sweep.start()
    wait_until(lambda: running_workers(process.pid), "the first row's child runs")
    os.kill(running_workers(process.pid)[0], signal.SIGKILL)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    (broken,), (whole,) = sweep.files_of_row(0)[0], sweep.files_of_row(1)[0]
    assert read_result(broken).status == FAILED
    assert read_result(whole).status == OK
    assert "failed: standard at batch 1, sequence 8: the process was ended by SIGKILL" in printed
    kept = {whole: sweep.state()[whole]}

    code, printed = sweep.resume()

    assert code == 0
    require_complete(sweep, kept, printed)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGINT, "Interrupted."),
        (signal.SIGTERM, "Interrupted by SIGTERM."),
        (signal.SIGHUP, "Interrupted by SIGHUP."),
    ],
)
def test_a_signal_leaves_finished_rows_ends_the_child_and_says_how_to_go_on(
    sweep, second_row_begins, wait_until, alive, number, says
):
    process, worker = second_row_begins()
    process.send_signal(number)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    where = sweep.store.folder
    told = f"1 of 2 rows are finished and in {where}: go on with the same command, --out {where} and --resume."
    assert complaints.splitlines() == [says, told]
    if alive(worker):  # the signal came while it was started: then its lifeline ends it
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: not alive(worker), "the child is gone", seconds=20)
    (first,) = sweep.files_of_row(0)[0]
    assert read_result(first).status == OK
    assert not sweep.finished(1)


def test_what_a_measurement_has_started_ends_with_the_sweep(start, alive, wait_until):
    """Such as ncu and its program: the worker's whole group goes when its lifeline closes."""
    script = (
        "import subprocess, sys, dpscope.runner.worker as worker\n"
        "tool = subprocess.Popen(['sleep', '600'])\nprint(tool.pid, flush=True)\nworker._end_with_parent()\n"
    )
    worker = start("-c", script, stdin=subprocess.PIPE, start_new_session=True)
    tool = int(worker.stdout.readline())
    assert alive(tool)
    worker.stdin.close()
    wait_until(lambda: not alive(tool), "the tool is gone", seconds=10)
    wait_until(lambda: worker.poll() is not None, "the worker is gone", seconds=10)
