"""Waits, copies and casts: found where they are, and nothing else is."""

from __future__ import annotations

import pytest

from dpscope.instruments.trace.attribution import step_views
from dpscope.instruments.trace.events import parse_events
from dpscope.instruments.trace.summary import casts, copies, synchronisations
from tests.unit.instruments.trace.handmade import annotation, call, copy, event, gpu_step, operator


def views(events):
    return step_views(parse_events(events))


def test_a_planted_item_is_a_wait_with_its_operator_phase_and_line():
    (wait,) = synchronisations(views(gpu_step()), on_gpu=True)
    assert wait["call"] == "cudaStreamSynchronize"
    assert wait["operator"] == "aten::item"
    assert wait["phase"] == "clip"
    assert wait["where"] == "train.py(12): step"  # not torch's own frame
    assert (wait["count"], wait["ms"]) == (1, pytest.approx(0.060))


def test_our_own_wait_at_the_end_of_a_step_is_none_of_the_steps():
    assert not any(wait["call"] == "cudaDeviceSynchronize" for wait in synchronisations(views(gpu_step()), on_gpu=True))


def test_a_copy_to_pageable_memory_is_a_wait():
    events = [
        annotation("ProfilerStep#0", 0, 100),
        operator("aten::_to_copy", 10, 50),
        call("cudaMemcpyAsync", 20, 30, 1),
        copy("Memcpy DtoH (Device -> Pageable)", 25, 20, 1, 1024),
    ]
    (wait,) = synchronisations(views(events), on_gpu=True)
    assert (wait["call"], wait["operator"], wait["where"]) == ("cudaMemcpyAsync", "aten::_to_copy", "")


def test_a_synchronisation_outside_any_operator_says_so():
    events = [annotation("ProfilerStep#0", 0, 100), call("cudaDeviceSynchronize", 20, 30, 1)]
    (wait,) = synchronisations(views(events), on_gpu=True)
    assert (wait["operator"], wait["phase"]) == ("(no operator)", "between phases")


def test_on_the_cpu_values_handed_to_python_are_what_would_wait():
    events = [
        annotation("ProfilerStep#0", 0, 100),
        annotation("clip", 0, 50),
        operator("aten::item", 10, 8),
        operator("aten::_local_scalar_dense", 12, 4),
        operator("aten::add", 20, 8),
    ]
    (wait,) = synchronisations(views(events), on_gpu=False)
    assert (wait["operator"], wait["phase"], wait["count"]) == ("aten::item", "clip", 1)


def test_copies_have_a_direction_their_bytes_and_who_asked_for_them():
    found = copies(views(gpu_step()))
    assert [(row["kind"], row["operator"], row["phase"], row["bytes"]) for row in found] == [
        ("HtoD", "aten::to", "between phases", 4096),
        ("DtoH", "aten::item", "clip", 4),
    ]


def copy_operator(target, source, start=10):
    return operator("aten::copy_", start, 5, **{"Input type": [target, source, "Scalar"]})


def test_a_copy_between_number_formats_is_a_cast_and_one_within_a_format_is_none():
    events = [
        annotation("ProfilerStep#0", 0, 100),
        copy_operator("c10::BFloat16", "float"),
        copy_operator("float", "float", start=20),
        copy_operator("float", "c10::BFloat16", start=30),
    ]
    assert {(row["formats"], row["count"]) for row in casts(views(events))} == {
        ("float to bfloat16", 1),
        ("bfloat16 to float", 1),
    }


def test_without_shapes_the_copy_of_a_conversion_is_taken_for_a_cast():
    events = [
        annotation("ProfilerStep#0", 0, 100),
        operator("aten::_to_copy", 10, 20),
        operator("aten::copy_", 15, 10),
        operator("aten::copy_", 50, 10),  # into memory that was there: no telling
    ]
    (cast,) = casts(views(events))
    assert cast["count"] == 1
    assert "--shapes" in cast["formats"]


def test_frames_of_torch_are_passed_over_for_the_line_that_called_them():
    frames = [
        event("python_function", "model.py(7): forward", 0, 90),
        event("python_function", "nn.Module: Linear_0", 5, 80),
        event("python_function", "torch/nn/modules/linear.py(114): forward", 6, 70),
        event("python_function", "<built-in method item of Tensor object at 0x1>", 8, 60),
    ]
    events = [annotation("ProfilerStep#0", 0, 100), call("cudaStreamSynchronize", 20, 30, 1), *frames]
    (wait,) = synchronisations(views(events), on_gpu=True)
    assert wait["where"] == "model.py(7): forward"
