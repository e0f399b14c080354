"""Rows of samples: which row belongs to which sample, verified on the user's own batch."""
