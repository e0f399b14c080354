"""What memory was for: data, text, figures and charts of the page."""
