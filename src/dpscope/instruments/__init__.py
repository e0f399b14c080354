"""Instruments: how a step is observed. They receive a step callable and know nothing of methods."""
