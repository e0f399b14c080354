"""Memory in reports: data, text, figures and charts of the page."""
