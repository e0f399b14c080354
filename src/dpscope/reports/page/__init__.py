"""report.html: everything the results say on one page that needs no network."""

from dpscope.reports.page.render import GENERATOR, PAGE, render_page, write_page

__all__ = ["GENERATOR", "PAGE", "render_page", "write_page"]
