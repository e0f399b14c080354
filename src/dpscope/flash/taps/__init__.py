"""Taps: what stands in for a module's forward while an engine is attached."""
