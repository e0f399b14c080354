"""Names that every package shares, each defined once. Nothing here imports another package of dpscope."""
