"""Recording real steps on the CPU: the files are valid, small, and hold what was asked for."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import socket

import pytest
import torch
from torch import nn

from dpscope.instruments.trace.capture import MODULE, Detail, module_ranges, record
from dpscope.instruments.trace.events import parse_events, read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.results.payloads.trace import TracePayload
from dpscope.results.schema import find_mismatch
from dpscope.results.store import NO_ROOM
from dpscope.vocabulary.instruments import Schedule
from dpscope.vocabulary.phases import BACKWARD, CLIP, FORWARD, OPTIMIZER, phase

EVERYTHING = Detail(shapes=True, memory=True, stacks=True, modules=True, flops=True)


class Training:
    """A step in phases, with a value that Python asks for in `clip`."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(32, 64)

    def __call__(self):
        with phase(FORWARD):
            loss = self.model(self.x).square().mean()
        with phase(BACKWARD):
            loss.backward()
        with phase(CLIP):
            loss.item()
        with phase(OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    training = Training()
    schedule = Schedule(skip_first=1, active=2)
    return record(
        training,
        tmp_path_factory.mktemp("recording"),
        device="cpu",
        schedule=schedule,
        detail=EVERYTHING,
        model=training.model,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """At default settings."""
    return record(Training(), tmp_path_factory.mktemp("plain"), device="cpu", schedule=Schedule(active=2))


@pytest.fixture(scope="module")
def document(recording):
    return json.loads(gzip.decompress(recording.paths[0].read_bytes()))


@pytest.fixture(scope="module")
def summary(recording):
    return summarise([read_trace(path) for path in recording.paths])


def test_every_event_has_what_perfetto_needs(document):
    """The trace event format: a phase letter, a time, a place; complete events a duration that is not negative."""
    assert {event["ph"] for event in document["traceEvents"]} <= set("XMiIsftBECbne")
    for event in document["traceEvents"]:
        assert isinstance(event["ph"], str)
        assert isinstance(event["name"], str)
        assert {"pid", "tid", "ts"} <= set(event)
        assert isinstance(event["ts"], (int, float))
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_complete_events_of_a_thread_are_nested_and_never_cross(plain):
    """Perfetto drops slices that begin within another and end after it. (With stacks torch itself makes some: a
    step's range begins in one call of `profiler.step` and ends in the next.)"""
    threads = {}
    for event in json.loads(gzip.decompress(plain.paths[0].read_bytes()))["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "Trace":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        open_ = []
        for start, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.01  # microseconds are written with three digits
            open_.append(end)


@pytest.mark.skipif(shutil.which("trace_processor_shell") is None, reason="Perfetto's trace processor is not here")
def test_perfetto_itself_reads_the_trace(recording):
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    config = TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with TraceProcessor(trace=str(recording.paths[0]), config=config) as processor:
        rows = list(processor.query("select count(*) as n from slice where name = 'forward'"))
    assert rows[0].n == 2


def test_a_file_does_not_tell_which_machine_it_was_recorded_on(document):
    assert document["traceName"] == document.get("host_name", "") == ""  # older releases of torch name no host
    assert socket.gethostname() not in [document.get("host_name"), *document.get("trace_id", "").split()]


def test_only_the_active_steps_are_recorded(summary, recording):
    assert len(recording.paths) == 1
    assert recording.paths[0].name == "trace.json.gz"
    assert summary["steps"] == 2


def test_phase_times_sum_to_the_step_and_what_is_between_them_is_little(summary):
    times = {row["phase"]: row["cpu_ms"] for row in summary["phases"]}
    assert list(times) == ["forward", "backward", "clip", "optimizer", "between phases"]
    assert sum(times.values()) == pytest.approx(summary["step_ms"], rel=0.02)
    assert all(time > 0 for time in times.values())


def test_a_planted_item_is_found_with_its_line(summary):
    (wait,) = [wait for wait in summary["synchronisations"] if wait["phase"] == "clip"]
    assert (wait["operator"], wait["count"]) == ("aten::item", 1)
    assert "test_capture.py" in wait["where"]


def test_modules_are_named_by_their_paths_and_get_forward_and_backward_time(summary):
    modules = {row["module"]: row for row in summary["modules"]}
    assert {"0", "1", "2"} <= set(modules)
    assert set(modules["0"]["phases"]) == {"forward", "backward"}


def test_operations_are_counted_from_shapes(recording):
    products = 2 * 32 * 64 * 128 + 2 * 32 * 128 * 8
    assert recording.flops["aten::addmm"] == pytest.approx(products)


def test_memory_is_recorded_by_operator(summary):
    by_operator = {row["operator"]: row for row in summary["memory"]["operators"]}
    assert by_operator["aten::addmm"]["allocated_bytes"] == 4 * 32 * (128 + 8)


def test_little_is_recorded_unless_it_is_asked_for(plain, recording):
    assert plain.paths[0].stat().st_size < 0.5 * recording.paths[0].stat().st_size
    trace = read_trace(plain.paths[0])
    assert not trace.frames
    assert not trace.memory
    assert not any("Input Dims" in event.args for event in trace.operators)
    assert not any(event.name.startswith(MODULE) for event in trace.annotations)


def test_a_schedule_with_several_cycles_leaves_a_file_a_cycle(tmp_path):
    recording = record(Training(), tmp_path, device="cpu", schedule=Schedule(active=1, repeat=3))
    assert [path.name for path in recording.paths] == ["trace.json.gz", "trace-2.json.gz", "trace-3.json.gz"]
    assert summarise([read_trace(path) for path in recording.paths])["steps"] == 3


def test_the_model_is_left_as_it_was(tmp_path):
    model = Training().model
    with module_ranges(model):
        assert all(layer._forward_hooks for layer in model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)


def test_a_module_that_raises_leaves_no_range_open():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("on purpose")

    model = nn.Sequential(Fails())
    with module_ranges(model), torch.profiler.profile() as profiler:
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.zeros(1))
        torch.zeros(1).add(1)
    found = {event.name: event.time_range for event in profiler.events()}
    assert found[MODULE + "0"].end <= found["aten::add"].start


def test_an_empty_recording_is_no_trace(tmp_path):
    assert parse_events([]).operators == []


def test_a_trace_that_torch_could_not_write_is_a_full_disk_and_not_a_missing_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(OSError, match=r"torch\.profiler could not write its trace") as caught:
            record(Training(), tmp_path, device="cpu", schedule=Schedule(active=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno in NO_ROOM


def test_the_summary_is_of_the_shape_that_result_files_have(summary):
    assert {"modules", "memory"} <= set(summary)
    assert find_mismatch(json.loads(json.dumps(summary)), TracePayload) is None
