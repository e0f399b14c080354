"""Which tests are slow, by folder or file."""

# What starts processes or takes many seconds, by folder or file: it is begun first, so that no core waits for it at the
# end, and `make test-fast` leaves it out.
SLOW = (
    "browser",
    "fuzz",
    "opacus_suite",
    "project/test_benchmarks.py",
    "project/test_examples.py",
    "project/test_scripts.py",
    "project/test_wheel.py",
    "unit/audit",
    "unit/commands/test_check.py",
    "unit/commands/test_compare.py",
    "unit/commands/test_plan.py",
    "unit/commands/test_settings_of_a_step.py",
    "unit/commands/test_trace.py",
    "unit/exactness",
    "unit/flash/compiled",
    "unit/flash/kernels/test_interpreter.py",
    "unit/flash/layers/test_bare.py",
    "unit/flash/layers/test_layouts.py",
    "unit/flash/layers/test_time_major.py",
    "unit/flash/step/test_sensitivity.py",
    "unit/flash/test_hugging_face.py",
    "unit/forecast/test_step.py",
    "unit/instruments/memory/test_methods.py",
    "unit/runner/test_interruption.py",
    "unit/runner/test_third_party_methods.py",
    "unit/trainers/test_opacus_refusals.py",
    "unit/workloads/test_custom.py",
    "unit/workloads/test_exactness_on_workloads.py",
)
