"""The stand-in for the driver's library under Triton's own launcher, and a part of the CUDA tests on it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_gate import SUPPORT, environment

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler")


@pytest.fixture(scope="module")
def said():
    """What the driver said of kernels that are broken, by what is wrong with them."""
    command = [sys.executable, str(Path(SUPPORT, "ptx_broken.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kernel_that_is_right(said):
    """It is launched on the stream that was given, on a device as it was asked for."""
    assert said["right"] == "right"
    assert set(said["streams"]) == {7}
    assert said["properties"] == {"multiprocessors": 132, "shared_memory": 232448, "architecture": 90}


def test_a_kernel_that_is_broken(said):
    """The finding names the kernel and the line of this test's Python."""
    assert "Triton Error [CUDA]: bounds: " in said["without a mask"]
    assert "ptx_broken.py:" in said["without a mask"]
    assert "behind the end of x" in said["without a mask"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("another alignment", "compiled for multiples of 16"),
        ("another number", "double: n is 0x3e8, compiled for multiples of 16"),
        ("a number for an address", "double: x is 0x3e80: "),
    ],
)
def test_arguments_are_compared_with_what_was_compiled_for(said, wrong, message):
    assert message in said[wrong]


TESTS = Path(__file__).parents[2]
# On each architecture other kernels, those of most options: cp.async in long rows, clusters, pairs of float32.
PARTS = {
    80: "(test_regimes and long and rows) or (test_wrong_indices and narrow) or test_empty_arrays",
    90: "(test_sizes and loss_and_grad) or (test_in_place and softmax_grad and not log) or cluster or wrong_labels",
    100: "(test_regimes and few and rows) or (test_sizes and leaky_relu_grad) or (test_in_place and gather_grad)",
}
FILES = [*(f"cuda/test_{name}.py" for name in ("grid", "primitive", "regimes", "gather")), "libraries/test_cupy.py"]


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
