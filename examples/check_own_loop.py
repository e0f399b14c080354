"""DP-SGD written by hand, put to the test; then the same with a slip in it, which is found.

    python examples/check_own_loop.py

The slip: the loss is the mean over all words of the batch, so that a long text makes the shares of all others smaller.
"""

import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import nn
from torch.func import functional_call, grad, vmap

import dpscope

LEARNING_RATE, EXPECTED_BATCH, SAMPLE_RATE = 1e6, 16, 0.01


class Tagger(nn.Module):
    """Words (T,) of one text -> scores of three tags for each: (T, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.tags(torch.tanh(self.words(words)))


def make_loop(
    noise_multiplier: float, max_grad_norm: float, seed: int, mean_over_the_batch: bool = False
) -> dpscope.Loop:
    model, accountant = Tagger(), RDPAccountant()
    generator = torch.Generator().manual_seed(seed)

    def loss(parameters, words, tags, length, divisor):
        losses = F.cross_entropy(functional_call(model, parameters, (words,)), tags, reduction="none")
        return (losses * (torch.arange(len(words)) < length)).sum() / divisor

    def clipped_sums(parameters, words, tags, length):
        divisor = length.float().mean().expand(len(length)) if mean_over_the_batch else length.clamp(min=1)
        samples = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))(parameters, words, tags, length, divisor)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
        factors = (max_grad_norm / norms).clamp(max=1.0)
        return {name: torch.einsum("b,b...->...", factors, g) for name, g in samples.items()}

    @torch.no_grad()
    def step(batch: dict[str, torch.Tensor]) -> None:
        parameters = dict(model.named_parameters())
        sums = (
            clipped_sums(parameters, **batch) if len(batch["length"]) else {}
        )  # Poisson sampling draws nobody at times
        for name, p in parameters.items():
            noise = torch.randn(p.shape, generator=generator) * noise_multiplier * max_grad_norm
            p.sub_((sums.get(name, 0.0) + noise) * LEARNING_RATE / EXPECTED_BATCH)
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=SAMPLE_RATE)

    return dpscope.Loop(
        model=model,
        step=step,
        scale=LEARNING_RATE / EXPECTED_BATCH,
        accountant=accountant,
        sample_rate=SAMPLE_RATE,
    )


def batches() -> list[dict[str, torch.Tensor]]:
    words, tags = torch.randint(50, (8, 12)), torch.randint(3, (8, 12))
    return [{"words": words, "tags": tags, "length": torch.randint(1, 13, (8,))}]


if __name__ == "__main__":
    found = dpscope.check_loop(make_loop, batches())
    print(found)
    assert found.ok
    wrong = dpscope.check_loop(lambda **settings: make_loop(**settings, mean_over_the_batch=True), batches())
    print(wrong)
    assert wrong.neighbours.verdict == "BREACH" and wrong.noise.verdict == "held"
