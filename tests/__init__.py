"""The tests. A helper is imported by its whole name wherever it is used: `from tests.unit.flash.agreement import …`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the repository
DATA = ROOT / "tests" / "data"  # small captures of real tools
