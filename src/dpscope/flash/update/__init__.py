"""Noise and the optimizer's step."""
