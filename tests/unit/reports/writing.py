"""Files that declared outputs write for rows."""

from __future__ import annotations

from dpscope.reports.report import Report


def report_of(rows):
    return Report.of({id(result): result for row in rows for result in row.measured.values()}.values())


def write(outputs, rows, folder, formats=("png",)):
    report = report_of(rows)
    return [path for output in outputs for path in output.write(report, folder, formats)]
