"""Checks of lesson 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import recorded
import torch
from language import say
from torch import nn

from checks import near


def exercise_5_1(clipped_sum: Callable[[Any, float], Any]) -> None:
    gradients = torch.tensor([[3.0, 4.0], [0.3, 0.4]])  # norms 5 and 0.5
    answer = clipped_sum(gradients, 1.0)
    assert answer is not None, say("Return the sum.", "请返回和。")
    assert not torch.allclose(answer, torch.tensor([1.2, 1.6])), say(
        "You scaled the small gradient up. A factor is at most 1.", "你把小梯度放大了。系数最多是 1。"
    )
    assert torch.allclose(answer, torch.tensor([0.9, 1.2])), say(
        "Each row gets the factor min(1, C / its norm); then sum over rows.",
        "每行乘以 min(1, C / 该行范数)，再按行求和。",
    )


def exercise_5_2(tokens_per_second: Callable[[int, int, float], float]) -> None:
    assert near(tokens_per_second(8, 1024, 126.8), 8 * 1024 / 0.1268), say(
        "A step trains batch × sequence tokens; mind the milliseconds.", "一步训练 batch × 序列长度个 token；注意毫秒。"
    )


def exercise_5_3(gib: Callable[[int, float, int], float]) -> None:
    assert near(gib(8, 1.17e9, 2), 8 * 1.17e9 * 2 / 2**30), say(
        "One gradient for each sample: batch × parameters × bytes; 1 GiB is 2³⁰ bytes.",
        "每个样本一份梯度：batch × 参数量 × 字节；1 GiB 是 2³⁰ 字节。",
    )


def exercise_5_4(phase_ms: Callable[[str, str], float]) -> None:
    for method, phase in (("ghost", "backward"), ("flash", "clip")):
        phases = recorded.traced("traces", method)["phases"]
        expected = next(p["gpu_ms"] for p in phases if p["phase"] == phase)
        assert near(phase_ms(method, phase), expected), say(
            'Search `recorded.traced("traces", method)["phases"]` for the phase; its `gpu_ms` is the answer.',
            '在 `recorded.traced("traces", method)["phases"]` 里找到该阶段，取 `gpu_ms`。',
        )


def exercise_5_5(explained: Callable[[float, float, float], float]) -> None:
    assert near(explained(240.0, 4.26, 170.0), 240 / 4.26 / 170 * 100), say(
        "GB divided by TB/s gives milliseconds; divide by the extra milliseconds and return percent.",
        "GB 除以 TB/s 得到毫秒；再除以多出来的毫秒数，返回百分比。",
    )


def exercise_5_6(worst: dict[str, str]) -> None:
    assert worst.get("many short samples") == "flat", say(
        "Read down the rows 8 × 256 and 16 × 256: which grows per sample?",
        "看 8 × 256 和 16 × 256 两行：哪个按样本数增长？",
    )
    assert worst.get("one long sample") == "ghost", say("Read the row 1 × 16384.", "看 1 × 16384 这一行。")


def exercise_5_7(factors: Callable[[Any, float], Any]) -> None:
    answer = factors(torch.tensor([5.0, 0.5, 0.0]), 1.0)
    assert answer is not None and torch.isfinite(answer).all(), say(
        "A norm of zero must not give an infinite factor: clamp.", "范数为零时系数不能是无穷大：用 clamp。"
    )
    assert torch.allclose(answer, torch.tensor([0.2, 1.0, 1.0])), say(
        "min(1, C / norm), sample by sample.", "逐样本取 min(1, C / 范数)。"
    )


def exercise_5_8(make_private: Callable[..., Any]) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(2, (32,))), batch_size=8)
    made = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert made is not None, say("Return model, optimizer and loader.", "请返回 model、optimizer 和 loader。")
    private, optimizer, loader = made
    assert hasattr(optimizer, "noise_multiplier"), say(
        "Call `PrivacyEngine().make_private(...)` of `dpscope.flash`.",
        "调用 `dpscope.flash` 的 `PrivacyEngine().make_private(...)`。",
    )
    inputs, labels = next(iter(loader))
    optimizer.zero_grad()
    nn.functional.cross_entropy(private(inputs), labels).backward()
    optimizer.step()
    share = float((optimizer.engine.norms * optimizer.engine.factors).max())
    assert share <= 1.0 + 1e-5, say(
        "Use max_grad_norm=1.0: no sample may contribute more.", "用 max_grad_norm=1.0：任何样本的贡献都不能超过它。"
    )


def exercise_5_9(loss: Callable[[Any, Any], Any]) -> None:
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4), torch.randint(3, (5,)))
    answer = loss(model, batch)
    assert answer is not None and answer.shape == (5,), say(
        'One loss per sample, shape (B,): `reduction="none"`.', '每个样本一个损失，形状 (B,)：用 `reduction="none"`。'
    )
    expected = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    assert torch.allclose(answer, expected), say(
        "Cross entropy of the model's output and the labels.", "模型输出与标签的交叉熵。"
    )
