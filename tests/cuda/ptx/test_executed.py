"""A part of the CUDA tests, compiled and executed from PTX; `make test-ptx` has all of them.

Each architecture is a process of its own, since Triton in that of the tests is an interpreter.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler")

TESTS = Path(__file__).parents[2]
# On each architecture other kernels, those of most options: cp.async in long rows, clusters, pairs of float32.
PARTS = {
    80: "(test_regimes and long and rows) or (test_passes and 1025) or test_empty_arrays",
    90: "(test_sizes and loss_and_grad) or (test_in_place and softmax_grad and not log) or cluster or wrong_labels",
    100: "(test_regimes and few and rows) or (test_sizes and leaky_relu_grad) or (test_in_place and gather_grad)",
}
FILES = [
    "cuda/test_grid.py", "cuda/test_primitive.py", "cuda/test_regimes.py", "cuda/test_sort.py", "libraries/test_cupy.py"
]  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize("architecture", PARTS)
def test_kernels_run_from_their_ptx(architecture):
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [*FILES, "-k", PARTS[architecture]]
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=TESTS, env=given | {"OPGRAD_PTX": str(architecture)}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
