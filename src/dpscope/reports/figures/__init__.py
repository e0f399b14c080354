"""Common parts of pictures for papers. matplotlib is loaded when the first is drawn."""
