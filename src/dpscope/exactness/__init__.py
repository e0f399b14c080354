"""Test of exactness: a method's updates against micro-batches of one. Importing this imports no torch.

subject -> reference (one sample at a time, float64) -> updates of the method -> faults -> report
"""
