"""What private training will take: peak, time and privacy of a step that nobody has run yet."""
