"""Two sweeps side by side: which rows pair, what changed, and how it is shown."""
