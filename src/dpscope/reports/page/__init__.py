"""report.html: everything the results say on one page that needs no network."""
