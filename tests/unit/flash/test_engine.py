"""The engine on whole models: the same norms, factors and clipped sums as micro-batches of one."""

import pytest
import torch
from agreement import CLIPPING, PATHS, REDUCTIONS, assert_exact
from flash_models import Decoder, token_batch, token_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tied", [False, True])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    length=st.integers(1, 8),
    clipping=st.sampled_from(CLIPPING),
    reduction=st.sampled_from(REDUCTIONS),
    norm=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_decoder_gets_the_oracles_clipped_sums(path, tied, batch, length, clipping, reduction, norm, dtype):
    model = Decoder(tied=tied, norm=norm).to(dtype)
    assert_exact(
        model, token_batch(batch, length), token_losses, clipping=clipping, loss_reduction=reduction, path=path
    )
