"""The audit itself: a loop, samples, and the three tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpscope import numbers
from dpscope.audit.loop import LoopFactory, MakeLoop, StepFailed
from dpscope.audit.neighbours import NeighbourTest, is_random
from dpscope.audit.noise import AccountingTest, NoiseTest
from dpscope.audit.samples import UNCLIPPED, Samples, require_plain_sgd, sample_norms, sizes_to_try, usual_clip_norm
from dpscope.audit.verdict import NOT_TRIED, Audit, Finding
from dpscope.random_states import all_gpus, random_states_kept
from dpscope.workloads.workload import Batch

# Without noise there is none to be tried.
TRIED_NOISE = numbers.RealNumber("noise multiplier", 1e-6, 1e6)


def check_loop(
    make_loop: MakeLoop,
    batches: Iterable[Batch],
    *,
    noise_multiplier: float = 1.0,
    max_grad_norm: float | None = None,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Test neighbouring batches, the noise and the accountant of any training loop.

    Args:
        make_loop: Called as `make_loop(noise_multiplier=…, max_grad_norm=…, seed=…)`, about ten times. Returns a new
            `dpscope.Loop`; each starts from the parameters of the first.
        batches: Samples to use: tensors, or lists and dictionaries of them; the first dimension is the sample.
        noise_multiplier: Noise of a step divided by the clip norm.
        max_grad_norm: A clip norm to try besides those that follow from the samples' norms.
        sizes: Batch sizes to try, instead of those that coincide with other lengths of the model.
        seed: Seed of all random numbers.
        progress: Called with a line about what is done now.

    Returns:
        The verdicts: `neighbours`, `noise`, `accounting`, and `ok`. `print` it, or take `to_json()`.

    Raises:
        UserError: The loop or the batches cannot be used.

    Example:
        >>> found = dpscope.check_loop(make_loop, loader)
        >>> assert found.ok, found
    """
    noise_multiplier = TRIED_NOISE(noise_multiplier)
    max_grad_norm = None if max_grad_norm is None else numbers.MAX_GRAD_NORM(max_grad_norm)
    sizes = None if sizes is None else [numbers.TRIED_SIZE(size) for size in sizes]
    with random_states_kept(all_gpus()):
        factory, samples = LoopFactory(make_loop, numbers.SEED(seed)), Samples(batches)
        try:
            progress("norms of single samples")
            require_plain_sgd(factory.loop(max_grad_norm=UNCLIPPED), samples)
            unclipped = factory.loop(max_grad_norm=UNCLIPPED)
            factory.random = is_random(unclipped, samples)
            norms = sample_norms(unclipped, samples)
            chosen = sizes_to_try(unclipped, samples) if sizes is None else sizes
        except StepFailed as error:
            return Audit(*(Finding(NOT_TRIED, untried=[str(error)]) for _ in range(3)))
        clip_norm = max_grad_norm or usual_clip_norm(norms, samples)
        batch_size = min(4, len(samples.ordinary))
        return Audit(
            neighbours=NeighbourTest(factory, samples, norms, chosen, max_grad_norm, progress).run(),
            noise=NoiseTest(factory, samples, clip_norm, noise_multiplier, batch_size, progress).run(),
            accounting=AccountingTest(factory, samples, clip_norm, noise_multiplier, progress=progress).run(),
        )
