"""Count how often the operating system took a host thread off its core, from an nsys export: `… FILE.sqlite`.

Record with `nsys profile --cpuctxsw=process-tree`.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

if __name__ == "__main__":
    if not Path(sys.argv[1]).is_file():
        sys.exit(f"there is no {sys.argv[1]}: record it and export it first")
    database = sqlite3.connect(sys.argv[1])
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "SCHED_EVENTS" not in tables:
        sys.exit("no context switches were recorded: pass --cpuctxsw=process-tree, with permission to trace the host")
    came_back = "FROM SCHED_EVENTS WHERE isSchedIn = 1"
    count, first, last = database.execute(f"SELECT count(*), min(start), max(start) {came_back}").fetchone()
    by_thread = f"SELECT count(*) {came_back} GROUP BY globalTid ORDER BY 1 DESC LIMIT 5"
    seconds = (last - first) / 1e9
    print(f"{count} context switches in {1e3 * seconds:.1f} ms: {count / seconds:,.0f} a second")
    for number, (switches,) in enumerate(database.execute(by_thread), start=1):
        print(f"  thread {number}: {switches}")
