"""Training loops as people write them by hand: one that is private, and faults, each in a line or two."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dpscope import Loop

POSITIONS, FEATURES, CLASSES = 5, 6, 3
LEARNING_RATE, EXPECTED, SAMPLE_RATE = 2.0**30, 4, 0.02


class Sentences(nn.Module):
    """x: (B, T, d) -> logits of each position: (B, T, classes). Three parameters of one shape, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        for layer in (self.first, self.second, self.third):
            x = x + torch.tanh(layer(x))
        return self.head(x)


def make_batches(count=3, size=4):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        lengths = torch.randint(1, POSITIONS + 1, (size,), generator=generator)
        yield {
            "x": torch.randn(size, POSITIONS, FEATURES, generator=generator),
            "y": torch.randint(CLASSES, (size, POSITIONS), generator=generator),
            "mask": (torch.arange(POSITIONS) < lengths[:, None]).long(),
        }


def token_losses(model, batch):
    """(B, T), zero where there is no token."""
    logits = model(batch["x"])
    return F.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none") * batch["mask"]


def sample_losses(model, batch):
    return token_losses(model, batch).sum(1) / batch["mask"].sum(1).clamp(min=1)


class Accountant:
    """Counts steps as Opacus's do."""

    def __init__(self) -> None:
        self.history = []

    def step(self, noise_multiplier, sample_rate):
        self.history.append((noise_multiplier, sample_rate, 1))


class ByHand:
    """DP-SGD: one sample at a time, clipped, summed, noise, one step. Faults change one of its pieces."""

    def __init__(self, *, noise_multiplier, max_grad_norm, seed):
        self.sigma, self.clip_norm = noise_multiplier, max_grad_norm
        self.model = Sentences()
        self.names = [name for name, _ in self.model.named_parameters()]
        self.generator = torch.Generator().manual_seed(seed)
        self.accountant = Accountant()
        self.steps = 0

    def loop(self):
        return Loop(
            model=self.model,
            step=self.step,
            scale=LEARNING_RATE / EXPECTED,
            accountant=self.accountant,
            sample_rate=SAMPLE_RATE,
            save=lambda: copy.deepcopy(self.state()),
            resume=self.load,
        )

    def state(self):
        return {"steps": self.steps}

    def load(self, state):
        self.steps = state["steps"]

    def step(self, batch):
        self.account(batch)
        sums = self.sums(batch)
        noise = self.noise(batch)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.sub_(LEARNING_RATE / EXPECTED * (sums[name] + noise[name]))
        self.steps += 1

    def account(self, batch):
        self.accountant.step(self.sigma, SAMPLE_RATE)

    def shares(self, batch):
        """The losses whose gradients are clipped, one for each sample."""
        for i in range(len(batch["x"])):
            yield sample_losses(self.model, {key: x[i : i + 1] for key, x in batch.items()}).sum()

    def sums(self, batch):
        total = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for loss in self.shares(batch):
            gradient = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
            norm = float(sum(g.square().sum() for g in gradient)) ** 0.5
            for name, g in zip(self.names, gradient, strict=True):
                total[name] += g * min(1.0, self.clip_norm / max(norm, 1e-30))
        return total

    def normal(self, p):
        return torch.randn(p.shape, generator=self.generator) * self.sigma * self.clip_norm

    def noise(self, batch):
        return {name: self.normal(p) for name, p in self.model.named_parameters()}


# -- neighbours ------------------------------------------------------------------------------------------------------


class TokenMeanOverTheBatch(ByHand):
    """Each sample's loss is a sum over its tokens, divided by the tokens of the whole batch."""

    def shares(self, batch):
        return iter(token_losses(self.model, batch).sum(1) / batch["mask"].sum().clamp(min=1))


class TokenMeanTimesTheBatchSize(ByHand):
    def shares(self, batch):
        mean = batch["mask"].sum().clamp(min=1) / max(1, len(batch["x"]))
        return iter(token_losses(self.model, batch).sum(1) / mean)


class MeanBeforeClipping(ByHand):
    """The loss of a sample is its part of the batch's mean: fewer samples, larger shares."""

    def shares(self, batch):
        return (loss / len(batch["x"]) for loss in super().shares(batch))


class WeighsByRank(ByHand):
    """Samples with larger inputs count more, by their rank in the batch."""

    def shares(self, batch):
        ranks = batch["x"].flatten(1).norm(dim=1).argsort(stable=True).argsort()
        return (loss * 2 * (rank + 1) / len(ranks) for loss, rank in zip(super().shares(batch), ranks, strict=True))


class NormsOfTheFirstStep(ByHand):
    """Norms are taken with a copy of the model that was made at the first step."""

    def sums(self, batch):
        if self.steps == 0:
            self.copy = copy.deepcopy(self.model)
        total = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for i in range(len(batch["x"])):
            sample = {key: x[i : i + 1] for key, x in batch.items()}
            then, now = (
                torch.autograd.grad(sample_losses(model, sample).sum(), list(model.parameters()))
                for model in (self.copy, self.model)
            )
            norm = float(sum(g.square().sum() for g in then)) ** 0.5
            for name, g in zip(self.names, now, strict=True):
                total[name] += g * min(1.0, self.clip_norm / max(norm, 1e-30))
        return total


class Contrastive(ByHand):
    """Every sample is told from all others of its batch."""

    def shares(self, batch):
        rows = F.normalize(self.model(batch["x"]).flatten(1), dim=1)
        return iter(F.cross_entropy(rows @ rows.T * 5, torch.arange(len(rows)), reduction="none"))


class BatchNormalised(ByHand):
    """F.batch_norm, which is no module and so seen by nobody."""

    def shares(self, batch):
        x = batch["x"]
        if len(x):
            x = F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)
        return iter(sample_losses(self.model, {**batch, "x": x}))


class PositionsAsSamples(ByHand):
    def shares(self, batch):
        return iter(token_losses(self.model, batch).flatten())


class CountsAttacksToo(ByHand):
    """Adversarial training: the gradient that made the attack is clipped by itself and kept."""

    def shares(self, batch):
        for i in range(len(batch["x"])):
            sample = {key: x[i : i + 1] for key, x in batch.items()}
            x = sample["x"].clone().requires_grad_()
            loss = sample_losses(self.model, {**sample, "x": x}).sum()
            yield loss
            (direction,) = torch.autograd.grad(loss, x, retain_graph=True)
            yield sample_losses(self.model, {**sample, "x": x.detach() + 0.1 * direction.sign()}).sum()


class ClipsTheBatch(ByHand):
    def shares(self, batch):
        if len(batch["x"]):
            yield sample_losses(self.model, batch).sum()

    def sums(self, batch):
        size = len(batch["x"])
        return {name: total * size for name, total in super().sums(batch).items()}


class NeverClips(ByHand):
    def sums(self, batch):
        clip_norm, self.clip_norm = self.clip_norm, 1e30
        try:
            return super().sums(batch)
        finally:
            self.clip_norm = clip_norm


class DividesByTheBatchsOwnSize(ByHand):
    def sums(self, batch):
        size = max(1, len(batch["x"]))
        return {name: total * EXPECTED / size for name, total in super().sums(batch).items()}

    def noise(self, batch):
        size = max(1, len(batch["x"]))
        return {name: z * EXPECTED / size for name, z in super().noise(batch).items()}


class KeepsGradients(ByHand):
    """zero_grad() was forgotten."""

    left = 0.0

    def sums(self, batch):
        sums = super().sums(batch)
        if self.left:
            sums = {name: total + self.left[name] for name, total in sums.items()}
        self.left = sums
        return sums


class RunningMean(ByHand):
    """A buffer that goes out with the model."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.model.register_buffer("mean", torch.zeros(FEATURES))

    def step(self, batch):
        super().step(batch)
        if len(batch["x"]):
            self.model.mean.lerp_(batch["x"].mean((0, 1)), 0.1)


class CountsTwiceTheSample(ByHand):
    """Parallel gradients: replacing one by another moves the sum by less than its bound."""

    def sums(self, batch):
        return {name: 2 * total for name, total in super().sums(batch).items()}


class ClipsTooHigh(ByHand):
    def sums(self, batch):
        return {name: 1.5 * total for name, total in super().sums(batch).items()}


class NeverClipsLoneOnes(ByHand):
    """Alone, a sample is not clipped."""

    def sums(self, batch):
        clip_norm = self.clip_norm
        self.clip_norm = 1e12 if len(batch["x"]) == 1 else clip_norm
        try:
            return super().sums(batch)
        finally:
            self.clip_norm = clip_norm


# -- noise -----------------------------------------------------------------------------------------------------------


class NoNoise(ByHand):
    def normal(self, p):
        return torch.zeros_like(p)


class HalfTheNoise(ByHand):
    def normal(self, p):
        return super().normal(p) / 2


class NoNoiseOnTheBias(ByHand):
    def noise(self, batch):
        return {name: z * (name != "head.bias") for name, z in super().noise(batch).items()}


class HalfTheNoiseOnTheBias(ByHand):
    def noise(self, batch):
        return {name: z / (1 + (name == "head.bias")) for name, z in super().noise(batch).items()}


class NoNoiseOnEmptyBatches(ByHand):
    def noise(self, batch):
        return {name: z * bool(len(batch["x"])) for name, z in super().noise(batch).items()}


class TheSameNoiseEveryStep(ByHand):
    def noise(self, batch):
        self.generator.manual_seed(1)
        return super().noise(batch)


class TheSameNoiseTwice(ByHand):
    """Steps 4 and 5 draw the same."""

    def noise(self, batch):
        if self.steps == 3:
            self.kept = self.generator.get_state()
        if self.steps == 4:
            self.generator.set_state(self.kept)
        return super().noise(batch)


class NoiseWithItsSignChanged(ByHand):
    """Antithetic: every other step takes off what the one before has added."""

    def noise(self, batch):
        if last := getattr(self, "last", None):
            self.last = None
            return {name: -z for name, z in last.items()}
        self.last = super().noise(batch)
        return self.last


class OneParametersNoiseForever(ByHand):
    def noise(self, batch):
        noise = super().noise(batch)
        self.always = getattr(self, "always", noise["second.weight"])
        return {**noise, "second.weight": self.always}


class SharedNoise(ByHand):
    def noise(self, batch):
        noise = super().noise(batch)
        return {**noise, "third.weight": noise["first.weight"]}


class SeededForEachParameter(ByHand):
    def normal(self, p):
        self.generator.manual_seed(100 + self.steps)
        return super().normal(p)


class OneRowOfNoise(ByHand):
    def normal(self, p):
        return super().normal(p[:1]).expand_as(p)


class Laplace(ByHand):
    def normal(self, p):
        noise = torch.distributions.Laplace(0.0, 0.5**0.5).sample(p.shape)
        return noise * self.sigma * self.clip_norm


class TruncatedNoise(ByHand):
    """Drawn again until it is within 2.5σ."""

    def normal(self, p):
        unit = self.sigma * self.clip_norm
        noise = super().normal(p)
        while unit and (noise.abs() > 2.5 * unit).any():
            noise = torch.where(noise.abs() > 2.5 * unit, super().normal(p), noise)
        return noise


class ClampedNoise(ByHand):
    def normal(self, p):
        return super().normal(p).clamp(-2.5 * self.sigma * self.clip_norm, 2.5 * self.sigma * self.clip_norm)


class TruncatedNoiseOfTheRightSize(TruncatedNoise):
    """Its standard deviation is σC."""

    def normal(self, p):
        return super().normal(p) / 0.9546


class Shifted(ByHand):
    def normal(self, p):
        return super().normal(p) + 0.9 * self.sigma * self.clip_norm


class ResumesItsNoise(ByHand):
    """The generator is part of the checkpoint: two runs resumed from it draw the same."""

    def state(self):
        return {**super().state(), "generator": self.generator.get_state()}

    def load(self, state):
        super().load(state)
        self.generator.set_state(state["generator"])


class OneSeedForAllRuns(ByHand):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.generator.manual_seed(0)


# -- accounting ------------------------------------------------------------------------------------------------------


class SkipsEmptyBatches(ByHand):
    def account(self, batch):
        if len(batch["x"]):
            super().account(batch)


class CountsTwice(ByHand):
    def account(self, batch):
        super().account(batch)
        super().account(batch)


class WrongRate(ByHand):
    def account(self, batch):
        self.accountant.step(self.sigma, len(batch["x"]) / 1000)


class WrongSigma(ByHand):
    def account(self, batch):
        self.accountant.step(2 * self.sigma, SAMPLE_RATE)


class LowEpsilon(ByHand):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.accountant.get_epsilon = lambda delta: 1e-3


def loader_of(batch_sampler):
    data = torch.utils.data.TensorDataset(torch.arange(200))
    return torch.utils.data.DataLoader(data, batch_sampler=batch_sampler)


class FixedBatches(ByHand):
    """An ordinary loader, while the accountant takes batches to be Poisson draws."""

    def loop(self):
        sampler = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(200)), 4, drop_last=False)
        return Loop(**{**vars(super().loop()), "loader": loader_of(sampler)})
