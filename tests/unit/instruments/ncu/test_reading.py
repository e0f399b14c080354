"""Reports of the real ncu, read to the exact value both ways; files that are none are refused with a sentence."""

from __future__ import annotations

import sys

import pytest

from dpscope.instruments.ncu.metrics import DRAM_READ, DRAM_WRITE, GPU_TIME
from dpscope.instruments.ncu.reading import UnreadableReport, find_phase, parse_raw_csv, read_report
from tests.fake_tools.ncu import raw_csv


@pytest.fixture(autouse=True)
def without_ncu(no_ncu):
    """So that the package `ncu-report` reads, unless a test brings an ncu."""


def test_a_range_is_one_row_with_its_counts(ncu_captures):
    (action,) = read_report(ncu_captures["range"])
    assert action.name == "range"
    assert action.metrics[DRAM_READ] == 1_135_307_776
    assert action.metrics["lts__t_sectors_op_red.sum"] == 589_824
    assert action.metrics["profiler__replayer_passes"] == 2


def test_kernels_are_rows_in_order_of_launch(ncu_captures):
    actions = read_report(ncu_captures["kernels"])
    assert len(actions) == 298
    first, last = actions[0], actions[-1]
    assert (first.metrics[DRAM_READ], first.metrics[DRAM_WRITE], first.metrics[GPU_TIME]) == (2560, 0, 1728)
    assert "arange_cuda_out" in first.name  # the demangled name, with what the template was made for
    assert "multi_tensor_apply_kernel" in last.name
    assert sum(action.metrics[DRAM_READ] for action in actions) == 1_623_529_728


def test_ncu_and_the_package_read_the_same(ncu_captures, fake_ncu):
    by_package = read_report(ncu_captures["kernels"])[:40]
    rows = [(action.name, action.metrics, None) for action in by_package]
    ncu = fake_ncu(csv={"any": raw_csv(rows)})
    by_ncu = read_report(ncu_captures["kernels"])
    assert {"--csv", "--page=raw", "--print-units=base"} <= set(ncu.calls[-1])
    assert [action.metrics[DRAM_READ] for action in by_ncu] == [action.metrics[DRAM_READ] for action in by_package]
    assert [action.name for action in by_ncu] == [action.name for action in by_package]


def test_thousands_separators_units_and_words_in_a_cell():
    text = raw_csv([("range", {DRAM_READ: 1_135_307_776.0, "dram__bytes_write.sum": "n/a", "l1tex__x.sum": 0.5}, None)])
    assert '"1,135,307,776"' in text
    assert '"byte"' in text
    (action,) = parse_raw_csv(text)
    assert action.metrics == {DRAM_READ: 1_135_307_776.0, "l1tex__x.sum": 0.0}


def test_the_phase_of_a_kernel_is_found_in_its_nvtx_ranges():
    rows = [("a", {DRAM_READ: 1.0}, "backward"), ("b", {DRAM_READ: 1.0}, None), ("c", {DRAM_READ: 1.0}, "clip")]
    assert [action.phase for action in parse_raw_csv(raw_csv(rows))] == ["backward", None, "clip"]
    assert find_phase(["", "0:<default domain>:dpscope.phase.noise:none"]) == "noise"
    assert find_phase(["my own range called forward"]) is None


@pytest.mark.parametrize(("kind", "share"), [("range", 0.4), ("kernels", 0.87)])
def test_a_report_that_was_cut_short_is_refused(ncu_captures, tmp_path, kind, share):
    whole = ncu_captures[kind].read_bytes()
    cut = tmp_path / "cut.ncu-rep"
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UnreadableReport, match=r"cut\.ncu-rep was cut short.*run ncu again"):
        read_report(cut)


@pytest.mark.parametrize("content", [b"", b"hello", b"NVR\0"])
def test_a_file_that_is_no_report_is_refused(tmp_path, content):
    path = tmp_path / "mine.ncu-rep"
    path.write_bytes(content)
    with pytest.raises(UnreadableReport, match=r"mine\.ncu-rep"):
        read_report(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnreadableReport, match=r"gone\.ncu-rep is not there"):
        read_report(tmp_path / "gone.ncu-rep")


def test_what_ncu_says_of_a_file_it_cannot_read_is_passed_on(tmp_path, fake_ncu):
    fake_ncu()
    path = tmp_path / "mine.ncu-rep"
    path.write_bytes(b"hello")
    with pytest.raises(UnreadableReport, match=r"ncu cannot read mine\.ncu-rep \(Failed to load report file\)"):
        read_report(path)


def test_without_ncu_and_without_the_package_it_says_what_to_install(ncu_captures, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(UnreadableReport, match=r"pip install ncu-report$"):
        read_report(ncu_captures["range"])
