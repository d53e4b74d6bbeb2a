"""The self-test, on a machine where all is right and on one where it is not."""

import importlib
import json

import numpy as np
import pytest
import typer
from samples import each_kind
from subprocesses import run_python
from typer.testing import CliRunner

import opgrad
from opgrad.cli import check, machine
from opgrad.cli.app import check as command
from opgrad.contract import FLOATS
from opgrad.ops import graph_operators, operators


def run(*options):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, options, catch_exceptions=False)


@pytest.fixture
def one_operator(monkeypatch):
    """Test relu alone, and start no process."""
    monkeypatch.setattr(check, "public_operators", lambda: {"relu": operators()["relu"]})
    monkeypatch.setattr(check, "_first_calls", lambda: {"cold": 1.0, "warm": 0.5})


GRAPH_OPERATORS = [graph_operators()[name] for name in ("dropout", "concat_training", "broadcast_gradient_args")]


@pytest.mark.parametrize("op", [*operators().values(), *GRAPH_OPERATORS], ids=lambda op: op.name)
@pytest.mark.one_in(3)
def test_every_operator_passes(op):
    """As in a test that is no full one. Of training graphs those with a mask, with a list and without a float: the
    results of all their examples are held to the same tolerance in operators/test_graph_ops."""
    outcome = check.check_operator(op, "float32", most=1)
    assert outcome["problem"] == ""
    assert outcome["right"]


@pytest.mark.one_case
def test_an_operator_passes_in_every_dtype(op, dtype):
    """Of training graphs, too, as their own tests hold the examples in every dtype to the same limits."""
    assert check.check_operator(op, dtype, most=1)["problem"] == ""


@pytest.mark.usefixtures("one_operator")
def test_all_is_right():
    done = run()
    assert done.exit_code == 0, done.output
    for words in ("relu", "float32", "vectors", "threads", "from the cache", "All is right."):
        assert words in done.output


@pytest.mark.usefixtures("one_operator")
def test_json_tells_the_same():
    found = json.loads(run("--json", "--full").output)
    assert found["right"]
    assert [test["dtype"] for test in found["operators"]] == list(FLOATS)
    assert [test["dtype"] for test in json.loads(run("--json").output)["operators"]] == ["float32"]
    assert found["versions"]["numpy"] == np.__version__
    assert found["threads"] == opgrad.get_num_threads()
    assert found["cache"]["kernels"] > 0
    assert found["machine"]["vector_bits"] in (128, 256, 512)


def raising(error):
    def raises(*_, **__):
        raise error

    return raises


WRONG = {
    "a wrong kernel": ("opgrad.relu", lambda x: x, "relu float32: error of"),
    "a kernel that fails": (
        "opgrad.relu",
        raising(NotImplementedError("relu: no kernel for cpu")),
        "relu float16: NotImplementedError: relu: no kernel for cpu",
    ),
    "an onnxruntime without registration": (
        "opgrad.onnxruntime.register",
        raising(RuntimeError("onnxruntime is too old")),
        "onnxruntime is too old",
    ),
}


@pytest.mark.usefixtures("one_operator")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(monkeypatch, name):
    replaced, by, message = WRONG[name]
    if "onnxruntime" in name:
        pytest.importorskip("onnxruntime")
    monkeypatch.setattr(replaced, by)
    done = run("--full") if "float16" in message else run()
    assert done.exit_code == 1
    assert "Something is wrong." in done.output
    assert message in done.output


@pytest.mark.usefixtures("one_operator")
def test_what_keeps_cuda_from_running_is_told(monkeypatch):
    monkeypatch.setattr(machine, "cuda_problem", lambda: "there is no NVIDIA driver here")
    done = run()
    assert done.exit_code == 0
    assert "not used: there is no NVIDIA driver here" in " ".join(done.output.split())
    assert "on cuda" not in done.output


@pytest.mark.usefixtures("one_operator")
def test_names_of_extras_keep_their_brackets(monkeypatch):
    monkeypatch.setattr(check, "_onnxruntime", lambda: ('not installed; pip install "opgrad[onnx]"', ""))
    assert 'pip install "opgrad[onnx]"' in " ".join(run().output.split())


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device with PyTorch's CPU in its place."""
    pytest.importorskip("torch")
    device = {"name": "A device", "capability": "9.0", "driver": "1.2"}
    monkeypatch.setattr(machine, "cuda_problem", lambda: "")
    monkeypatch.setattr(machine, "cuda_device", lambda: device)
    upload = importlib.import_module("opgrad.call.libraries.torch_tensors").upload
    monkeypatch.setattr("opgrad.call.libraries.torch_tensors.upload", lambda array, device: upload(array, "cpu"))


@pytest.mark.usefixtures("one_operator", "cuda")
def test_operators_are_tested_on_a_device():
    found = json.loads(run("--json", "--full").output)
    assert found["right"]
    assert [test["device"] for test in found["operators"]] == ["cpu"] * len(FLOATS) + ["cuda"] * len(FLOATS)
    assert found["cuda"]["device"]["name"] == "A device"
    done = run()
    assert "worst error in ulp against float64 on cuda" in done.output
    assert "A device, capability 9.0, driver 1.2, Triton" in " ".join(done.output.split())


@pytest.mark.usefixtures("one_operator", "cuda")
def test_a_wrong_kernel_on_a_device_is_found(monkeypatch):
    relu = opgrad.relu
    monkeypatch.setattr(opgrad, "relu", lambda x: relu(x) if isinstance(x, np.ndarray) else x)
    done = run()
    assert done.exit_code == 1
    assert "relu float32 on cuda: error of" in done.output
    assert "relu float32: error of" not in done.output


@pytest.mark.usefixtures("cuda")
@each_kind
def test_operators_pass_on_a_device(op):
    assert check.check_operator(op, "float32", "cuda")["problem"] == ""


FILES = """
import os, pathlib
folder = pathlib.Path(os.environ["OPGRAD_CACHE_DIR"])
print(len(list(folder.iterdir())))
(folder / "kernel").touch()
"""


def test_first_calls_are_timed_in_new_processes(monkeypatch):
    """With an empty cache, and then with what the first has left there."""
    assert float(run_python(check.FIRST_CALL)) > 0
    monkeypatch.setattr(check, "FIRST_CALL", FILES)
    assert check._first_calls() == {"cold": 0, "warm": 1}
