"""Parts of a result that each instrument adds, as `TypedDict`s, one file an instrument.

Readers can rely on what is declared here: `parse_result` checks every row that is ok against it. A row that failed
holds what was measured before the failure.
"""
