"""Bytes through DRAM and the roofline: data, text, CSV, figures and charts of the page."""
