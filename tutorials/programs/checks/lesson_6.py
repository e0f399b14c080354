"""Checks of lesson 6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from language import say

from checks import near


def exercise_6_1(collectives: dict[str, Callable[[list[list[int]]], Any]]) -> None:
    ranks = [[1, 2], [10, 20]]
    for name, expected in (
        ("all_reduce", [[11, 22], [11, 22]]),
        ("reduce_scatter", [[11], [22]]),
        ("all_gather", [[1, 2, 10, 20], [1, 2, 10, 20]]),
    ):
        function = collectives[name]
        assert function is not ..., say(f"Fill in {name}.", f"请填写 {name}。")
        answer = function([list(values) for values in ranks])
        assert answer == expected, say(
            f"{name} of [[1, 2], [10, 20]] on two ranks gives {expected}, yours {answer}.",
            f"两个 rank 上 [[1, 2], [10, 20]] 的 {name} 应为 {expected}，你给出 {answer}。",
        )


def exercise_6_2(ring_ms: Callable[[float, int, float], float]) -> None:
    assert near(ring_ms(1e9, 8, 450), 2 * 7 / 8 * 1e9 / 450e9 * 1e3), say(
        "Each rank sends 2 (n − 1) / n of the bytes: once to reduce, once to gather.",
        "每个 rank 发送 2 (n − 1) / n 的字节：归约一遍，收集一遍。",
    )
    assert near(ring_ms(1e9, 1, 450), 0.0) or ring_ms(1e9, 1, 450) == 0, say(
        "One rank sends nothing.", "只有一个 rank 就不用发送。"
    )


def exercise_6_3(exposed_ms: Callable[[float, float], float]) -> None:
    assert exposed_ms(10.0, 8.0) == 2.0, say(
        "What does not fit under the backward pass is exposed: 10 − 8.", "反向传播盖不住的部分才暴露出来：10 − 8。"
    )
    assert exposed_ms(5.0, 8.0) == 0.0, say("It cannot be negative.", "它不会是负数。")


def exercise_6_4(waits: Callable[[list[float]], list[float]]) -> None:
    assert waits([10.0, 25.0, 12.0]) == [15.0, 0.0, 13.0], say(
        "Everyone waits for the slowest: 25 minus one's own time.", "大家都等最慢的：25 减去自己的时间。"
    )


def exercise_6_5(sent_bytes: Callable[[str, float, int], float]) -> None:
    assert near(sent_bytes("ddp", 1e9, 8), 2 * 7 / 8 * 1e9), say(
        "DDP: one all-reduce of the gradients.", "DDP：对梯度做一次 all-reduce。"
    )
    assert near(sent_bytes("fsdp", 1e9, 8), 3 * 7 / 8 * 1e9), say(
        "FSDP: two all-gathers of parameters (forward, backward) and a reduce-scatter of gradients, (n − 1) / n each.",
        "FSDP：参数 all-gather 两次（前向、反向），梯度 reduce-scatter 一次，各为 (n − 1) / n。",
    )


def exercise_6_6(gib_a_rank: Callable[[float, int, bool], float]) -> None:
    assert near(gib_a_rank(8e9, 8, False), 8e9 * 16 / 2**30), say(
        "Weights, gradients and two moments of Adam in float32: 16 bytes a parameter.",
        "float32 的权重、梯度和 Adam 的两个动量：每参数 16 字节。",
    )
    assert near(gib_a_rank(8e9, 8, True), 8e9 * 16 / 8 / 2**30), say(
        "Sharded, each rank holds an eighth.", "分片后每个 rank 只存八分之一。"
    )
