"""Nsight Compute: the bytes a step moves, counted by the GPU itself."""
