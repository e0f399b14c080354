"""The kernels' tests on a GPU use the same references as the unit tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "flash" / "kernels"))
