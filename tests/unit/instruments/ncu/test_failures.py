"""What ncu says, and what is made of it."""

from dpscope.instruments.ncu.running import unknown_metrics


def test_a_metric_that_cannot_be_counted_in_a_range_is_one_to_leave_out():
    """Words of ncu 2025.3.1 on an H200."""
    said = (
        "==ERROR== Metric smsp__sass_thread_inst_executed_op_fadd_pred_on.sum is not supported in range replay.\n"
        "==ERROR== See https://docs.nvidia.com/nsight-compute/ProfilingGuide/#compatibility\n"
    )
    assert unknown_metrics(said) == ["smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"]
