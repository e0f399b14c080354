"""Checks of lesson 1."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import recorded
from language import say

from checks import near


def exercise_1_1(step_us: Callable[[int, float, float], float]) -> None:
    slow_host, slow_device = step_us(1000, 7, 3), step_us(1000, 7, 30)
    assert slow_host is not None and slow_device is not None, say(
        "Your function returns nothing: end it with `return`.", "函数没有返回值：最后写上 `return`。"
    )
    assert not near(slow_host, 10_000, 0.01), say(
        "You add both times. Host and device work at the same time: the slower of the two decides.",
        "你把两个时间加起来了。主机和设备同时工作，由较慢的一方决定。",
    )
    assert near(slow_host, 7000, 0.01), say(
        "1000 operators that cost the host 7 µs and the device 3 µs: who is slower?",
        "1000 个算子，主机每个 7 µs，设备每个 3 µs：谁更慢？",
    )
    assert near(slow_device, 30_000, 0.01), say(
        "Now the device is the slower one: 30 µs an operator.", "这次设备更慢：每个算子 30 µs。"
    )


def exercise_1_2(copy_ms: Callable[[float, float], float]) -> None:
    answer = copy_ms(256 * 2**20, 55.4)
    assert not near(answer, 256 * 2**20 / 55.4e9), say(
        "That is in seconds. Return milliseconds.", "这是秒。请返回毫秒。"
    )
    assert near(answer, 1e3 * 256 * 2**20 / 55.4e9), say(
        "Time is bytes divided by bytes a second; 1 GB/s is 10⁹ bytes a second.",
        "时间等于字节数除以每秒字节数；1 GB/s 是每秒 10⁹ 字节。",
    )
    assert near(copy_ms(256 * 2**20, 6.9), 1e3 * 256 * 2**20 / 6.9e9), say(
        "Use the second argument too.", "第二个参数也要用上。"
    )


def exercise_1_3(without: dict[str, str]) -> None:
    assert without.get("torch.cuda.stream") == "slow", say(
        "Without `with torch.cuda.stream(copies)` the copy lands on the current stream. Is its result wrong there?",
        "没有 `with torch.cuda.stream(copies)`，拷贝就落在当前流上。结果会错吗？",
    )
    assert without.get("wait_stream") == "race", say(
        "Without `wait_stream` nothing keeps the computation from starting before the copy has arrived.",
        "没有 `wait_stream`，拷贝还没到，计算就可能开始。",
    )
    assert without.get("record_stream") == "race", say(
        "Without `record_stream` the allocator may hand out the batch's memory while another stream still reads it.",
        "没有 `record_stream`，另一条流还在读，分配器就可能把这块显存分给别人。",
    )


def exercise_1_4(lines: Any) -> None:
    answer = set(lines)
    assert 2 in answer, say("Line 2 asks a tensor for a truth value.", "第 2 行要向张量要一个真假值。")
    assert 3 in answer, say("Line 3 needs the number on the host.", "第 3 行要把数值拿到主机上。")
    assert 4 not in answer, say(
        "Line 4 prints a Python float, which is on the host already.", "第 4 行打印的是 Python 浮点数，早就在主机上了。"
    )
    assert 5 in answer, say(
        "How large is the result of line 5? Only the data can tell.", "第 5 行的结果有多大？只有看了数据才知道。"
    )
    assert 1 not in answer and 6 not in answer, say(
        "Lines 1 and 6 only launch work: their results' sizes are known.",
        "第 1、6 行只是启动工作：结果的大小事先知道。",
    )


class PretendGPU:
    """A device with a queue and a clock, for an exercise without a GPU. Times in milliseconds."""

    def __init__(self, queued: float = 0.0) -> None:
        self.now = 100.0
        self.done = self.now + queued

    def clock(self) -> float:
        return self.now

    def launch(self, ms: float) -> None:
        self.done = max(self.done, self.now) + ms
        self.now += 0.01

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)


def exercise_1_5(time_right: Callable[[PretendGPU, float], float]) -> None:
    answer = time_right(PretendGPU(), 20.0)
    assert answer is not None and answer > 1, say(
        "You read the clock when the work was ordered, not when it was done.", "你看表的时候，命令刚下达，活还没做完。"
    )
    assert near(answer, 20.0, 0.01), say("The work takes 20 ms on this device.", "这份工作在这个设备上要 20 ms。")
    busy = time_right(PretendGPU(queued=5.0), 20.0)
    assert near(busy, 20.0, 0.01), say(
        "If other work is in the queue before, you time it too. Wait before the first reading as well.",
        "如果队列里还有之前的工作，你连它也计进去了。第一次看表之前也要同步。",
    )


def exercise_1_6(bend: Callable[[list[dict[str, float]]], float]) -> None:
    made_up = [{"bytes": 2.0**n, "median_ms": max(0.01, 2.0**n / 4e9)} for n in range(10, 32)]
    answer = bend(made_up)
    expected = next(b["bytes"] for a, b in pairwise(made_up) if b["median_ms"] >= 1.7 * a["median_ms"])
    assert answer is not None, say(
        "Return the bytes of the first point of the slope.", "请返回斜线上第一个点的字节数。"
    )
    assert near(answer, expected, 0.01), say(
        "Compare each point with the one before: the first that takes at least 1.7 times as long is it.",
        "把每个点和前一个比：第一个时间达到 1.7 倍的就是。",
    )


def exercise_1_7(waves: Callable[[int, int], float]) -> None:
    assert near(waves(288, 1), 288 / 132), say(
        "288 blocks, one at a time on each of 132 SMs.", "288 个线程块，132 个 SM 每个一次放 1 个。"
    )
    assert near(waves(1056, 8), 1.0), say(
        "With eight blocks on an SM at a time, 132 SMs hold 1056 blocks at once.",
        "每个 SM 同时放 8 个，132 个 SM 一共放 1056 个。",
    )


def exercise_1_8(bytes_moved: Callable[[int, bool], float]) -> None:
    assert near(bytes_moved(2**20, True), 3 * 4 * 2**20), say(
        "Fused: read a, read b, write y. Four bytes for each float32.",
        "融合后：读 a、读 b、写 y。每个 float32 占 4 字节。",
    )
    assert near(bytes_moved(2**20, False), 5 * 4 * 2**20), say(
        "In two operators the temporary tensor is written once and read once.", "拆成两个算子，临时张量写一次、读一次。"
    )


def exercise_1_9(bound_by: Callable[[float, float, str], str]) -> None:
    assert bound_by(1, 8, "fp32") == "memory", say(
        "x + 1 does one operation for 8 bytes.", "x + 1 每 8 个字节只做一次运算。"
    )
    assert bound_by(2 * 4096**3, 6 * 4096**2, "tensor") == "compute", say(
        "A 4096³ product in bfloat16 does more than a thousand operations a byte.",
        "bfloat16 的 4096³ 乘法每字节有一千多次运算。",
    )
    assert bound_by(50, 1, "fp32") == "compute" and bound_by(50, 1, "tensor") == "memory", say(
        f"The ridge is {recorded.ridge('fp32'):.0f} for float32 and {recorded.ridge():.0f} for tensor cores.",
        f"拐点取决于用哪个单元：float32 是 {recorded.ridge('fp32'):.0f}，张量核心是 {recorded.ridge():.0f}。",
    )


def exercise_1_10(tool: dict[str, str]) -> None:
    right = {"idle GPU": "timeline", "slow kernel": "ncu", "out of memory": "memory"}
    for symptom, expected in right.items():
        assert tool.get(symptom) == expected, say(
            f"For {symptom!r}: read the column 'where you see it' again.", f"{symptom!r}：再看一遍“在哪里看”那一列。"
        )


def exercise_1_11(days: Callable[[str], float]) -> None:
    for method in ("flat", "ghost", "flash"):
        assert near(days(method), recorded.times("page", method), 0.01), say(
            "What takes one day without privacy takes as many days as the ratio of the step times.",
            "普通训练一天做完的事，隐私训练要花“步时间之比”那么多天。",
        )
