"""Which rows belong to which sample, verified on the user's own batch."""
