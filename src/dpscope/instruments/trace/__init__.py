"""torch.profiler: where a step's time goes, by phase, operator, kernel and module.

`capture` records, `events` reads what was recorded (or any trace torch.profiler exported), `attribution` says whose
time it was, `findings` looks for waits, copies and casts, `summary` puts it all together, and `analysis` is for
people who work in Python.
"""
