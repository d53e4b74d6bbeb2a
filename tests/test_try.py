"""`make try`: one operator in a few seconds."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "try_operator.py"


def tried(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


def test_an_operator_that_is_right():
    done = tried(TOOL, "relu_grad")
    assert done.returncode == 0, done.stderr
    assert [line.rpartition("  ")[0].split("  ")[0] for line in done.stdout.splitlines()] == [
        "examples, all dtypes",
        "rows around blocks",
        "other memory",
        "out=",
        "threads",
        "in onnxruntime",
        "every access checked",
    ]


def test_an_operator_that_is_wrong():
    script = "import runpy, sys, opgrad; right = opgrad.relu_grad; "
    script += "opgrad.relu_grad = lambda **given: 2 * right(**given); "
    script += f"sys.argv[1:] = ['relu_grad']; runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    done = tried("-c", script)
    assert done.returncode == 1
    assert "examples, all dtypes: float32: error of" in done.stderr


def test_no_operator():
    done = tried(TOOL, "softmaks")
    assert done.returncode == 2
    assert done.stderr.startswith("expected the name of an operator: softmax, ")
