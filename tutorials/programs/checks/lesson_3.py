"""Checks of lessons 3a and 3b."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import recorded
from language import say

from checks import near


def exercise_3_1(may_quote: dict[str, Any]) -> None:
    assert may_quote.get("step time") is False, say(
        "Under ncu kernels run alone, many times, with other clocks: its times are not your program's.",
        "在 ncu 下 kernel 单独运行、反复重放，时钟也不同：它的时间不是你程序的时间。",
    )
    assert may_quote.get("bytes") is True and may_quote.get("hit rate") is True, say(
        "Counts and ratios of one kernel are what ncu is for.", "单个 kernel 的计数和比率正是 ncu 的用途。"
    )


def exercise_3_2(command: str) -> None:
    words = shlex.split(command)
    assert words and words[0] == "ncu", say("The command begins with `ncu`.", "命令以 `ncu` 开头。")
    text = " ".join(words).replace("=", " ")
    assert "--profile-from-start off" in text, say(
        "Without `--profile-from-start off` you measure the making of tensors.",
        "不加 `--profile-from-start off`，测到的是创建张量。",
    )
    assert "--launch-count 1" in text or "-c 1" in text, say(
        "One launch is enough: `--launch-count 1`.", "一次启动就够：`--launch-count 1`。"
    )
    assert "--set basic" in text, say("Ask for the basic set: `--set basic`.", "用基本的 set：`--set basic`。")
    program = next((n for n, word in enumerate(words) if word.startswith("python")), None)
    assert program is not None and words[program + 1].endswith("case_5.py"), say(
        "The program comes last: `python programs/case_5.py …`.", "程序写在最后：`python programs/case_5.py …`。"
    )


def exercise_3_3(sets: Any) -> None:
    listed = recorded.output("ncu-sets").splitlines()
    sections: dict[str, str] = {}
    name = ""
    for line in listed[3:]:
        name = line[:11].strip() or name
        sections[name] = sections.get(name, "") + line[11:87].strip()
    expected = {name for name, held in sections.items() if "WarpStateStats" in held}
    assert set(sets) == expected, say(
        "Look for `WarpStateStats` in the list of sets; names go on in the next line.",
        "在列表里找 `WarpStateStats`；名字会折到下一行。",
    )


def exercise_3_4(parts: Callable[[str], Any]) -> None:
    answer = parts("dram__bytes_read.sum.per_second")
    assert answer is not None and tuple(answer) == ("dram", "bytes_read", "sum", "per_second"), say(
        "The unit ends at two underscores; dots separate the rest.", "单元名到两个下划线为止，其余用点分开。"
    )
    assert tuple(parts("gpu__time_duration.sum")) == ("gpu", "time_duration", "sum", ""), say(
        "If nothing is made of it, the last part is empty.", "如果没有再加工，最后一部分为空。"
    )


def exercise_3_5(flags: str) -> None:
    text = flags.replace("=", " ")
    assert "regex:gemm" in text, say(
        "Filter by name with `--kernel-name regex:gemm`.", "按名字过滤：`--kernel-name regex:gemm`。"
    )
    assert "--launch-skip 10" in text or "-s 10" in text, say(
        "The 11th is the first after skipping ten that match.", "第 11 个就是跳过十个匹配之后的第一个。"
    )
    assert "--launch-count 2" in text or "-c 2" in text, say(
        "Two of them: `--launch-count 2`.", "要两个：`--launch-count 2`。"
    )


def exercise_3_6(mode: dict[str, str]) -> None:
    assert mode.get("why is this kernel slow") == "kernel", say(
        "One kernel: the default mode.", "单个 kernel：用默认模式。"
    )
    assert mode.get("bytes of a whole step") == "app-range", say(
        "One row for a whole range, with PyTorch: only one mode does that.",
        "要一整段的一行结果，又是 PyTorch：只有一种模式行。",
    )


def exercise_3_7(read_raw: Callable[[str], dict[str, float]]) -> None:
    text = '"ID","Kernel Name","dram__bytes_read.sum"\n"","","byte"\n"0","add","2,147,483,648"\n"1","add","7"\n'
    answer = read_raw(text)
    assert answer is not None and "dram__bytes_read.sum" in answer, say(
        "The first line holds the names.", "第一行是名字。"
    )
    assert near(answer["dram__bytes_read.sum"], 2147483648), say(
        "The second line holds units, the third the first kernel; remove the thousands separators.",
        "第二行是单位，第三行是第一个 kernel；去掉千位分隔符。",
    )


def exercise_3_8(bytes_ratio: Callable[[str], float]) -> None:
    for method in ("flat", "flash"):
        assert near(bytes_ratio(method), recorded.dram_times("traffic", method, 8, 256)), say(
            'Divide `recorded.dram_gb("traffic", method, 8, 256)` by that of `standard`.',
            '用 `recorded.dram_gb("traffic", method, 8, 256)` 除以 `standard` 的。',
        )


def exercise_3_9(first_to_look: Callable[[list[tuple[float, float]]], int]) -> None:
    assert first_to_look([(10.0, 90.0), (100.0, 20.0), (50.0, 10.0)]) == 1, say(
        "A launch can save its duration times its estimated speed-up: 9, 20 and 5 µs here.",
        "一次启动最多省下“耗时 × 估计加速”：这里是 9、20、5 µs。",
    )
    assert first_to_look([(10.0, 90.0), (20.0, 0.0)]) == 0, say(
        "The longest launch is not the best target if nothing can be gained there.",
        "如果没有余地，最长的也不是最好的目标。",
    )


def exercise_3_10(verdict: Callable[[float, float], str]) -> None:
    assert verdict(7.5, 90.8) == "memory", say("The larger of the two names the limit.", "两者中较大的就是瓶颈。")
    assert verdict(88.2, 60.4) == "compute", say("The larger of the two names the limit.", "两者中较大的就是瓶颈。")
    assert verdict(54.5, 42.3) == "latency", say(
        "Both below 60 %: look at warp states.", "两者都低于 60 %：去看 Warp State。"
    )


def exercise_3_11(of_roof: Callable[[float, float, float], float]) -> None:
    for name in ("addition", "product"):
        point = recorded.kernel_on_roofline(name)
        assert point is not None
        assert near(of_roof(point["flops"], point["bytes"], point["seconds"]), recorded.of_roof(name)), say(
            "The roof is the smaller of intensity × bandwidth and the unit's peak; divide the kernel's rate by it.",
            "屋顶是“强度 × 带宽”和单元峰值中较小的一个；用 kernel 的速率除以它。",
        )


def exercise_3_12(expected: dict[str, Any]) -> None:
    assert near(expected.get("read"), 2 * 4 * 2**28, 0.001), say(
        "t and b are read, four bytes each.", "读 t 和 b，各 4 字节。"
    )
    assert near(expected.get("written"), 4 * 2**28, 0.001), say("y is written once.", "y 写一次。")


def exercise_3_13(sm_busy: Callable[[float, dict[str, float]], float]) -> None:
    assert near(sm_busy(88.2, {"FMA": 78.1, "ALU": 7.5}), 88.2), say(
        "For the float32 product SM Busy equals Issue Slots Busy.", "float32 乘法的 SM Busy 等于 Issue Slots Busy。"
    )
    assert near(sm_busy(11.4, {"Tensor": 90.9, "ALU": 2.8}), 90.9), say(
        "For tensor cores it equals the busiest pipe.", "用张量核心时，它等于最忙的流水线。"
    )


def exercise_3_14(share: Callable[[dict[str, float], str], float]) -> None:
    found = recorded.stalls("addition")
    expected = recorded.stall_percent("addition", "long_scoreboard")
    assert near(share(found, "long_scoreboard"), expected), say(
        "Divide by the sum of all states and return percent.", "除以所有状态之和，返回百分比。"
    )


def exercise_3_15(occupancy: Callable[[int, int], float]) -> None:
    assert near(occupancy(256, 256), 12.5), say(
        "65,536 registers hold one block of 256 × 256: 8 of 64 warps.",
        "65,536 个寄存器只放得下一个 256 × 256 的线程块：64 个 warp 里的 8 个。",
    )
    assert near(occupancy(32, 256), 100.0), say(
        "With 32 registers a thread, eight blocks of 8 warps fit: all 64.",
        "每线程 32 个寄存器，放得下 8 个线程块，每块 8 个 warp：正好 64 个。",
    )
    assert near(occupancy(96, 256), 25.0), say(
        "Whole blocks only: 65,536 // (96 · 256) is 2.", "只能放整块：65,536 // (96 · 256) 等于 2。"
    )


def exercise_3_16(line: Any) -> None:
    lines = (Path(recorded.__file__).with_name("strided.cu")).read_text(encoding="utf-8").splitlines()
    expected = next(number for number, text in enumerate(lines, start=1) if "from[j]" in text)
    assert line != expected - 2, say(
        "That line computes the address. Which one uses it?", "那一行只是算地址。用它的是哪一行？"
    )
    assert line == expected, say(
        "Look for the line with the most excess sectors in the kernel `strided`.",
        "在 `strided` 里找多余扇区最多的那一行。",
    )
