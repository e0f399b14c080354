"""Step time by phase, operator and layer: data, text, CSV, figures and charts of the page."""
