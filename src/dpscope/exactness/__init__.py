"""Is a method exact on a workload? Its updates against micro-batches of one. Importing this imports no torch.

subject -> reference (one sample at a time, float64) -> updates of the method -> faults -> report
"""
