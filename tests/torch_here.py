"""Marks for tests of what takes a newer torch or Triton than is promised."""

from __future__ import annotations

import os

import pytest

from dpscope.flash.kernels.triton_runtime import tl
from dpscope.flash.torch_side.torch_version import OLDEST_COMPILED, OLDEST_SHARDED, is_at_least

CAN_COMPILE, CAN_SHARD = is_at_least(OLDEST_COMPILED), is_at_least(OLDEST_SHARDED)

takes_compiled = pytest.mark.skipif(not CAN_COMPILE, reason="private training of compiled models takes a newer torch")
takes_shards = pytest.mark.skipif(not CAN_SHARD, reason="sharded models take a newer torch on a CPU")
takes_descriptors = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" and not hasattr(tl, "make_tensor_descriptor"),
    reason="the kernel takes tensor descriptors, which Triton has from 3.3 on; before, torch serves its calls",
)
