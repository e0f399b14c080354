"""Is a training loop what differential privacy takes it to be? Tried black box, through parameter updates alone.

loop -> samples -> neighbours, noise, accounting -> verdict. Importing this imports no torch.
"""
