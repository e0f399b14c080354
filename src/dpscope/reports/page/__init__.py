"""report.html: everything the results say on one page that needs no network."""

from dpscope.reports.page.render import PAGE, render_page, write_page

__all__ = ["PAGE", "render_page", "write_page"]
