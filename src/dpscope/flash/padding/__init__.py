"""Batches of a few sizes: padding rows fill a batch up, and have no weight.

The loader (`loader.py`) cuts a draw into batches of the sizes that `sizes.py` has chosen. The number of real rows
travels with the batch's tensors (`rows.py`), so that the engine does not have to guess.
"""
