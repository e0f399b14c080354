"""Which tests are slow, by folder or file."""

# What starts processes or takes many seconds, by folder or file: it is begun first, so that no core waits for it at the
# end, and `make test-fast` leaves it out.
SLOW = (
    "browser",
    "opacus_suite",
    "unit/flash/kernels/test_interpreter.py",
    "unit/runner/test_interruption.py",
)
