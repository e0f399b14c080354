"""Checks of lesson 2."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import recorded
import torch
from language import say
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from checks import near


def _small_recording() -> Any:
    a = torch.randn(64, 64)
    images, filters = torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        for _ in range(40):
            torch.sin(a)
        for _ in range(3):
            torch.nn.functional.conv2d(images, filters)
    return recording


def exercise_2_1(operators: Any) -> None:
    assert operators != 3, say("You forgot one: `-`, `.mean()`, `/` …", "漏了一个：`-`、`.mean()`、`/` ……")
    assert operators == 4, say(
        "Count what is called on the image: two methods, and two arithmetic signs.",
        "数一数对图像做了什么：两个方法，两个算术符号。",
    )


def exercise_2_2(argument: dict[str, str]) -> None:
    right = {"shapes": "record_shapes", "lines of Python": "with_stack", "allocations": "profile_memory"}
    for need, expected in right.items():
        assert argument.get(need) == expected, say(f"For {need}: see the table above.", f"{need}：看上面的表。")


def exercise_2_3(made: Any) -> None:
    recording = [n for n in range(40) if made(n) in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)]
    assert recording == [10, 11, 12, 20, 21, 22], say(
        f"It records steps {recording}. The two recordings begin ten steps apart: wait + warmup + active = 10.",
        f"它记录的是第 {recording} 步。两次记录相隔十步：wait + warmup + active = 10。",
    )
    assert made(9) == ProfilerAction.WARMUP, say(
        "Warm up for one step at least: the profiler's own start is in the first.",
        "至少预热一步：分析器自己的启动开销在第一步里。",
    )


def exercise_2_4(most_called: Callable[[Any], Any]) -> None:
    recording = _small_recording()
    answer = most_called(recording)
    expected = max(recording.key_averages(), key=lambda row: row.count)
    assert answer is not None, say("Return the row's `key` and `count`.", "请返回该行的 `key` 和 `count`。")
    assert tuple(answer) == (expected.key, expected.count), say(
        f"In our recording it is {expected.key!r}; yours says {answer!r}. Each row has `key` and `count`.",
        f"在我们的记录里是 {expected.key!r}，你给出的是 {answer!r}。每行都有 `key` 和 `count`。",
    )


def exercise_2_5(share_of: Callable[[Any, str], float]) -> None:
    recording = _small_recording()
    rows = recording.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    expected = sum(row.self_cpu_time_total for row in rows if "conv" in row.key) / total
    inflated = sum(row.cpu_time_total for row in rows if "conv" in row.key) / total
    answer = share_of(recording, "conv")
    assert not near(answer, inflated, 0.001) or near(inflated, expected, 0.001), say(
        "You added up total times: an operator and what it calls are then counted twice. Use `self_cpu_time_total`.",
        "你加的是总时间：算子和它调用的算子被重复计算了。请用 `self_cpu_time_total`。",
    )
    assert near(answer, expected, 0.01), say(
        "Divide the sum of `self_cpu_time_total` of matching rows by that of all rows.",
        "用匹配行的 `self_cpu_time_total` 之和除以所有行之和。",
    )


def exercise_2_6(at_most: Callable[[float], float]) -> None:
    assert near(at_most(0.5), 2.0), say("Half of the time gone is twice as fast.", "时间去掉一半，就快一倍。")
    assert near(at_most(0.1), 1 / 0.9), say(
        "A tenth of the time gone leaves nine tenths.", "去掉十分之一，还剩十分之九。"
    )


def exercise_2_7(reads: Callable[[Path], int]) -> None:
    events = [{"ph": "X", "name": name, "ts": 1, "dur": 1} for name in ("aten::item", "aten::mean", "aten::item")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "x"}]}).encode()))
        assert reads(path) == 2, say(
            "Open it with gzip, load the JSON, and count entries of `traceEvents` whose `name` is `aten::item`.",
            "用 gzip 打开，读成 JSON，数一数 `traceEvents` 里 `name` 为 `aten::item` 的条目。",
        )


def exercise_2_8(peak: Callable[[list[int]], int]) -> None:
    assert peak([4, 4, -4, 8, -8, 2]) == 12, say(
        "Keep a running sum; the peak is its largest value.", "维护一个累计和，峰值就是它的最大值。"
    )
    assert peak([4, -4, 3]) == 4, say("Frees are negative: add them too.", "释放是负数，也要加上。")


def exercise_2_9(busy_share: Callable[[str], float]) -> None:
    for method in ("standard", "flat"):
        expected = recorded.traced("traces", method)["gpu"]["busy_ms"] / recorded.ms("traces", method)
        traced = recorded.traced("traces", method)["gpu"]["busy_ms"] / recorded.traced("traces", method)["step_ms"]
        answer = busy_share(method)
        assert not near(answer, traced, 0.005) or near(traced, expected, 0.005), say(
            "You divided by the traced step, which the profiler makes longer. Use the unprofiled one.",
            "你除以的是带分析器的一步，它被拉长了。请用不带分析器的。",
        )
        assert near(answer, expected, 0.01), say(
            "Busy time over the unprofiled step time.", "忙碌时间除以不带分析器的步时间。"
        )
