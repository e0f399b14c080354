"""Taps: replacements for a module's forward while an engine is attached."""
