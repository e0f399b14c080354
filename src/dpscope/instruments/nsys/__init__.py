"""Nsight Systems: what the GPU and the host did at each moment of a few steps."""
