"""How a step is observed. Instruments receive a step callable and know nothing of methods."""
