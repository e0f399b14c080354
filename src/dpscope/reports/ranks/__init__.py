"""Rows over several processes: each rank's figures, what travels between them, how speed grows with their number."""
