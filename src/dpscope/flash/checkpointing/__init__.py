"""Checkpointed blocks: held, or run again when the factors are known."""
