"""dpscope: see what privacy costs, then stop paying it."""

__version__ = "0.1.0"
