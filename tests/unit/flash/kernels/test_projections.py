"""projections gives each sample's values projected on fixed signs, and their squares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels import kept_gradients

SHAPES = [(13, 64), (3001,), (16, 24)]


pytestmark = pytest.mark.usefixtures("small_chunks")


def projections(values: list[Tensor], numbers: list[int], *, backend: str) -> Tensor:
    return kept_gradients.projections({"": (values, numbers)}, backend=backend)[""]


def values(dtype: torch.dtype = torch.float32, batch: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_those_of_the_values_and_projections_are_as_large_as_norms(dtype, backend):
    given = values(dtype)
    sums, squares = projections(given, [0, 1, 2], backend=backend)
    expected = sum(each.double().flatten(1).square().sum(1) for each in given)
    torch.testing.assert_close(squares, expected, rtol=2e-6, atol=0.0)
    assert (sums.abs() < 4 * expected.sqrt()).all()
    assert (sums.abs() > 0.01 * expected.sqrt()).all()
    again, _ = projections([each.clone() for each in given], [0, 1, 2], backend=backend)
    assert torch.equal(sums, again)


@pytest.mark.parametrize("pattern", ["constant", "alternating", "a column", "a row", "one element"])
def test_a_difference_moves_the_projection_of_its_sample_alone_by_about_its_norm(pattern, backend):
    given = values()
    delta = torch.zeros(13, 64)
    if pattern == "constant":
        delta += 0.5
    elif pattern == "alternating":
        delta += 0.5 * (torch.arange(64) % 2 * 2 - 1)
    elif pattern == "a column":
        delta[:, 7] = 0.5
    elif pattern == "a row":
        delta[5] = 0.5
    else:
        delta[5, 7] = 0.5
    changed = [each.clone() for each in given]
    changed[0][1] += delta
    moved = projections(changed, [0, 1, 2], backend=backend)[0] - projections(given, [0, 1, 2], backend=backend)[0]
    assert moved[0] == moved[2] == 0.0
    assert 0.05 * delta.norm() < moved[1].abs() < 4 * delta.norm()


def test_tensors_have_signs_of_their_own(backend):
    one = values()[0]
    both, _ = projections([one, -one], [0, 1], backend=backend)
    assert (both.abs() > 0.01 * one.flatten(1).norm(dim=1)).all()
    same, _ = projections([one, -one], [0, 0], backend=backend)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_has_no_finite_squares(poison, backend):
    given = values()
    given[1][2, 7] = poison
    assert projections(given, [0, 1, 2], backend=backend)[1].isfinite().tolist() == [True, True, False]


def test_kinds_that_share_a_launch_are_as_apart(backend):
    kinds = {"sums": values(), "gradients": values(torch.bfloat16), "inputs": [2 * each for each in values()[:2]]}
    kinds = {name: (own, [3 * at for at in range(len(own))]) for name, own in kinds.items()}
    found = kept_gradients.projections(kinds, backend=backend)
    for name, (own, numbers) in kinds.items():
        torch.testing.assert_close(found[name], projections(own, numbers, backend=backend), rtol=0.0, atol=1e-9)
