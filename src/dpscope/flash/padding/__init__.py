"""Batches of a few sizes: rows that are nobody's fill a batch up, and weigh nothing.

The loader (`loader.py`) cuts a draw into batches of the sizes that `sizes.py` has chosen. How many rows are real
travels with the batch's tensors (`rows.py`), so that the engine need not guess which batch it is given.
"""
