"""Flash clipping in runs of several steps in which models, calls and gradients change: exact, or an error.

`python -m tests.fuzz.many` tries many more, on a GPU too, and counts.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.fuzz import FIRST_SEED, MODELS
from tests.fuzz.changing_models import make_run
from tests.fuzz.judging import judge

RUNS = range(FIRST_SEED, FIRST_SEED + max(1, MODELS * 3 // 10))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_changes_is_clipped_exactly_or_refused_in_every_step(seed):
    judge(make_run(seed))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_changes_on_a_gpu_is_clipped_exactly_or_refused_in_every_step(seed):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    judge(make_run(seed, "cuda"))


@pytest.mark.filterwarnings("ignore")
def test_most_changing_models_are_trained_or_mix():
    """A fuzz that is mostly refused shows nothing."""
    kinds = Counter(judge(make_run(seed)).kind for seed in range(500, 525))
    assert kinds["exact"] + kinds["found"] > 20 and kinds["exact"] > 5 and kinds["found"] > 5
