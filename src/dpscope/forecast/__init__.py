"""Forecast of private training: peak, time and privacy of a step that has not run yet."""
