"""Features that need a newer torch than dpscope itself. An older version is refused by name."""

from __future__ import annotations

import torch

from dpscope.errors import UserError
from dpscope.packages import release_of

# The first release on which tests of each pass. Before, torch.compile cannot trace taps (2.6, 2.7), or norms are off
# where a graph writes into an input that a layer has read under autocast (2.8, 2.10); and fully_shard does not run on a
# CPU (2.6), so that nothing was ever held against one process.
OLDEST_COMPILED = (2, 11)
OLDEST_SHARDED = (2, 7)


def require_for_compiled() -> None:
    require(OLDEST_COMPILED, "private training of a compiled model", "leave out torch.compile")


def require_for_shards() -> None:
    require(OLDEST_SHARDED, "a sharded model (fully_shard)", "use DistributedDataParallel")


def is_at_least(least: tuple[int, int]) -> bool:
    return release_of(torch.__version__) >= least


def require(least: tuple[int, int], what: str, instead: str) -> None:
    if not is_at_least(least):
        needed = ".".join(map(str, least))
        raise UserError(f"{what} takes torch {needed} or newer, and this is torch {torch.__version__}: {instead}")
