"""The statistics: silent on normals, loud on what is not, down to a parameter of one number."""

from __future__ import annotations

import pytest
import torch

from dpscope.audit.normality import VALUES_PER_PARAMETER, NoisyStep, find_noise_faults

SHAPES = {"scale": (), "bias": (3,), "weight": (20, 30), "other": (20, 30)}


def draw(seed, steps=VALUES_PER_PARAMETER, change=lambda name, index, z: z):
    generator = torch.Generator().manual_seed(seed)
    for index in range(steps):
        noise = {
            name: change(name, index, torch.randn(shape, generator=generator, dtype=torch.float64))
            for name, shape in SHAPES.items()
        }
        yield NoisyStep.of(f"step {index + 1}", 1, noise.items())


@pytest.mark.parametrize("seed", range(20))
def test_standard_normals_raise_no_alarm(seed):
    assert find_noise_faults(list(draw(seed))) == []


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [0.5, 2.0])
def test_half_and_twice_the_noise_of_one_parameter_are_found_even_of_one_number(name, size):
    faults = find_noise_faults(list(draw(5, change=lambda n, _, z: z * (size if n == name else 1))))
    assert len(faults) == 1 and faults[0].startswith(f"the noise on {name} has a standard deviation of")


def test_a_little_too_little_noise_is_found_where_there_are_many_values():
    faults = find_noise_faults(list(draw(6, change=lambda n, _, z: 0.95 * z)))
    assert faults[0].startswith("the noise")


def test_noise_of_one_number_that_never_changes_is_found():
    assert find_noise_faults(list(draw(7, change=lambda n, _, z: torch.ones(()) if n == "scale" else z)))


def test_inf_is_told_as_such():
    faults = find_noise_faults(list(draw(8, steps=8, change=lambda n, i, z: z / 0.0 if i == 3 else z)))
    assert faults == ["noisy steps leave inf or NaN in the parameters"]
