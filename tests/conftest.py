"""What tests of every part share: small specs and results, real processes, and a check that nothing leaks."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import DATA, ROOT
from tests.frozen_imports import freeze_imports, pytest_collection_finish  # noqa: F401
from tests.made_up import ENVIRONMENT, TINY_SIZES
from tests.slow import SLOW

# A suite that a shell runs in its background ignores SIGINT, and so would every process it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # the same under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without this, MKL rounds by where a matrix lies in memory on CPUs of Intel, and equal steps differ in their last bits.
os.environ.setdefault("MKL_CBWR", "AVX2")

# Hundreds of processes import dpscope: they read bytecode that the first of them has written.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A machine may be busy. In CI the same examples every time: a run that fails there is about the change, not about luck.
if find_spec("hypothesis"):  # tests/gpu also runs on machines without it
    from hypothesis import HealthCheck, settings

    in_ci = bool(os.environ.get("CI"))
    settings.register_profile("dpscope", derandomize=in_ci, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("dpscope")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {ROOT / "tests" / name for name in SLOW}
    slow_files = {path for path in {item.path for item in items} if not slow.isdisjoint((path, *path.parents))}
    for item in items:
        if item.path in slow_files:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


CLEAN_COPY = pytest.StashKey[Any]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if "opacus.accountants" in sys.modules:
        from tests import remembered_accounting

        remembered_accounting.install()
    if "torch" in sys.modules:
        import torch

        # Autograd starts its threads in the first backward pass of a process, and a process with such threads cannot be
        # copied. In CUDA builds of torch it starts some, also without a GPU, where Inductor was there before.
        torch.ones(1, requires_grad=True).backward()
    if any("clean_copy" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests.clean_copy import CleanCopy

        session.config.stash[CLEAN_COPY] = CleanCopy()
        session.config.add_cleanup(session.config.stash[CLEAN_COPY].end)


@pytest.fixture
def clean_copy(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """clean_copy(function, *arguments): what the function returns in a process in which no test has run."""
    return pytestconfig.stash[CLEAN_COPY]


# Folders whose files share what takes long to make: a browser and the pages it opens; worlds of processes.
TOGETHER = ("tests/browser/", "tests/unit/flash/ranks/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time to each core; folders of `TOGETHER` whole, so that one core makes what their files share."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = next((folder for folder in TOGETHER if nodeid.startswith(folder)), "")
            return folder or super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Tests share the machine; a thread pool each would only make them wait for one another."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def no_seeds_for_absent_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` notes the whole stack for a GPU that may be used later: milliseconds, thousands of times."""
    torch = sys.modules.get("torch")
    for backend in (torch.cuda, torch.xpu, torch.mtia) if torch else ():
        if hasattr(backend, "manual_seed_all") and not backend.is_available():
            monkeypatch.setattr(backend, "manual_seed_all", lambda seed: None)


@pytest.fixture(autouse=True)
def graphs_are_not_timed_and_collect_no_garbage() -> None:
    """After every graph torch.compile empties the processor's caches, to time guards, and looks for cycles."""
    guards, config = (sys.modules.get(f"torch._dynamo.{name}") for name in ("guards", "config"))
    if guards is not None:
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
    if getattr(config, "run_gc_after_compile", False):
        setattr(config, "run_gc_after_compile", False)  # noqa: B010


@pytest.fixture(autouse=True)
def trainers_collect_no_garbage() -> None:
    """After each training Accelerate looks for cycles among all objects of the process: half of a small training."""
    memory = sys.modules.get("accelerate.utils.memory")
    if memory is not None:
        vars(memory)["gc"] = SimpleNamespace(collect=lambda: 0)


@pytest.fixture(autouse=True)
def no_phase_listener_leaks() -> Iterator[None]:
    """A listener that outlives its test would slow down and distort every later step."""
    yield
    phases = sys.modules.get("dpscope.vocabulary.phases")
    if phases is not None and phases._listeners:
        left = list(phases._listeners)
        phases._listeners.clear()
        pytest.fail(f"phase listeners left behind: {left}")


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., Any]:
    """A run spec of the small transformer; keywords change it."""
    from dpscope.runner.spec import RunSpec
    from dpscope.workloads.configs import make_config

    def make(**changes: Any) -> RunSpec:
        values: dict[str, Any] = {"method": "standard", "batch_size": 2, "seq_len": 8, "warmup": 0, "steps": 1}
        return RunSpec(**{"workload": make_config("tiny", **TINY_SIZES), **values, **changes})

    return make


@pytest.fixture(scope="session")
def make_result(make_spec: Callable[..., Any]) -> Callable[..., Any]:
    """A result as a measurement would give it: a median in milliseconds, a peak in bytes."""
    from dpscope.results.schema import Result, result_for
    from dpscope.vocabulary.statuses import OK

    def make(
        *, status: str = OK, reason: str | None = None, median: float = 10.0, peak: int = 2**20, **spec: Any
    ) -> Result:
        described = make_spec(**spec).to_dict()
        if status != OK:
            reason = reason or f"because it {status}"
            return result_for(described, status=status, reason=reason, environment=ENVIRONMENT)
        timing = {"step_ms": [median] * 10, "median_ms": median, "p10_ms": median, "p90_ms": median, "mean_ms": median}
        return result_for(
            described,
            avg_time_ms=median,
            peak_memory_mb=peak / 2**20,
            timing=timing,
            memory={"source": "cpu_allocator", "peak_bytes": peak},
            environment=ENVIRONMENT,
        )

    return make


@pytest.fixture(scope="session")
def tiny_flags() -> list[str]:
    """The flags of a `dpscope compare` whose rows are as small as rows can be."""
    sizes = [text for name, value in TINY_SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["--device", "cpu", "--model", "tiny", *sizes, "--seq-len", "8", "--warmup", "0", "--steps", "1"]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python ARGUMENTS` as a real process, which does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Poll a condition until it holds; fail with `what` when it does not within the deadline."""

    def wait(condition: Callable[[], object], what: str, *, seconds: float = 60, pause: float = 0.005) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds} s in vain until {what}")
            if pause:
                time.sleep(pause)

    return wait


@pytest.fixture(scope="session")
def alive() -> Callable[[int], bool]:
    """Is a process still running? A zombie that nobody has collected yet is not."""

    def check(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    return check


@pytest.fixture(scope="session")
def running_workers() -> Callable[[int], list[int]]:
    """The measuring child processes of a sweep's process."""

    def find(parent: int) -> list[int]:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            return [int(pid) for pid in children if b"dpscope.runner.worker" in _command_line(pid)]
        except (FileNotFoundError, ProcessLookupError):
            return []

    return find


def _command_line(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture(scope="session")
def ncu_captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real reports of one step of a small transformer on an H200 (ncu 2025.3.1): as one range, and kernel by kernel."""
    kernels = tmp_path_factory.mktemp("captures") / "kernels_small.ncu-rep"
    kernels.write_bytes(gzip.decompress((DATA / "kernels_small.ncu-rep.gz").read_bytes()))
    return {"range": DATA / "apprange_small.ncu-rep", "kernels": kernels}


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An `ncu` that behaves as a plan says, found as the real one would be found."""
    from tests.fake_tools.ncu import FakeNcu

    def make(**plan: Any) -> FakeNcu:
        fake = FakeNcu(tmp_path / "fake", **plan)
        monkeypatch.setenv("NCU", str(fake.path))
        return fake

    return make


@pytest.fixture
def no_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without ncu."""
    monkeypatch.setenv("NCU", "no-such-ncu")
