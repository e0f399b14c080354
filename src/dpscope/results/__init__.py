"""Results of measurements: one versioned, self-describing JSON file each. No torch here."""
