"""Methods as other packages bring them: one that is right, and faults that people have made, each in a line or two."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from dpscope import Workload
from dpscope.trainers.base import TrainerBase


class Little(nn.Module):
    """A tied embedding, biases, a frozen layer and an adapter. ids: (B, T) -> logits: (B, T, 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.hidden, self.frozen, self.adapter = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = torch.tanh(self.hidden(self.tokens(ids)))
        return self.head(torch.tanh(self.frozen(x) + self.adapter(x)))


class Padded(Little):
    """Untied, and token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=0)


def little_loss(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)


def make_batch(seed, device, size=4):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(11, (2, size, 5), generator=generator)
    return {"ids": ids.to(device), "labels": labels.to(device)}


LITTLE = Workload(model=Little, batch=make_batch, loss=little_loss)


class ByHand(TrainerBase):
    """Exact: one sample at a time. Faults change one of its pieces."""

    def prepare_model(self, model):
        return model

    def prepare_optimizer(self, optimizer):
        return optimizer

    def backward(self, losses):
        raise NotImplementedError

    def update(self):
        raise NotImplementedError

    def train_step(self, batch):
        size = len(batch["ids"])
        samples = [self.gradient({key: x[i : i + 1] for key, x in batch.items()}) for i in range(size)]
        factors = self.factors(self.norms(samples, batch), self.settings.max_grad_norm)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.combine(name, [v[name] for v in samples], factors) / self.settings.batch_size
        self.optimizer.step()
        return torch.zeros(())

    def gradient(self, sample, model=None):
        model = model or self.model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return dict(zip(named, torch.autograd.grad(self.loss(model, sample).sum(), named.values()), strict=True))

    def norms(self, samples, batch):
        return [math.sqrt(sum(float(g.square().sum()) for g in sample.values())) for sample in samples]

    def factors(self, norms, clip_norm):
        return [min(1.0, clip_norm / norm) for norm in norms]

    def combine(self, name, gradients, factors):
        return sum(c * g for c, g in zip(factors, gradients, strict=True))


class OnACopy(ByHand):
    """Exact too, on a model of its own."""

    def prepare_model(self, model):
        return copy.deepcopy(model)

    def prepare_optimizer(self, optimizer):
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=self.settings.learning_rate)


class ForgetsTheBias(ByHand):
    def combine(self, name, gradients, factors):
        return super().combine(name, gradients, factors) * (not name.endswith("bias"))


class ForgetsTheBiasInNorms(ByHand):
    def norms(self, samples, batch):
        return super().norms([{n: g for n, g in v.items() if not n.endswith("bias")} for v in samples], batch)


class AdapterNeverTrains(ByHand):
    def prepare_model(self, model):
        model.adapter.requires_grad_(False)
        return model


class _Untying(ByHand):
    def untied(self):
        model = copy.deepcopy(self.model)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model


class IgnoresTyingInNorms(_Untying):
    def norms(self, samples, batch):
        model = self.untied()
        rows = [{key: x[i : i + 1] for key, x in batch.items()} for i in range(len(samples))]
        return super().norms([self.gradient(row, model) for row in rows], batch)


class IgnoresTyingInSums(_Untying):
    def gradient(self, sample, model=None):
        gradient = super().gradient(sample, self.untied())
        return {**gradient, "tokens.weight": gradient.pop("head.weight")}


class TimesTheBatchSize(ByHand):
    def combine(self, name, gradients, factors):
        return super().combine(name, gradients, factors) * len(gradients)


class OverTheBatchSize(ByHand):
    def combine(self, name, gradients, factors):
        return super().combine(name, gradients, factors) / len(gradients)


class NormsOfTheMeanLoss(ByHand):
    def norms(self, samples, batch):
        return [norm / len(samples) for norm in super().norms(samples, batch)]


class ClipsEachLayer(ByHand):
    def combine(self, name, gradients, factors):
        clip_norm = self.settings.max_grad_norm
        return sum(g * min(1.0, clip_norm / float(g.norm())) for g in gradients)


class MaxForMin(ByHand):
    def factors(self, norms, clip_norm):
        return [max(1.0, clip_norm / norm) for norm in norms]


class NeverClips(ByHand):
    def factors(self, norms, clip_norm):
        return [1.0 for _ in norms]


class Normalises(ByHand):
    def factors(self, norms, clip_norm):
        return [clip_norm / norm for norm in norms]


class ForgetsTheRoot(ByHand):
    def factors(self, norms, clip_norm):
        return super().factors([norm**2 for norm in norms], clip_norm)


class ClipsTheBatch(ByHand):
    def norms(self, samples, batch):
        mean = {name: sum(v[name] for v in samples) / len(samples) for name in samples[0]}
        return super().norms([mean], batch) * len(samples)


class AddsAConstant(ByHand):
    def norms(self, samples, batch):
        return [norm + 1e-3 for norm in super().norms(samples, batch)]


class ExchangesFactors(ByHand):
    def factors(self, norms, clip_norm):
        return super().factors(norms[1:] + norms[:1], clip_norm)


class OneSampleTwice(ByHand):
    """A norm that is wrong for no reason that has a name."""

    def norms(self, samples, batch):
        first, *rest = super().norms(samples, batch)
        return [1.7 * first, *rest]


class MixesGradients(ByHand):
    """Neighbours are mixed before they are clipped, in one parameter more than in the other."""

    def combine(self, name, gradients, factors):
        weight = 0.1 * (1 + len(name) % 3)
        mixed = [g + weight * h.flip(0) for g, h in zip(gradients, gradients[1:] + gradients[:1], strict=True)]
        return super().combine(name, mixed if self.settings.max_grad_norm < 1 else gradients, factors)


class AddsNoise(ByHand):
    def combine(self, name, gradients, factors):
        exact = super().combine(name, gradients, factors)
        return exact + 0.1 * torch.randn(exact.shape, generator=self.noise_generator())


class MovesTheFrozen(ByHand):
    def train_step(self, batch):
        loss = super().train_step(batch)
        self.model.frozen.weight.data += 1
        return loss


class DoesNothing(ByHand):
    def train_step(self, batch):
        return torch.zeros(())


class NotANumber(ByHand):
    def factors(self, norms, clip_norm):
        return [float("nan") for _ in norms]


class WrongInOneLayer(ByHand):
    def combine(self, name, gradients, factors):
        return super().combine(name, gradients, factors) * (2.0 if name == "hidden.weight" else 1.0)


class TrainsThePadding(ByHand):
    """As an engine does that adds up rows by their ids and forgets `padding_idx`."""

    def prepare_model(self, model):
        model.tokens.padding_idx = None
        return model


class LowPrecision(ByHand):
    def combine(self, name, gradients, factors):
        return super().combine(name, gradients, factors).bfloat16().to(gradients[0].dtype)


class Raises(ByHand):
    def train_step(self, batch):
        return {}["no such key"]


class Refuses(ByHand):
    def prepare_model(self, model):
        raise NotImplementedError("Embedding is not supported")


class OnImages(ByHand):
    """Exact for batches that are one tensor."""

    def train_step(self, batch):
        return super().train_step({"ids": batch})

    def gradient(self, sample, model=None):
        return super().gradient(sample["ids"], model)


class ByHandWithUnused(ByHand):
    """Exact also where a parameter is not used."""

    def gradient(self, sample, model=None):
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        loss = self.loss(self.model, sample).sum()
        found = torch.autograd.grad(loss, named.values(), allow_unused=True, materialize_grads=True)
        return dict(zip(named, found, strict=True))


class ByHandUnlessNotFinite(ByHand):
    """Exact, and a sample that is not finite has no share."""

    def gradient(self, sample, model=None):
        found = super().gradient(sample, model)
        finite = all(g.isfinite().all() for g in found.values())
        return found if finite else {name: torch.zeros_like(g) for name, g in found.items()}

    def factors(self, norms, clip_norm):
        return [min(1.0, clip_norm / norm) if norm else 0.0 for norm in norms]


class KeepsTheNotFinite(ByHandUnlessNotFinite):
    gradient = ByHand.gradient
