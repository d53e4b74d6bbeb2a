"""The command `opgrad compile`: what it compiles, also from examples, need not be compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cells import WORKLOADS
from opgrad.cli import compile as compiling
from opgrad.cli.app import app
from opgrad.cli.examples.arguments import SHAPES, signature
from opgrad.contract import FLOATS
from opgrad.cpu.compiler import decorators
from opgrad.cpu.compiler.cache import ObjectCache
from opgrad.cpu.compiler.processes import Work
from opgrad.cpu.compiler.target import PROCESSORS
from opgrad.cpu.plans import plan
from opgrad.ops import graph_operators, operators

DONE: list[str] = []
SETS = Path(__file__).parents[2] / "examples"
CALL = """
import sys
import numpy as np, opgrad
from opgrad.cpu.compiler import decorators
decorators.emit = None
opgrad.set_num_threads(2)
assert (opgrad.relu(np.arange(-3, 1 << 20, dtype=np.float32))[:5] == [0, 0, 0, 0, 1]).all()
assert "numba" not in sys.modules
"""
TRAIN = """
import sys
from opgrad.cpu.compiler import decorators
decorators.emit = None
from opgrad.cli import main
main()
"""


def start(*words, environment=None):
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=os.environ | (environment or {}), capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.any_cpu
def test_an_operator(tmp_path):
    cache = {"OPGRAD_CACHE_DIR": str(tmp_path / "made" / "here")}
    words = ("-m", "opgrad", "compile", "--ops", "relu", "--dtypes", "float32")
    status, text = start(*words, environment=cache)
    assert status == 0, text
    (folder,) = (tmp_path / "made" / "here").iterdir()
    count = len(list(folder.glob("*.o")))
    assert f"{count} kernels compiled in " in text
    assert text.rstrip().endswith(f"{count} in {folder}")
    assert start("-c", CALL, environment=cache) == (0, "")


@pytest.mark.any_cpu
def test_an_artifact_set(tmp_path):
    status, text = start("-m", "opgrad", "compile", SETS / "digits", "--jobs", "1")
    assert status == 0, text
    options = ("--epochs", "2", "--accumulate", "2", "--validation", "0.1", "--output", tmp_path / "out")
    status, text = start("-c", TRAIN, "train", SETS / "digits", *options)
    assert status == 0, text


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ops", "fly"), "opgrad: compile: operator is 'fly', expected one of softmax, "),
        (("--dtypes", "int8"), "opgrad: compile: dtype is 'int8', expected one of float32, "),
    ],
)
def test_unknown_names(words, message):
    result = CliRunner().invoke(app, ["compile", *words])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith(message)


@pytest.mark.any_cpu
def test_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(compiling, "object_cache", lambda: ObjectCache("environment", "/dev/null"))
    result = CliRunner().invoke(app, ["compile"])
    expected = "opgrad: compile: compiled kernels cannot be kept: /dev/null/environment: Not a directory\n"
    assert (result.exit_code, result.output) == (1, expected)


@pytest.mark.any_cpu
def test_no_artifact_set(tmp_path):
    status, text = start("-m", "opgrad", "compile", tmp_path, "--jobs", "1")
    assert (status, text.count("\n")) == (1, 1)
    assert text.startswith(f"opgrad: ArtifactSet: {tmp_path} has no training_model.onnx")


def only_in(process, done):
    if os.getpid() != process:
        os._exit(1)
    DONE.append(done)


@pytest.mark.any_cpu
@pytest.mark.parametrize("processes", [1, 2])
def test_work_is_done_here_where_a_process_ends(processes):
    DONE.clear()
    compiling.run([(name, Work(only_in, (os.getpid(), name))) for name in "abc"], processes, Console(quiet=True))
    assert DONE == ["a", "b", "c"]


@pytest.mark.any_cpu
def test_all_operators_in_the_dtypes_they_take():
    names = [name for name, _ in compiling._work([], [], [])]
    for op in operators().values():
        assert {f"{op.name} {dtype}" for dtype in FLOATS} <= set(names)
    for name in graph_operators():
        assert any(job.startswith(f"{name} ") for job in names)
    assert len(names) == len(set(names))


@pytest.mark.any_cpu
def test_the_help_names_what_there_is():
    """It is written out, so that `--help` loads neither the operators nor the compiler."""
    text = CliRunner().invoke(app, ["compile", "--help"], env={"COLUMNS": "200"}).output
    assert ",".join(FLOATS) in text
    assert ", ".join(PROCESSORS) in text


@pytest.mark.parametrize("dtype", FLOATS)
def test_examples_take_every_kernel_that_the_benchmark_takes(op, dtype, monkeypatch):
    taken = set()
    monkeypatch.setattr(decorators.Kernel, "task", lambda self, *key: taken.add((self, *map(tuple, key))) or 0)
    compiling.compile_operator(op.name, dtype)
    small = set(taken)
    for workload in WORKLOADS[op.kind]:
        options = dict(workload.attributes) | ({"indices": (workload.indices,)} if workload.indices else {})
        plan(op, *signature(op, workload.shape, dtype, **options))
    assert taken == small
    assert len(SHAPES[op.kind]) > 1
