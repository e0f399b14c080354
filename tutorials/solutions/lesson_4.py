"""Solutions of lesson 4. Try first: `check` gives hints."""

command = (
    "nsys profile --trace=cuda,nvtx --sample=none --capture-range=cudaProfilerApi --capture-range-end=stop "
    "--output=mine python programs/case_2.py --steps 3"
)

way = {"a script in CI": "profile", "it became slow after an hour": "launch"}


def annotated_step(annotate):
    with annotate("step"):
        with annotate("forward"):
            pass
        with annotate("backward"):
            pass
        with annotate("optimizer"):
            pass


query = """
SELECT value, SUM(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON shortName = id
GROUP BY value ORDER BY 2 DESC
"""


def longest_gap(table):
    ended = (table["start_ms"] + table["ms"]).cummax().shift(fill_value=table["start_ms"].iloc[0])
    gaps = table["start_ms"] - ended
    return gaps.max(), table.loc[gaps.idxmax(), "what"]


may_share = {"report.nsys-rep": False, "stripped.sqlite": True}

ANSWERS = {
    "4.1": (command,),
    "4.2": (way,),
    "4.3": (annotated_step,),
    "4.4": (query,),
    "4.5": (longest_gap,),
    "4.6": (may_share,),
}
