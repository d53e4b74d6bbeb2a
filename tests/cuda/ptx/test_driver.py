"""The stand-in for the driver's library: Triton's own launcher runs on it, and what it is told of a kernel is checked.

In a process of its own, because in that of the tests Triton may be an interpreter.
"""

import json
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


@pytest.mark.parametrize(
    ("broken", "kind", "more"),
    [
        ("without a mask", "bounds", "behind the end of x"),
        ("never written", "uninitialised", "4 bytes never written, in y (4000 bytes)"),
        ("a wrong hint", "alignment", "no multiple of 8 bytes, in x"),
        ("32 bits", "overflow", "a 32-bit number that lost its upper bits"),
    ],
)
def test_broken_kernels(said, broken, kind, more):
    """The finding names the kernel and the line of this test's Python."""
    assert f"Triton Error [CUDA]: {kind}: " in said[broken]
    assert "ptx_broken.py:" in said[broken]
    assert more in said[broken]


def test_a_missing_barrier(said):
    whole, broken = said["barriers"]
    assert whole == "right"
    assert broken.startswith("race: total, ")
    assert "with no barrier between" in broken


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
