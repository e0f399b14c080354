"""The Triton kernels give the same results in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from dpscope.packages import release_of

HERE = Path(__file__).parent
triton = pytest.importorskip("triton")


@pytest.mark.skipif(
    release_of(triton.__version__) < (3, 7) and release_of(numpy.__version__) >= (2, 4),
    reason="the interpreter of Triton before 3.7 takes NumPy before 2.4",
)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "[triton", str(HERE)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
