import pytest


@pytest.fixture(autouse=True)
def _no_graphs_from_other_tests(fresh_graphs: None) -> None:
    """Every test here compiles."""
