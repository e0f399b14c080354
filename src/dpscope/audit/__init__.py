"""Audit of a training loop: does it do what privacy accounting assumes? It sees parameter updates alone.

loop -> samples -> neighbours, noise, accounting -> verdict. Importing this imports no torch.
"""
