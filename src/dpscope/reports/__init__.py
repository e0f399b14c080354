"""Pure functions of results. No torch here, and nothing is measured."""
