"""A loop that tries a physical batch again after an error: the step is exact and accounted for once, or refused.

Memory may run out anywhere. Before sums are touched, nothing of the step is lost. Later the draw is given up if sums of
its earlier batches were lost, or if its step was accounted for: its batches are refused, and the next draw is exact.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, GradScaler, PrivacyEngine
from dpscope.flash.engine import FlashEngine
from dpscope.flash.opacus import private_optimizer
from dpscope.flash.oracle import run_oracle
from dpscope.flash.step import microbatch
from dpscope.flash.update.optimizer import FusedUpdate
from tests.unit.flash.private_training import make_data, make_model, make_private, moved, sgd

DRAW = 16
C = 0.5


def fail_at(call: int, kept):
    """Return `kept` with an error after so many calls."""
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > call:
            raise torch.OutOfMemoryError("no room")
        return kept(*args, **kwargs)

    return failing


def first_sums_alone(*args, **options):
    yield next(MADE(*args, **options))
    raise torch.OutOfMemoryError("no room")


MADE = microbatch.sum_parts


def some_noise(optimizer, sums, how):
    how.draw()
    for _, total in sums[:1]:
        total.add_(1.0)
    raise torch.OutOfMemoryError("no room")


FAILURES = {
    "forward": lambda patch, optimizer: patch.setattr(nn.Tanh, "forward", fail_at(0, nn.Tanh.forward)),
    "backward": lambda patch, optimizer: patch.setattr(FlashEngine, "add", fail_at(2, FlashEngine.add)),
    "norms": lambda patch, optimizer: patch.setattr(microbatch, "clip_factors", fail_at(0, None)),
    "sums": lambda patch, optimizer: patch.setattr(microbatch, "sum_parts", first_sums_alone),
    "noise": lambda patch, optimizer: patch.setattr(private_optimizer, "privatise_gradients", some_noise),
    "accounting": lambda patch, optimizer: patch.setattr(optimizer.accountant, "step", fail_at(0, None)),
    "update": lambda patch, optimizer: patch.setattr(optimizer.original_optimizer, "step", fail_at(0, None)),
}
FUSED = {
    **{name: FAILURES[name] for name in ("norms", "sums", "accounting")},
    "update": lambda patch, optimizer: patch.setattr(FusedUpdate, "_apply", fail_at(0, None)),
}
NOTHING_LOST = {"forward", "backward", "norms"}
ONCE = {"noise", "accounting", "update"}  # reached in the last physical batch of a draw
CASES = [
    (point, fused, part, failing)
    for fused, points in ((False, FAILURES), (True, FUSED))
    for point in points
    for part, failing in ((DRAW, 0), (6, 0), (6, 1), (6, 2))
    if point not in ONCE or (part, failing) in ((DRAW, 0), (6, 2))
]


class Run:
    """A private run of draws of 16 samples, in physical batches of at most `part`."""

    def __init__(self, part: int, workers: int = 0, **options) -> None:
        self.engine, self.model = PrivacyEngine(), make_model()
        loader = DataLoader(make_data(), batch_size=DRAW, num_workers=workers)
        _, self.optimizer, self.loader = make_private(self.model, sgd(self.model), self.engine, loader, **options)
        self.part = part

    def parts(self):
        return BatchMemoryManager(data_loader=self.loader, max_physical_batch_size=self.part, optimizer=self.optimizer)

    def train(self, x, y, before=lambda: None, step=lambda: None) -> None:
        """Train on a batch. `before`: called before the forward pass, and `step` before the step."""
        self.optimizer.zero_grad()
        before()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        step()
        self.optimizer.step()

    @property
    def steps(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)


def truth(model, draw: int, clipping: str = "flat") -> list[torch.Tensor]:
    """Return the step of a draw, from micro-batches of one."""
    x, y = make_data()[DRAW * draw : DRAW * (draw + 1)]
    parameters = list(model.parameters())
    if clipping != "per_layer":
        found = run_oracle(model, (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_grad_norm=C)
        return [found.clipped_sums[name] / DRAW for name, _ in model.named_parameters()]
    bound, sums = C / len(parameters) ** 0.5, [torch.zeros_like(p) for p in parameters]
    for one, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(one[None]), label[None]), parameters)
        sums = [total + g * (bound / g.norm()).clamp(max=1.0) for total, g in zip(sums, gradients, strict=True)]
    return [total / DRAW for total in sums]


def plain_copy(model) -> nn.Module:
    copy = make_model()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "adaptive"])
@pytest.mark.parametrize(("point", "fused", "part", "failing"), CASES)
def test_a_batch_that_is_tried_again_is_exact_or_refused(point, fused, part, failing, clipping, monkeypatch) -> None:
    run = Run(part, clipping=clipping, fused=fused)
    updates = fused and part == DRAW  # while sums are made
    exact = point in NOTHING_LOST or (point == "sums" and failing == 0 and not updates)
    exact |= point == "noise" and part == DRAW
    before, expected = plain_copy(run.model), truth(make_model(), 0, clipping)
    refused = 0
    with run.parts() as batches:
        for number, (x, y) in enumerate(batches):
            if number == (1 if part == DRAW else 3):
                if exact:
                    torch.testing.assert_close(moved(list(before.parameters()), run.model), expected)
                    assert run.steps == 1
                before, expected, draws = plain_copy(run.model), truth(plain_copy(run.model), 1, clipping), run.steps
            try:
                with monkeypatch.context() as patch:
                    fail = partial((FUSED if fused else FAILURES)[point], patch, run.optimizer)
                    where = "before" if point in ("forward", "backward") else "step"  # not where it is verified
                    run.train(x, y, **({where: fail} if number == failing else {}))
            except torch.OutOfMemoryError:
                try:
                    run.train(x, y)
                except UserError as error:
                    assert "this draw was given up" in str(error)
                    refused += 1
            except UserError as error:
                assert "this draw was given up" in str(error)
                refused += 1
            if number == (1 if part == DRAW else 5):
                break
    assert refused == (0 if exact else 1 if part == DRAW else 3 - failing)
    assert run.steps == draws + 1
    if clipping != "adaptive":
        torch.testing.assert_close(moved(list(before.parameters()), run.model), expected)


@pytest.mark.parametrize("point", ["backward", "norms"])
def test_a_batch_is_tried_again_without_zero_grad(point, monkeypatch) -> None:
    run = Run(6)
    with run.parts() as batches:
        for number, (x, y) in enumerate(batches):
            with monkeypatch.context() as patch:
                if number == 1 and point == "backward":
                    FAILURES[point](patch, run.optimizer)
                with pytest.raises(torch.OutOfMemoryError) if number == 1 else nullcontext():
                    loss = F.cross_entropy(run.model(x), y)
                    loss.backward()
                    FAILURES[point](patch, run.optimizer) if number == 1 else None
                    run.optimizer.step()
            if number == 1:
                F.cross_entropy(run.model(x), y).backward()
                run.optimizer.step()
            if number == 2:
                break
    torch.testing.assert_close(moved(list(make_model().parameters()), run.model), truth(make_model(), 0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("point", ["backward", "norms", "sums", "noise", "update"])
def test_a_step_that_is_called_again_after_an_error_is_refused(point, fused, monkeypatch) -> None:
    if fused and point == "noise":
        return
    run = Run(DRAW, fused=fused)
    x, y = next(iter(run.loader))
    loss = F.cross_entropy(run.model(x), y)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        (FUSED if fused and point == "update" else FAILURES)[point](patch, run.optimizer)
        loss.backward()
        run.optimizer.step()
    moves = moved(list(make_model().parameters()), run.model)
    for _ in range(2):
        with pytest.raises(UserError, match=r"an error has dropped|given up"):
            run.optimizer.step()
    torch.testing.assert_close(moved(list(make_model().parameters()), run.model), moves, rtol=0, atol=0)
    assert run.steps == int(point == "update" or (fused and point == "sums"))


def test_noise_that_failed_is_not_added_again(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(3)
    run = Run(DRAW, noise_multiplier=1.0, noise_generator=generator)
    x, y = next(iter(run.loader))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        run.train(x, y, step=partial(FAILURES["noise"], patch, run.optimizer))
    run.train(x, y)
    assert len(run.optimizer.noise.used) == 2
    assert run.steps == 1


def test_sums_of_a_step_that_an_error_drops_are_missed_until_it_begins_again(monkeypatch) -> None:
    """A forward pass closes the batch before it, which is not the one that a loop would try again."""
    run = Run(DRAW)
    x, y = make_data()[:DRAW]

    def add(part: slice) -> None:
        F.cross_entropy(run.model(x[part]), y[part]).backward()

    first, second, third = slice(0, 4), slice(4, 10), slice(10, DRAW)
    add(first)
    add(second)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        FAILURES["sums"](patch, run.optimizer)
        add(third)
    add(third)
    with pytest.raises(UserError, match="an error has dropped the clipped sums of earlier batches"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    for part in (first, second, third):
        add(part)
    run.optimizer.step()
    expected = [each / 3 for each in truth(make_model(), 0)]  # three passes
    torch.testing.assert_close(moved(list(make_model().parameters()), run.model), expected)


def test_the_first_draw_is_not_taken_for_one_that_workers_have_drawn_ahead(monkeypatch) -> None:
    run = Run(DRAW, workers=1)
    with run.parts() as batches:
        x, y = next(iter(batches))
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            run.train(x, y, step=partial(FAILURES["update"], patch, run.optimizer))
        with pytest.raises(UserError, match="this draw was given up"):
            run.train(x, y)
    assert run.steps == 1


def test_a_scaled_batch_that_was_closed_and_is_tried_again_does_not_count_twice() -> None:
    run = Run(6)
    scaler = GradScaler("cpu", optimizer=run.optimizer)
    with run.parts() as batches:
        for number, (x, y) in enumerate(batches):
            run.optimizer.zero_grad()
            scaler.scale(F.cross_entropy(run.model(x), y)).backward()
            scaler.unscale_(run.optimizer)
            if number < 1:
                scaler.step(run.optimizer)
                scaler.update()
                continue
            with pytest.raises(UserError, match="this draw was given up"):  # an error here, say, and then again
                run.train(x, y)
            break


def test_an_optimizer_of_no_loader_refuses_the_batch_after_a_step_that_failed(monkeypatch) -> None:
    """It cannot tell a batch that is tried again from the next one."""
    model = make_model()
    engine = FlashEngine(model, max_grad_norm=C)
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": DRAW}
    optimizer = DPFlashOptimizer(sgd(model), engine=engine, **options)

    def train(draw: int) -> None:
        x, y = make_data()[DRAW * draw : DRAW * (draw + 1)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        FAILURES["update"](patch, optimizer)
        train(0)
    with pytest.raises(UserError, match="this draw was given up"):
        train(0)
    train(1)
    torch.testing.assert_close(moved(list(make_model().parameters()), model), truth(make_model(), 1))
