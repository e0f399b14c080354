"""What pictures for papers have in common. matplotlib is loaded when the first is drawn."""
