"""Tests whether a training loop does what privacy accounting assumes: black box, through parameter updates alone.

loop -> samples -> neighbours, noise, accounting -> verdict. Importing this imports no torch.
"""
