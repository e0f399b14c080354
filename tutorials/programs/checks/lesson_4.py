"""Checks of lesson 4."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pandas as pd
from language import say

from checks import near


def exercise_4_1(command: str) -> None:
    words = shlex.split(command)
    assert words[:2] == ["nsys", "profile"], say(
        "The command begins with `nsys profile`.", "命令以 `nsys profile` 开头。"
    )
    assert "--capture-range=cudaProfilerApi" in words, say(
        "Let the program say when: `--capture-range=cudaProfilerApi`.",
        "让程序决定何时开始：`--capture-range=cudaProfilerApi`。",
    )
    trace = next((word for word in words if word.startswith("--trace=")), "")
    assert {"cuda", "nvtx"} <= set(trace.removeprefix("--trace=").split(",")), say(
        "Record CUDA and NVTX: `--trace=cuda,nvtx`.", "记录 CUDA 和 NVTX：`--trace=cuda,nvtx`。"
    )
    assert any(word.startswith(("--output=", "-o")) for word in words), say("Name the output.", "给输出起个名字。")
    assert words[-1] != command and any(word.endswith("case_2.py") for word in words), say(
        "The program, `python programs/case_2.py`, comes last.", "程序 `python programs/case_2.py` 写在最后。"
    )


def exercise_4_2(way: dict[str, str]) -> None:
    assert way.get("a script in CI") == "profile", say("Nobody is there to press start.", "没有人在场按开始。")
    assert way.get("it became slow after an hour") == "launch", say(
        "Start it under a session and record when it is slow.", "先在会话里启动，变慢了再录。"
    )


def exercise_4_3(annotated_step: Callable[[Any], None]) -> None:
    seen: list[str] = []
    depth: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            depth.append(self.name)
            seen.append("/".join(depth))

        def __exit__(self, *error: object) -> None:
            depth.pop()

    annotated_step(Range)
    assert seen, say('Use the argument: `with annotate("step"): …`.', '用上参数：`with annotate("step"): …`。')
    assert seen[0] == "step", say("The outermost range is called `step`.", "最外层的区间叫 `step`。")
    assert {"step/forward", "step/backward", "step/optimizer"} <= set(seen), say(
        "Inside `step`: `forward`, `backward` and `optimizer`.",
        "`step` 里面要有 `forward`、`backward` 和 `optimizer`。",
    )
    assert depth == [], say("Every range has to end.", "每个区间都要结束。")


def exercise_4_4(query: str) -> None:
    import sqlite3

    database = sqlite3.connect(":memory:")
    database.executescript(
        "CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, 'add'), (2, 'gemm');"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 10, 1), (10, 30, 2), (40, 45, 1), (50, 90, 2);"
    )
    answer = database.execute(query).fetchall()
    assert answer and len(answer[0]) == 2, say(
        "Select the name and the sum of `end - start`.", "选出名字和 `end - start` 之和。"
    )
    assert sorted(answer) == [("add", 15), ("gemm", 60)], say(
        "Join `shortName` with `StringIds.id`, and group by the name.",
        "用 `shortName` 连接 `StringIds.id`，再按名字分组。",
    )
    assert answer[0][0] == "gemm", say(
        "The longest comes first: `ORDER BY … DESC`.", "最长的排在前面：`ORDER BY … DESC`。"
    )


def exercise_4_5(longest_gap: Callable[[Any], Any]) -> None:
    table = pd.DataFrame({"start_ms": [0.0, 1.0, 1.5, 4.0], "ms": [1.0, 2.0, 0.2, 1.0], "what": ["a", "b", "c", "d"]})
    answer = longest_gap(table)
    assert answer is not None, say("Return the length and the kernel that ended it.", "请返回长度和结束空隙的 kernel。")
    length, what = answer
    assert not near(length, 2.3), say(
        "`c` ended before `b` did: a gap begins when *everything* before has ended (a running maximum).",
        "`c` 比 `b` 先结束：前面的**全部**结束了，空隙才开始（用累计最大值）。",
    )
    assert near(length, 1.0) and what == "d", say(
        "From 3.0 ms, when `b` ends, to 4.0 ms.", "从 `b` 结束的 3.0 ms 到 4.0 ms。"
    )


def exercise_4_6(may_share: dict[str, Any]) -> None:
    assert may_share.get("report.nsys-rep") is False, say(
        "A report holds the environment of your shell, tokens included.", "报告里有你 shell 的环境变量，包括各种密钥。"
    )
    assert may_share.get("stripped.sqlite") is True, say(
        "A stripped export is what to share.", "可以分享的是清理过的导出文件。"
    )
