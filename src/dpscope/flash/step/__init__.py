"""A training step: its micro-batches, and the clipped sums they give."""
