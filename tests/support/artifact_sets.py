"""The examples, and artifact sets made for tests."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnx

from opgrad.training import Checkpoint, write_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
SETS = ("digits", "digits_attention")


def loaded(file, name=None):
    """The module of a file, such as a script of the examples, which no package has."""
    spec = importlib.util.spec_from_file_location(name or f"{file.parent.name}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def optimizer_model(*kinds, **attributes):
    nodes = [onnx.helper.make_node(kind, [], [], domain="com.microsoft", **attributes) for kind in kinds]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "optimizer", [], []))


def linear_rows(path, rows=60):
    """Rows for the set of `write_linear_set`."""
    x = np.random.default_rng(0).standard_normal((rows, 2))
    np.savez(path, x=x, y=x @ [[2.0], [-1.0]] + 0.5)
    return path


def write_linear_set(folder):
    types = "float[n, 2] x, float[n, 1] y, float[2, 1] w, float[1] b"
    forward = "h = MatMul(x, w)  p = Add(h, b)  d = Sub(p, y)  q = Mul(d, d)  loss = ReduceMean<keepdims=0>(q)"
    backward = """
        c = Constant<value_float=0.03125>()  g = Mul(d, c)  t = Transpose(x)  wg = MatMul(t, g)
        done = com.microsoft.InPlaceAccumulatorV2(wbuf, wg, lazy_reset_grad)"""
    header = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
    extra = ", float[2, 1] wbuf, bool[1] lazy_reset_grad"
    evaluation = onnx.parser.parse_model(f"{header} g ({types}) => (float loss) {{ {forward} }}")
    training = onnx.parser.parse_model(
        f"{header} g ({types}{extra}) => (float loss, bool[1] done) {{ {forward} {backward} }}"
    )
    training.graph.input[4].name = training.graph.node[-1].input[0] = "w_grad.accumulation.buffer"
    onnx.save(evaluation, folder / "eval_model.onnx")
    onnx.save(training, folder / "training_model.onnx")
    onnx.save(optimizer_model("SGDOptimizerV2"), folder / "optimizer_model.onnx")
    values = Checkpoint({"w": np.zeros((2, 1), np.float32)}, {"b": np.full(1, 0.5, np.float32)})
    write_checkpoint(values, folder / "checkpoint")
