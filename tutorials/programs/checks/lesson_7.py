"""Checks of lesson 7, the hunt. The causes are kept as digests, so that reading this file does not give them away."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from language import say
from torch.profiler import ProfilerActivity, profile

CAUSES = "abcdefgh"
DIGESTS = {
    "case_6": "d4bc62d46fc4",
    "case_7": "5e134996319b",
    "case_8": "277774459a15",
    "case_9": "4d0854961426",
    "case_10": "dd5f0dae0132",
}


def digest(case: str, cause: str) -> str:
    return hashlib.sha256(f"{case}:{cause}".encode()).hexdigest()[:12]


def _cause(case: str, answer: Any) -> None:
    assert isinstance(answer, str) and answer in CAUSES and len(answer) == 1, say(
        f"Answer with one letter of {', '.join(CAUSES)}.", f"请用 {', '.join(CAUSES)} 中的一个字母回答。"
    )
    assert digest(case, answer) == DIGESTS[case], HINTS[case]()


HINTS: dict[str, Callable[[], str]] = {
    "case_6": lambda: say(
        "Where does the step begin on the GPU's track, and what does the host do until then?",
        "GPU 那一行从哪里开始干活？在那之前主机在做什么？",
    ),
    "case_7": lambda: say(
        "There are waits, but how long are they? And what does the GPU do in the rest of the step?",
        "确实有等待，但它们有多长？一步里其余的时间 GPU 在做什么？",
    ),
    "case_8": lambda: say("Which kernel takes longest, and is it arithmetic?", "哪个 kernel 最长？它是在做运算吗？"),
    "case_9": lambda: say(
        "Count the kernels that read and write (T × T) matrices. How large are these?",
        "数一数读写 T × T 矩阵的 kernel。这些矩阵有多大？",
    ),
    "case_10": lambda: say(
        "Time is not the problem. What grows from step to step?", "问题不在时间。什么东西一步步在变大？"
    ),
}


def exercise_7_1(answer: Any) -> None:
    _cause("case_6", answer)


def exercise_7_2(answer: Any) -> None:
    _cause("case_7", answer)


def exercise_7_3(answer: Any) -> None:
    _cause("case_8", answer)


def exercise_7_4(answer: Any) -> None:
    _cause("case_9", answer)


def exercise_7_5(answer: Any) -> None:
    _cause("case_10", answer)


def _operators(step: Callable[[], Any]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        step()
    return {row.key for row in recording.key_averages()}


def exercise_7_6(loss: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(64, 32), torch.randint(32, (64,))
    labels[::7] = -100
    answer = loss(logits, labels)
    assert answer is not None, say("Return the loss.", "请返回损失。")
    kept = labels != -100
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    assert torch.allclose(answer, expected), say(
        "It has to be the mean over the positions that have a label.", "它必须是有标签的位置上的平均。"
    )
    used = _operators(lambda: loss(logits, labels)) & {
        "aten::nonzero",
        "aten::index",
        "aten::item",
        "aten::masked_select",
    }
    assert not used, say(
        f"It still calls {', '.join(sorted(used))}, whose result depends on the data: the host would wait.",
        f"它仍然调用了 {', '.join(sorted(used))}，结果取决于数据：主机还是要等。",
    )


def exercise_7_7(make_step: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(0)
    table, users = torch.randn(16, 512), torch.randn(4, 16)
    step = make_step(table, users)
    assert callable(step), say("Return a function that does one step.", "请返回一个做一步的函数。")
    assert torch.allclose(step(), users @ table, atol=1e-5), say("The scores have to be the same.", "分数必须一样。")
    assert not _operators(step) & {"aten::contiguous", "aten::clone", "aten::copy_"}, say(
        "The step still copies the table. Do that once, before the first step, or not at all.",
        "每一步还在拷贝整张表。应当在第一步之前做一次，或者根本不做。",
    )


def exercise_7_8(make_step: Callable[[Any, Any], Any]) -> None:
    model = torch.nn.Linear(8, 8)
    step = make_step(model, torch.randn(4, 8))
    assert callable(step), say("Return a function that does one step.", "请返回一个做一步的函数。")
    first, second = step(), step()
    assert torch.allclose(second, 2 * first, rtol=1e-4), say("It has to add up the loss.", "它必须把损失累加起来。")
    assert not second.requires_grad, say(
        "The total still has a graph behind it, with the activations of every step.",
        "总和背后还挂着计算图，带着每一步的激活。",
    )
