"""Time of a step by phase, operator and layer: data, text, CSV, figures and charts of the page."""
