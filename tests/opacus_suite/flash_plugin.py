"""A pytest plugin that runs Opacus's own tests against flash clipping.

    python -m pytest -p tests.opacus_suite.flash_plugin --pyargs opacus.tests.privacy_engine_test

`opacus.PrivacyEngine` becomes flash clipping's, whatever mode a test asks for. What tests read of Opacus's internals
has stand-ins made of what flash clipping computes: `p.grad_sample` (contributions of the backward pass),
`p.summed_grad` (the clipped sum before noise), `_module` (the model itself). Tests that cannot pass are those of
`expected_failures`: one that passes all the same fails the run, and so does an entry that names no test.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterator
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import hypothesis
import opacus
import opacus.utils.per_sample_gradients_utils as reference
import pytest
import torch
from torch import Tensor, nn

from dpscope.flash import DPFlashOptimizer, FlashEngine, PrivacyEngine
from tests import remembered_accounting
from tests.opacus_suite import torchvision_stand_in
from tests.opacus_suite.expected_failures import EXPECTED_FAILURES

# Few examples, the same ones in every run: these are tests of the loop, not a search. Tests take the profile that is
# loaded when they are imported.
hypothesis.settings.register_profile(
    "suite",
    max_examples=int(os.environ.get("OPACUS_SUITE_EXAMPLES", "3")),
    phases=[hypothesis.Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("suite")
unittest.TestCase.subTest = lambda test, *args, **params: nullcontext()  # what fails in a part fails the test
torchvision_stand_in.install()
remembered_accounting.install()


class SuiteEngine(PrivacyEngine):
    """Flash clipping for every mode that a test asks for; torch.manual_seed repeats its noise, as it does Opacus's."""

    def make_private(
        self, *, grad_sample_mode: str = "hooks", noise_generator: torch.Generator | None = None, **kwargs: Any
    ) -> Any:
        return super().make_private(noise_generator=noise_generator or torch.default_generator, **kwargs)


opacus.PrivacyEngine = SuiteEngine
nn.Module._module = property(lambda module: module._modules.get("_module", module))


# -- p.grad_sample and p.summed_grad -----------------------------------------------------------------------------------


def grad_samples(engine: FlashEngine) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Per-sample gradients of the open micro-batch, from what backward has left for each parameter."""
    for parameter in engine.parameters:
        parts = [part.materialise() for part in engine.slot(parameter).contributions]
        if parts:
            total = torch.stack([part.float() for part in parts]).sum(0).view(-1, *parameter.shape)
            yield parameter, total * (len(total) if engine.loss_reduction == "mean" else 1)


def record_grad_samples(engine: FlashEngine) -> None:
    for parameter, values in grad_samples(engine):
        before = getattr(parameter, "grad_sample", None)
        earlier = [] if before is None else before if isinstance(before, list) else [before]
        parameter.grad_sample = [*earlier, values] if earlier else values


def recording(close: Any) -> Any:
    def closing(engine: FlashEngine, **options: Any) -> Any:
        record_grad_samples(engine)
        return close(engine, **options)

    return closing


def forgetting(clear: Any) -> Any:
    def discarding(engine: FlashEngine, *options: Any) -> Any:
        for parameter in engine.parameters:
            vars(parameter).pop("grad_sample", None)
        return clear(engine, *options)

    return discarding


def noting_sums(add_noise: Any) -> Any:
    def adding(optimizer: DPFlashOptimizer) -> None:
        for parameter in optimizer.params:
            parameter.summed_grad = optimizer.engine.running_sums.get(parameter).clone()
        add_noise(optimizer)

    return adding


def all_grad_samples(optimizer: DPFlashOptimizer) -> list[Tensor]:
    optimizer.engine.finish()
    held = (parameter.grad_sample for parameter in optimizer.params)
    return [torch.cat(values) if isinstance(values, list) else values for values in held]


DPFlashOptimizer.grad_samples = property(all_grad_samples)
FlashEngine._close = recording(FlashEngine._close)
FlashEngine.discard, FlashEngine.zero_grad = forgetting(FlashEngine.discard), forgetting(FlashEngine.zero_grad)
DPFlashOptimizer.add_noise = noting_sums(DPFlashOptimizer.add_noise)


ALWAYS_TIME_MAJOR = ("DPMultiheadAttentionAdapter",)


def compute_flash_grad_sample(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "flash",
) -> dict[str, Tensor]:
    """What `compute_opacus_grad_sample` is replaced by: per-sample gradients whose norms are those the engine found."""
    if not batch_first and type(module).__name__ not in ALWAYS_TIME_MAJOR:
        hypothesis.reject()  # make_private refuses it; other examples of the test have the batch first
    model = reference.clone_module(module)
    engine = FlashEngine(model, max_grad_norm=1.0, loss_reduction=loss_reduction)
    reference.ModelWithLoss(model, loss_reduction)(x).backward()
    found = dict(grad_samples(engine))
    if found:
        engine.finish()
        squares = torch.stack([values.flatten(1).double().square().sum(1) for values in found.values()])
        torch.testing.assert_close(engine.norms, squares.sum(0).sqrt(), rtol=1e-4, atol=1e-7)
    return {name: found[p] for name, p in model.named_parameters() if p in found}


reference.compute_opacus_grad_sample = compute_flash_grad_sample


# -- the tests ---------------------------------------------------------------------------------------------------------


# Classes that repeat another with grad_sample_mode="functorch" or "ew", or with wrap_model=False, for flash clipping
# the same test (one of the latter stays, for what make_private returns); and classes that test Opacus's loaders and its
# own optimizer, without an engine.
LEFT_OUT = (
    "*Functorch::*",
    "*ExpandedWeights::*",
    *(f"*PrivacyEngine{model}HooksTest::*" for model in ("ConvNetFrozen", "CustomLayer", "Text", "TiedWeights")),
    "*::DataLoader*RandomnessTest::*",
    "*::OptimizerRandomnessTest::*",
)


def is_left_out(item: pytest.Item) -> bool:
    return any(fnmatch(item.nodeid, pattern) for pattern in LEFT_OUT)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expected failures are strict; entries for the files that were collected have to name a test."""
    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]
    named: set[str] = set()
    for item in items:
        name = "::".join(item.nodeid.split("::")[-2:])
        for pattern, reason in EXPECTED_FAILURES.items():
            if fnmatch(f"{item.path.name}::{name}", pattern):
                named.add(pattern)
                item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    collected = {item.path.name for item in items}
    stale = [p for p in EXPECTED_FAILURES if p not in named and p.partition("::")[0] in collected]
    if stale:
        raise pytest.UsageError(f"expected failures that name no test: {', '.join(stale)}")
