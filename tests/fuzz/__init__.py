"""Random models: how many, and from which seed on, environment variables may say."""

import os

MODELS = int(os.environ.get("DPSCOPE_FUZZ_MODELS", "200"))
FIRST_SEED = int(os.environ.get("DPSCOPE_FUZZ_SEED", "0"))
