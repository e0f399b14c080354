"""Per-sample gradients: their pieces, the path each parameter takes, norms and factors."""
