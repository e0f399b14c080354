"""The version of dpscope, which pyproject.toml reads from here."""

__version__ = "0.2.0"
