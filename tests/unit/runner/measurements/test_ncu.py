"""A row of `dpscope ncu` in this process: counted by a fake ncu, or estimated with the reason why."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

from dpscope.errors import UserError
from dpscope.instruments.ncu import metrics
from dpscope.instruments.ncu.metrics import DRAM_READ, DRAM_WRITE, L2_TEX_READ, RANGE_METRICS, TENSOR_OPS, XBAR_READ
from dpscope.instruments.timing import no_progress
from dpscope.runner import measure, ranged_step, steps
from dpscope.runner.measurements import ncu as measurement
from dpscope.runner.measurements.ncu import measure_ncu
from dpscope.runner.sweep import ROW_SECONDS
from tests.fake_tools.ncu import COUNTED, NO_PERMISSION, raw_csv

GUESS = {
    "dram_read_bytes": 1_000,
    "dram_write_bytes": 500,
    "flops": {"total": 7},
    "kernels": {"rows": [{"name": "aten::mm", "family": "gemm"}], "calls_seen": 1, "calls_total": 1, "note": ""},
    "blind_spots": ["Caches are not seen."],
}
OUT_OF_MEMORY = 'dpscope-outcome: {"status": "oom", "reason": "out of GPU memory (CUDA out of memory. Tried …)"}\n'
COUNTS = dict.fromkeys((*RANGE_METRICS, TENSOR_OPS[1]), 1000.0)  # of a step in fp32
KERNELS = [
    ("nvjet_sm90_a", {DRAM_READ: 90.0, DRAM_WRITE: 5.0}, "forward"),
    ("nvjet_sm90_a", {DRAM_READ: 90.0, DRAM_WRITE: 5.0}, "backward"),
    ("nvjet_sm90_a", {DRAM_READ: 90.0, DRAM_WRITE: 5.0}, "backward"),
]
CSV = {"step.ncu-rep": raw_csv([("range", COUNTS, None)]), "kernels.ncu-rep": raw_csv(KERNELS)}


@pytest.fixture
def machine(monkeypatch):
    """What needs a GPU, without one: steps, the estimate, the environment."""
    estimate = ModuleType("dpscope.instruments.estimate")
    estimate.estimate_traffic = lambda step, *, device: {**GUESS}
    estimate.measure_ceilings = lambda device: {"how": "a fake"}
    monkeypatch.setitem(sys.modules, "dpscope.instruments.estimate", estimate)
    monkeypatch.setattr(steps, "assemble", lambda spec: (Trainer(), [None]))
    monkeypatch.setattr(measurement.reading, "count_launches", lambda step: 3)
    monkeypatch.setattr(measure, "collect", lambda device: {"gpu": "NVIDIA H200"})
    return estimate


class Trainer:
    model = torch.nn.Identity()

    def train_step(self, batch):
        return None

    def begin_measuring(self):
        pass


@pytest.fixture
def spec_of(make_spec):
    def make(**options):
        return make_spec(device="cuda", instrument="ncu", options=options)

    return make


@pytest.fixture
def reports(ncu_captures):
    return {kind: str(path) for kind, path in ncu_captures.items()}


def test_a_step_is_counted(machine, fake_ncu, spec_of, reports, tmp_path):
    fake_ncu(csv=CSV, reports=reports)
    result = measure_ncu(spec_of(), no_progress, tmp_path / "row")
    assert result.ok
    seen = result.ncu
    assert (seen["source"], seen["reason"], seen["ncu_version"]) == ("measured", None, "2025.3.1")
    assert seen["traffic"]["dram_read_bytes"] == 1000
    assert seen["traffic"]["l2_read_bytes"] == 32 * 3000
    assert seen["flops"] == {"tensor": 1000}
    assert seen["metrics"][DRAM_READ] == 1000
    assert seen["missing"] == {}
    assert seen["kernels"] == {}
    assert seen["ceilings"] == {"how": "a fake"}
    assert result.files == {"Nsight Compute report of the step": "step.ncu-rep"}
    assert (tmp_path / "row" / "step.ncu-rep").exists()


def test_the_estimate_stands_beside_a_measurement(machine, fake_ncu, spec_of, reports, tmp_path):
    fake_ncu(csv=CSV, reports=reports)
    seen = measure_ncu(spec_of(), no_progress, tmp_path / "row").ncu
    assert seen["estimate"] == GUESS
    assert seen["traffic"]["l2_to_sm_bytes"] == 32 * 1000  # measured figures stay


def test_the_command_can_be_repeated_by_hand(machine, fake_ncu, spec_of, reports, tmp_path):
    ncu = fake_ncu(csv=CSV, reports=reports)
    command = measure_ncu(spec_of(), no_progress, tmp_path / "row").ncu["command"]
    assert command[0] == str(ncu.path)
    assert "--replay-mode=app-range" in command
    assert command[-4:-1] == [sys.executable, "-m", "dpscope.runner.ranged_step"]
    assert ranged_step.RunSpec.from_dict(json.loads(command[-1])) == spec_of()


def test_metrics_of_nvprof_are_taken_by_their_new_names(machine, fake_ncu, spec_of, reports, tmp_path):
    ncu = fake_ncu(csv=CSV, reports=reports)
    seen = measure_ncu(spec_of(metrics="l2_read_throughput,sm__more.avg"), no_progress, tmp_path / "row").ncu
    asked = next(part for part in ncu.calls[1] if part.startswith("--metrics="))
    assert asked.endswith(",sm__more.avg")
    assert "throughput" not in asked
    assert seen["missing"]["sm__more.avg"] == "the report does not hold it"


def test_what_the_gpu_does_not_have_is_dropped_and_named(machine, fake_ncu, spec_of, reports, tmp_path):
    counts = {name: value for name, value in COUNTS.items() if name != L2_TEX_READ} | {XBAR_READ: 500.0}
    fake_ncu(csv={"any": raw_csv([("range", counts, None)])}, reports=reports, unknown_metrics=[L2_TEX_READ])
    seen = measure_ncu(spec_of(metrics="xbar"), no_progress, tmp_path / "row").ncu
    assert seen["source"] == "measured"
    assert "does not know it" in seen["missing"][L2_TEX_READ]
    assert seen["traffic"]["l2_to_sm_bytes"] == 500  # at the crossbar, since L2 does not tell


def test_kernels_are_counted_one_by_one_on_request(machine, fake_ncu, spec_of, reports, tmp_path):
    ncu = fake_ncu(csv=CSV, reports=reports)
    result = measure_ncu(spec_of(per_kernel=True, kernel="nvjet", budget=33.0), no_progress, tmp_path / "row")
    kernels = result.ncu["kernels"]
    assert [(row["phase"], row["calls"], row["dram_read_bytes"]) for row in kernels["rows"]] == [
        ("backward", 2, 180),
        ("forward", 1, 90),
    ]
    assert (kernels["calls_seen"], kernels["calls_total"]) == (3, 3)
    assert "nvjet" in kernels["note"]
    asked = next(call for call in ncu.calls if "--replay-mode=kernel" in call)
    assert "--kernel-name=regex:nvjet" in asked
    assert asked[-1] == "33.0"  # the program closes the range by then
    assert set(result.files.values()) == {"step.ncu-rep", "kernels.ncu-rep"}


def test_kernels_that_could_not_be_counted_cost_the_row_nothing_else(machine, fake_ncu, spec_of, reports, tmp_path):
    says = {"range": COUNTED, "kernels": OUT_OF_MEMORY}
    fake_ncu(csv=CSV, reports={"range": reports["range"]}, says=says)
    seen = measure_ncu(spec_of(per_kernel=True), no_progress, tmp_path / "row").ncu
    assert seen["source"] == "measured"
    assert seen["kernels"] == {}
    assert "out of GPU memory" in seen["missing"]["kernels"]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"says": {"range": NO_PERMISSION}}, "NVreg_RestrictProfilingToAdminUsers=0"),
        ({"says": {"range": "==WARNING== No kernels were profiled.\n"}}, "Ncu saw nothing"),
        ({"hangs": True}, "gave no report within 1 s"),
        ({"csv": {"any": "==ERROR== Failed to load report file"}, "reports": None}, "Ncu cannot read step.ncu-rep"),
    ],
)
def test_where_ncu_cannot_count_the_row_is_an_estimate_that_says_why(
    machine, fake_ncu, spec_of, reports, tmp_path, monkeypatch, plan, reason
):
    monkeypatch.setenv(ROW_SECONDS, "2")
    fake_ncu(**{name: reports if value is None else value for name, value in plan.items()})
    result = measure_ncu(spec_of(), no_progress, tmp_path / "row")
    assert result.ok
    seen = result.ncu
    assert seen["source"] == "estimate"
    assert reason in seen["reason"]
    assert seen["reason"].endswith(".")
    assert seen["traffic"] == {"dram_read_bytes": 1_000, "dram_write_bytes": 500}
    assert seen["flops"] == {"total": 7}
    assert seen["kernels"] == GUESS["kernels"]
    assert set(seen["missing"]) == set(metrics.TRAFFIC_FORMULAS) - set(seen["traffic"])
    assert seen["estimate"]["blind_spots"] == GUESS["blind_spots"]


def test_without_ncu_the_reason_says_where_it_is_looked_for(machine, no_ncu, spec_of, tmp_path):
    seen = measure_ncu(spec_of(), no_progress, tmp_path / "row").ncu
    assert seen["source"] == "estimate"
    assert "No `ncu` was found" in seen["reason"]
    assert "PATH" in seen["reason"]


def test_who_wants_no_estimate_gets_none(machine, no_ncu, spec_of, tmp_path):
    with pytest.raises(UserError, match=r"--require-measured.*no `ncu` was found"):
        measure_ncu(spec_of(require_measured=True), no_progress, tmp_path / "row")


def test_a_step_that_runs_out_of_memory_under_ncu_is_a_row_that_did(machine, fake_ncu, spec_of, tmp_path):
    fake_ncu(says={"range": OUT_OF_MEMORY}, code=1)
    result = measure_ncu(spec_of(), no_progress, tmp_path / "row")
    assert (result.status, result.reason[:29]) == ("oom", "under ncu: out of GPU memory ")


def test_an_estimate_that_fails_beside_a_measurement_is_named(machine, fake_ncu, spec_of, reports, tmp_path):
    def fail(step, *, device):
        raise RuntimeError("a strange operator")

    machine.estimate_traffic = fail
    fake_ncu(csv=CSV, reports=reports)
    seen = measure_ncu(spec_of(), no_progress, tmp_path / "row").ncu
    assert seen["source"] == "measured"
    assert seen["estimate"] == {}
    assert "a strange operator" in seen["missing"]["estimate"]


def test_progress_follows_the_runs_of_the_program(machine, fake_ncu, spec_of, reports, tmp_path):
    stages = []
    fake_ncu(csv=CSV, reports=reports)
    measure_ncu(spec_of(), lambda stage, done, total: stages.append(stage), tmp_path / "row")
    assert stages == ["under ncu", "under ncu, 1 runs done", "ceilings and estimate"]


class Cuda:
    """torch.cuda's profiler and NVTX, written down."""

    def __init__(self):
        self.diary = []
        self.open = {}

    def start(self):
        self.diary.append("start")

    def stop(self):
        self.diary.append("stop")

    def range_start(self, name):
        self.diary.append(f"+{name.removeprefix('dpscope.phase.')}")
        self.open[len(self.diary)] = name
        assert len(self.open) == 1, "two phases at a time"
        return len(self.diary)

    def range_end(self, handle):
        self.diary.append(f"-{self.open.pop(handle).removeprefix('dpscope.phase.')}")


@pytest.fixture
def cuda(monkeypatch):
    recorder = Cuda()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: recorder.diary.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "profiler", recorder)
    monkeypatch.setattr(torch.cuda, "nvtx", recorder)
    return recorder


@pytest.mark.parametrize("warmup", [0, 2])
def test_exactly_one_warm_step_lies_between_start_and_stop(make_spec, cuda, monkeypatch, warmup):
    def train_step(self, batch):
        cuda.diary.append("step")

    monkeypatch.setattr("dpscope.trainers.base.TrainerBase.train_step", train_step)
    ranged_step.run_ranged_step(make_spec(warmup=warmup))
    warm = ["step"] * max(warmup, 1)
    assert cuda.diary == [*warm, "synchronize", "start", "step", "synchronize", "stop"]


def test_a_kernel_belongs_to_the_innermost_phase(make_spec, cuda):
    """Ghost clipping finds its factors between two backward passes: the outer range is closed meanwhile."""
    ranged_step.run_ranged_step(make_spec(method="ghost"))
    inside = cuda.diary[cuda.diary.index("start") + 1 : cuda.diary.index("stop")]
    assert inside == [
        *("+forward", "-forward", "+backward", "-backward", "+clip", "-clip", "+backward", "-backward"),
        *("+noise", "-noise", "+optimizer", "-optimizer", "synchronize"),
    ]
    assert not cuda.open


def test_the_range_is_closed_when_the_budget_is_spent(make_spec, cuda, monkeypatch, wait_until):
    """As if ncu took its time over each kernel: the program stops being counted, and still ends its step."""

    def train_step(self, batch):
        if "start" in cuda.diary:
            wait_until(lambda: "stop" in cuda.diary, "the range was closed", seconds=20)
            cuda.diary.append("rest of the step")

    monkeypatch.setattr("dpscope.trainers.base.TrainerBase.train_step", train_step)
    ranged_step.run_ranged_step(make_spec(), seconds=0.05)
    assert cuda.diary[-5:] == ["start", "stop", "rest of the step", "synchronize", "stop"]


def test_how_the_program_ended_is_one_line(make_spec, cuda, monkeypatch, capsys):
    spec = json.dumps(make_spec().to_dict())
    monkeypatch.setattr(sys, "argv", ["ranged_step", spec])
    assert ranged_step.main() == 0
    assert capsys.readouterr().out == 'dpscope-outcome: {"status": "ok", "reason": null}\n'

    def train_step(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB.")

    monkeypatch.setattr("dpscope.trainers.base.TrainerBase.train_step", train_step)
    assert ranged_step.main() == 1
    line = capsys.readouterr().out
    assert line.startswith('dpscope-outcome: {"status": "oom", "reason": "out of GPU memory (CUDA out of memory.')
