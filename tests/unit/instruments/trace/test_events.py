"""Reading traces: what torch.profiler writes is read whole, and what is no trace gets a sentence."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.errors import UserError
from dpscope.instruments.trace.events import EnclosingEvents, Event, nest, parse_events, read_trace
from tests.unit.instruments.trace.handmade import gpu_step, operator


def write(path, document):
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_a_trace_is_read_plain_or_compressed_and_as_a_bare_list(tmp_path):
    compressed = write(tmp_path / "a.json.gz", {"traceEvents": gpu_step()})
    plain = tmp_path / "a.json"
    plain.write_text(json.dumps(gpu_step()))
    assert [e.name for e in read_trace(plain).operators] == [e.name for e in read_trace(compressed).operators]
    assert len(read_trace(compressed).device_work) == 7


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_that_was_cut_short_gets_a_sentence(tmp_path, share, suffix):
    text = json.dumps({"traceEvents": gpu_step()}).encode()
    whole = gzip.compress(text) if suffix.endswith("gz") else text
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"cut.* is (not a complete trace|damaged)"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a complete trace"),
        (b"{}", "no list of traceEvents"),
        (b'{"traceEvents": 5}', "no list of traceEvents"),
        (b'{"traceEvents": [1, 2]}', "no list of traceEvents"),
        (b'{"traceEvents": []}', "holds no operators"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}', "not a trace of torch.profiler"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": "soon"}]}',
            "not a trace of torch.profiler",
        ),
    ],
)
def test_what_is_no_trace_gets_a_sentence(tmp_path, content, words):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_trace(path)


def test_a_file_that_is_not_there_gets_a_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot read the trace"):
        read_trace(tmp_path / "none.json.gz")


def test_a_kernel_is_joined_to_its_launch_and_to_the_operator_that_made_it():
    trace = parse_events(gpu_step())
    mm = next(work for work in trace.device_work if "256x64" in work.name)
    assert trace.launch_of(mm).start == 350
    assert trace.operator_of(mm).name == "aten::mm"


def test_a_kernel_whose_launch_was_not_recorded_is_joined_by_its_external_id():
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 1, "args": {"External id": 77}}
    trace = parse_events([operator("aten::mm", 0, 3, **{"External id": 77}), kernel])
    assert trace.operator_of(trace.device_work[0]).name == "aten::mm"


@st.composite
def nested_events(draw):
    """Intervals that are properly nested, as those of one thread are."""
    events = []

    def fill(start, end, depth):
        moment = start
        while depth and moment < end and draw(st.booleans()):
            begin = draw(st.integers(moment, end - 1))
            finish = draw(st.integers(begin + 1, end))
            events.append(Event(f"op{len(events)}", "cpu_op", begin, finish - begin, (1, 1), {}))
            fill(begin, finish, depth - 1)
            moment = finish

    fill(0, 200, 4)
    return events


@given(nested_events())
def test_self_times_sum_to_the_time_that_any_event_covers(events):
    nest(events)
    covered = {moment for event in events for moment in range(int(event.start), int(event.end))}
    assert sum(event.self_time for event in events) == len(covered)


@given(nested_events(), st.integers(0, 199))
def test_the_innermost_event_around_a_moment_is_the_shortest_that_contains_it(events, moment):
    nest(events)
    events.sort(key=lambda event: (event.start, -event.duration))
    found = EnclosingEvents(events).find((1, 1), moment + 0.5)
    containing = [event for event in events if event.start <= moment + 0.5 <= event.end]
    assert (found.duration if found else None) == min((e.duration for e in containing), default=None)


def test_what_happens_in_the_last_nanosecond_of_an_event_is_inside_it():
    """The profiler's times are whole nanoseconds; as sums of floats they are a little off."""
    event = Event("aten::sum", "cpu_op", 721.434, 7.6909999999999, (1, 1), {})
    assert event.end < 729.125
    assert EnclosingEvents([event]).find((1, 1), 729.125) is event
    assert EnclosingEvents([event]).find((1, 1), 729.126) is None


def test_graphs_of_inductor_have_one_name_in_every_run():
    raw = {"ph": "X", "cat": "cpu_op", "ts": 0.0, "dur": 1.0, "pid": 1, "tid": 1}
    names = ("## Call CompiledFxGraph fvsukhnu452n ##", "aten::mm")
    found = parse_events([{**raw, "name": name} for name in names])
    assert [event.name for event in found.operators] == ["Inductor graph", "aten::mm"]
