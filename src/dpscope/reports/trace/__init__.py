"""Where the time of a step went, by phase, operator and layer: data, text, CSV, figures and charts of the page."""
