"""`all` is every instrument that can work on this machine; a sentence says what cannot and why."""

from __future__ import annotations

import pytest

from dpscope.runner.measure import choose_instruments


@pytest.fixture
def machine(monkeypatch):
    """A machine with or without Nsight's tools."""

    def set_up(*, ncu, nsys):
        monkeypatch.setattr("dpscope.runner.measurements.ncu.find_ncu", lambda: ncu)
        monkeypatch.setattr("dpscope.runner.measurements.nsys.find_nsys", lambda: nsys)

    return set_up


def test_where_everything_is_found_everything_is_used(machine):
    machine(ncu="/usr/bin/ncu", nsys="/usr/bin/nsys")
    choice = choose_instruments("all", "cuda")
    assert (choice.instruments, choice.remarks) == (("time", "memory", "ncu", "nsys", "trace"), [])


def test_what_is_not_found_is_said_with_its_remedy(machine):
    machine(ncu=None, nsys=None)
    choice = choose_instruments(["all"], "cuda")
    assert choice.instruments == ("time", "memory", "ncu", "trace")
    counted, timeline = choice.remarks
    assert "ncu: bytes are estimated from tensor sizes, not counted: no `ncu` was found" in counted
    assert "nsys is left out: no `nsys` was found" in timeline


def test_on_the_cpu_tools_of_the_gpu_are_not_asked_for(machine):
    machine(ncu="/usr/bin/ncu", nsys="/usr/bin/nsys")
    choice = choose_instruments("all", "cpu")
    assert "nsys" not in choice.instruments
    assert all("there is no GPU" in remark for remark in choice.remarks)


def test_names_are_taken_as_they_are_given():
    assert choose_instruments("time, trace", "cpu").instruments == ("time", "trace")
    assert choose_instruments(("memory",), "cuda").instruments == ("memory",)
