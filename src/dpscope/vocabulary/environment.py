"""Environment of a measurement: the keys of result files, and their names for people."""

from __future__ import annotations

LIBRARIES = {"opacus": "Opacus", "triton": "Triton", "transformers": "transformers", "peft": "PEFT"}

# In the order of tables. What else a file says of its environment has no name of its own.
ENVIRONMENT = {
    **{"gpu": "GPU", "cpu": "CPU", "threads": "CPU threads", "cuda": "CUDA", "driver": "driver", "torch": "torch"},
    **LIBRARIES,
    **{"python": "Python", "dpscope": "dpscope", "git_commit": "dpscope's commit"},
}

# What changes what a measurement gives: `--resume` keeps a row only where these are the same, and the page warns where
# rows differ in them.
MUST_BE_EQUAL = tuple(key for key in ENVIRONMENT if key not in ("python", "git_commit"))
