"""A private step as a CUDA graph."""
