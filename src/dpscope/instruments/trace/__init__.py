"""torch.profiler: where a step's time goes, by phase, operator, kernel and module."""

from dpscope.instruments.trace.analysis import (
    advanced_analysis,
    basic_analysis,
    detect_bottlenecks,
    generate_performance_report,
    memory_analysis,
    operator_table,
)
from dpscope.instruments.trace.capture import Detail, export_trace, record
from dpscope.instruments.trace.events import Trace, read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.vocabulary.instruments import early_training, periodic, steady_state

__all__ = [
    "Detail",
    "Trace",
    "advanced_analysis",
    "basic_analysis",
    "detect_bottlenecks",
    "early_training",
    "export_trace",
    "generate_performance_report",
    "memory_analysis",
    "operator_table",
    "periodic",
    "read_trace",
    "record",
    "steady_state",
    "summarise",
]
