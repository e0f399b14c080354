"""What measurements gave: one versioned, self-describing JSON file each. No torch here."""
