"""The optimizer side: the fused update is torch's own, and the noise is what was promised."""

from __future__ import annotations

import copy
import math
import os
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.step.microbatch import SumBatch
from dpscope.flash.update.noise_source import NoiseSource
from dpscope.flash.update.optimizer import FusedUpdate, Privatisation, privatise_gradients
from tests.unit.flash.kernels.noise_values import noise_values

SHAPES = [(7, 5), (3,), (2, 3, 4), ()]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def given(parameters, sums):
    return [SumBatch(list(parameters), list(sums), None)]


def privatise(gradients: list[torch.Tensor], how: Privatisation) -> None:
    """Those of an optimizer that has no other parameters."""
    ours = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    privatise_gradients(torch.optim.SGD(ours), list(zip(ours, gradients, strict=True)), how)


def quiet(scale: float = 0.25) -> Privatisation:
    return Privatisation(noise_std=0.0, grad_scale=scale, noise=NoiseSource(torch.Generator()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_fused_update_does_what_torch_does(name: str) -> None:
    ours, theirs = parameters(), parameters()
    our_optimizer, their_optimizer = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    update = FusedUpdate(our_optimizer)
    for step in range(4):
        sums = [p.detach() for p in parameters(seed=step + 1)]
        update(given(ours, sums), quiet())
        for p, total in zip(theirs, sums, strict=True):
            p.grad = total * 0.25
        their_optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # a few roundings of float32


def test_state_moves_between_the_fused_update_and_torch() -> None:
    """Two fused steps, then two of torch's from the saved state, equal four of torch's."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = torch.optim.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    update = FusedUpdate(optimizer)
    for step in range(4):
        sums = [p.detach() for p in parameters(seed=step + 1)]
        if step < 2:
            update(given(ours, sums), quiet(1.0))
        else:
            if step == 2:
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(ours, lr=0.01)
                optimizer.load_state_dict(state)
            for p, total in zip(ours, sums, strict=True):
                p.grad = total
            optimizer.step()
        for p, total in zip(theirs, sums, strict=True):
            p.grad = total
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def _each_state(key: str, change: Callable[[torch.Tensor], None]) -> Callable[[torch.optim.Optimizer], None]:
    def change_all(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            change(state[key])

    return change_all


def _move(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def _only_second(optimizer: torch.optim.Optimizer) -> dict:
    return optimizer.state[optimizer.param_groups[0]["params"][1]]


def _split_groups(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    moved = [group["params"].pop(), group["params"].pop(0)]
    optimizer.add_param_group({**group, "params": moved, "lr": 0.03, "weight_decay": 0.0})


CHANGES = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "a copied state": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "its own state": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "one counter set": lambda optimizer: _only_second(optimizer)["step"].fill_(7.0),
    "one counter replaced": lambda optimizer: _only_second(optimizer).update(step=torch.tensor(5.0)),
    "one counter of float64": lambda optimizer: _only_second(optimizer).update(step=torch.tensor(5.0).double()),
    "one state gone": lambda optimizer: _only_second(optimizer).clear(),
    "counters moved": _each_state("step", _move),
    "moments moved": _each_state("exp_avg", _move),
    "moments zeroed": _each_state("exp_avg_sq", torch.Tensor.zero_),
    "two groups": _split_groups,
    "other options": lambda optimizer: optimizer.param_groups[0].update(
        lr=0.5, betas=(0.5, 0.6), eps=0.1, weight_decay=0.3, maximize=True
    ),
    "parameters moved": lambda optimizer: [_move(p) for p in optimizer.param_groups[0]["params"]],
}


@pytest.mark.parametrize(
    "change", [*CHANGES, "a step of torch's", "load_state_dict", "another order", "another update"]
)
def test_the_fused_update_notices_what_was_changed_between_steps(change: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = torch.optim.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    update = other = FusedUpdate(optimizer)

    def step(seed: int, *, fused: bool = True) -> None:
        sums = [p.detach() for p in parameters(seed)]
        for a, b, total in zip(ours, theirs, sums, strict=True):
            a.grad, b.grad = total, total
        batch, turned = SumBatch(list(ours), sums, None), seed % 2 and change == "another order"
        batches = [SumBatch(batch[0][2:], sums[2:], None), SumBatch(batch[0][1::-1], sums[1::-1], None)]
        if fused:
            (other if seed % 2 else update)(batches if turned else [batch], quiet(1.0))
        else:
            optimizer.step()
        reference.step()

    step(1)
    saved = copy.deepcopy(optimizer.state_dict())
    step(2)
    step(3)
    if change == "a step of torch's":
        step(4, fused=False)
    elif change == "another update":
        other = FusedUpdate(optimizer)
    for either in (optimizer, reference):
        if change == "load_state_dict":
            either.load_state_dict(copy.deepcopy(saved))
        elif change in CHANGES:
            CHANGES[change](either)
    for seed in range(5, 9):
        step(seed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert optimizer.state[a]["step"] == reference.state[b]["step"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_up_momentum_and_frozen_parameters_between_steps(momentum: float) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = (torch.optim.SGD(p, lr=0.1, momentum=momentum) for p in (ours, theirs))
    update = FusedUpdate(optimizer)
    for seed in range(5):
        sums = [p.detach() for p in parameters(seed + 1)]
        for parameter in (ours[1], theirs[1]):
            parameter.requires_grad_(seed > 1)
        for parameter, total in zip(theirs, sums, strict=True):
            parameter.grad = total if parameter.requires_grad else None
        optimizer.param_groups[0]["momentum"] = reference.param_groups[0]["momentum"] = momentum if seed < 3 else 0.5
        update(given(ours, sums), quiet(1.0))
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_plain_sgd_keeps_no_state() -> None:
    ours = parameters()
    optimizer = torch.optim.SGD(ours, lr=0.1)
    FusedUpdate(optimizer)(given(ours, [p.detach() for p in parameters(1)]), quiet())
    assert not optimizer.state


def test_the_fused_update_leaves_frozen_parameters_alone() -> None:
    ours = parameters()
    ours[0].requires_grad_(False)
    before = [p.detach().clone() for p in ours]
    FusedUpdate(torch.optim.SGD(ours, lr=0.1))(given(ours, [p.detach() for p in parameters(1)]), quiet())
    assert [torch.equal(a, b) for a, b in zip(before, ours, strict=True)] == [True, False, False, False]


def test_the_fused_update_adds_noise_of_the_promised_size() -> None:
    size, std, scale = 100_000, 2.0, 0.5
    parameter = nn.Parameter(torch.zeros(size))
    how = Privatisation(noise_std=std, grad_scale=scale, noise=NoiseSource(torch.Generator().manual_seed(5)))
    FusedUpdate(torch.optim.SGD([parameter], lr=1.0))(given([parameter], [torch.full((size,), 3.0)]), how)
    applied = -parameter.detach() / scale
    assert abs(applied.mean().item() - 3.0) < 5 * std / math.sqrt(size)
    assert abs(applied.var().item() / std**2 - 1) < 5 * math.sqrt(2 / size)


def test_samples_are_summed_by_their_factors_in_the_update() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    update = FusedUpdate(torch.optim.SGD([parameter], lr=1.0))
    update([SumBatch([parameter], [torch.tensor([[8.0] * 4, [1.0] * 4])], torch.tensor([0.125, 1.0]))], quiet(1.0))
    torch.testing.assert_close(parameter.detach(), torch.full((4,), -2.0))
    update([SumBatch([parameter], [torch.full((1, 4), float("nan"))], torch.tensor([0.0]))], quiet(1.0))
    torch.testing.assert_close(parameter.detach(), torch.full((4,), -2.0))


def test_nothing_holds_per_sample_gradients_while_the_next_sums_are_made() -> None:
    """They are the largest tensors of a step, and what comes next is made when it is asked for."""
    kept, summed = parameters()[:2]
    values = torch.ones(2, *kept.shape)
    alive = weakref.ref(values)
    first = [SumBatch([kept], [values], torch.ones(2))]
    del values

    def batches():
        yield first.pop()
        assert alive() is None
        yield SumBatch([summed], [torch.ones_like(summed)], None)

    before = kept.detach().clone()
    FusedUpdate(torch.optim.SGD([kept, summed], lr=1.0))(batches(), quiet(1.0))
    torch.testing.assert_close(kept.detach(), before - 2.0)


def test_noise_has_the_promised_mean_and_spread_and_no_memory() -> None:
    """200 000 normals a step: their mean errs by σ/√n, their variance by σ²√(2/n), correlations by 1/√n."""
    source = NoiseSource(torch.Generator().manual_seed(7))
    size, std, scale = 200_000, 3.0, 0.5
    steps = []
    for _ in range(2):
        gradient = torch.zeros(size)
        privatise([gradient], Privatisation(noise_std=std, grad_scale=scale, noise=source))
        steps.append(gradient / (std * scale))
    for noise in steps:
        assert abs(noise.mean().item()) < 5 / math.sqrt(size)
        assert abs(noise.var().item() - 1) < 5 * math.sqrt(2 / size)
        assert abs((noise[1:] * noise[:-1]).mean().item()) < 5 / math.sqrt(size)
    assert abs((steps[0] * steps[1]).mean().item()) < 5 / math.sqrt(size)


def test_a_noise_source_repeats_itself_only_when_told_to() -> None:
    source = NoiseSource(torch.Generator().manual_seed(1))
    first = source.draw()
    state = source.state()
    second, third = source.draw(), source.draw()
    assert len({first, second, third}) == 3
    source.resume(state)
    assert source.draw() == second
    assert NoiseSource(torch.Generator().manual_seed(1)).draw() == first
    assert NoiseSource().draw() != NoiseSource().draw()


def test_a_noise_source_without_a_generator_has_no_state() -> None:
    source = NoiseSource()
    assert source.state() == {"used": [], "generator": None}
    with pytest.raises(UserError, match="noise_generator"):
        source.resume(NoiseSource(torch.Generator().manual_seed(1)).state())


# -- keys from the operating system ------------------------------------------------------------------------------------


def from_system(key: int) -> Callable[[int], bytes]:
    """What os.urandom is replaced by: the operating system gives these 128 bits, and must be asked for all of them."""

    def urandom(count: int) -> bytes:
        assert count == 16
        return key.to_bytes(16, "little")

    return urandom


def noise_of(path: str) -> tuple[float, ...]:
    """The noise of a step without a generator, by the path."""
    how = Privatisation(noise_std=1.0, grad_scale=1.0, noise=NoiseSource())
    if path == "fused":
        parameter = nn.Parameter(torch.zeros(8))
        FusedUpdate(torch.optim.SGD([parameter], lr=1.0))(given([parameter], [torch.zeros(8)]), how)
        return tuple((-parameter.detach()).tolist())
    gradient = torch.zeros(8)
    privatise([gradient], how)
    return tuple(gradient.tolist())


@pytest.mark.parametrize("path", ["fused", "unfused"])
def test_every_one_of_128_bits_from_the_operating_system_changes_the_noise(path: str, monkeypatch) -> None:
    base = random.Random(0).getrandbits(128)
    streams = set()
    for key in [base, *(base ^ 1 << bit for bit in range(128))]:
        monkeypatch.setattr(os, "urandom", from_system(key))
        streams.add(noise_of(path))
    assert len(streams) == 129
    monkeypatch.setattr(os, "urandom", from_system(base))
    assert noise_of(path) in streams  # and nothing else does


@pytest.mark.parametrize("path", ["fused", "unfused"])
def test_the_bits_of_the_operating_system_are_the_key_of_the_stream_themselves(path: str, monkeypatch) -> None:
    """No seeding in between: a generator of 32 bits' seed would keep 32 of them, whichever."""
    key = random.Random(1).getrandbits(128)
    monkeypatch.setattr(os, "urandom", from_system(key))
    seed, offset = NoiseSource().draw()
    assert seed | offset << 64 == key
    assert noise_of(path) == tuple(noise_values((8,), seed, offset).tolist())


def test_noise_does_not_depend_on_torchs_seed() -> None:
    keys = set()
    for _ in range(2):
        torch.manual_seed(0)
        random.seed(0)
        keys.add(NoiseSource().draw())
    assert len(keys) == 2


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, work().encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_processes_draw_other_keys() -> None:
    source = NoiseSource()
    source.draw()
    keys = {in_a_fork(lambda: str(source.draw())) for _ in range(3)} | {str(source.draw())}
    assert len(keys) == 4


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_given_generator_is_not_used_by_two_processes() -> None:
    source = NoiseSource(torch.Generator().manual_seed(1))

    def draw() -> str:
        try:
            return str(source.draw())
        except UserError as error:
            return str(error)

    assert "forked" in in_a_fork(draw)
    assert "forked" not in draw()


def test_noise_is_drawn_where_its_generator_is_whatever_the_default_device() -> None:
    gradient = torch.zeros(3)
    with torch.device("meta"):
        how = Privatisation(noise_std=1.0, grad_scale=1.0, noise=NoiseSource(torch.Generator().manual_seed(1)))
        how.noise.draw()
        privatise([gradient], how)
    assert gradient.all()


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.RMSprop,
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), capturable=False),
        lambda p: type("Mine", (torch.optim.SGD,), {})(p, lr=0.1),
    ],
)
def test_what_is_not_torchs_plain_update_is_left_to_the_optimizer(optimizer) -> None:
    assert not FusedUpdate.supports(optimizer(parameters()))


def test_an_optimizer_with_hooks_is_left_to_itself() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    assert FusedUpdate.supports(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert not FusedUpdate.supports(optimizer)
    handle.remove()
    assert FusedUpdate.supports(optimizer)
