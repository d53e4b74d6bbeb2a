"""Recurrent layers in stock onnxruntime: as nodes of their own, as plain ONNX, and beside onnxruntime's own layers."""

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_cases import check_close
from onnx_models import one_node, run

import opgrad
from opgrad.cli.examples import examples, expected, listed
from opgrad.onnxruntime import lower
from opgrad.ops import graph_operators

OPERATORS = {name: graph_operators()[name] for name in ("lstm_training", "lstm_grad", "gru_training", "gru_grad")}


def ports(op, given):
    """The inputs of a node with these arguments, None for one that is missing, up to the last that is there."""
    (onnx_name,) = op.onnx
    names = [name.rstrip("?") for name in onnx_name.inputs]
    last = max(names.index(name) for name in names if name in given)
    return [(name, given[name].dtype.name) if name in given else None for name in names[: last + 1]]


def model_of(op, given, results=None, layer=None):
    """A node of an operator with these arguments, or one of ONNX's layer."""
    (onnx_name,) = op.onnx
    dtype = given["x"].dtype.name
    names = ["y", "y_h", "y_c"][: 2 + (layer == "LSTM")] if layer else [name.rstrip("?") for name in onnx_name.outputs]
    outputs = [(name, dtype) if results is None or name in results else None for name in names]
    attributes = {name: int(value) if isinstance(value, bool) else value for name, value in given.items()
                  if not isinstance(value, np.ndarray)}  # fmt: skip
    attributes |= {"hidden_size": given["r"].shape[2], "domain": "" if layer else "com.microsoft"}
    return one_node(layer or onnx_name.name, ports(op, given), outputs, **attributes)


def arrays(given):
    return {name: value for name, value in given.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_a_node_gives_what_the_function_gives(op):
    for example in examples(op, "float32"):
        found = run(model_of(op, example.arguments), arrays(example.arguments))
        wanted = listed(getattr(opgrad, op.name)(**example.arguments))
        for got, exact in zip(found, wanted, strict=True):
            assert got.tobytes() == exact.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_the_plain_form_gives_the_same(op, dtype):
    for example in examples(op, dtype):
        if not example.arguments["x"].size:
            continue  # onnxruntime's Scan takes no empty arrays
        plain = lower(onnx.load_from_string(model_of(op, example.arguments)))
        session = onnxruntime.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"])
        check_close(session.run(None, arrays(example.arguments)), expected(op, example.arguments), 4 * example.terms)


def test_outputs_that_nobody_wants():
    """Results of a layer go to memory of their own; gradients are not computed."""
    for name, results in (("lstm_training", ("y_h", "gates")), ("gru_grad", ("dw", "dinitial_h"))):
        op, example = OPERATORS[name], examples(OPERATORS[name], "float32")[0]
        every = dict(zip(op.results, listed(getattr(opgrad, name)(**example.arguments)), strict=True))
        last = max(list(op.results).index(each) for each in results)
        model = onnx.load_from_string(model_of(op, example.arguments, results))
        del next(node for node in model.graph.node if node.op_type != "Cast").output[last + 1 :]
        for got, each in zip(run(model.SerializeToString(), arrays(example.arguments)), results, strict=True):
            assert got.tobytes() == every[each].tobytes()


@pytest.mark.parametrize("name", ["lstm_training", "gru_training"])
def test_states_are_those_of_onnxruntimes_own_layer(name):
    op, kind = OPERATORS[name], {"lstm_training": "LSTM", "gru_training": "GRU"}[name]
    for example in examples(op, "float32")[:4]:
        given = example.arguments
        session = onnxruntime.InferenceSession(model_of(op, given, layer=kind), providers=["CPUExecutionProvider"])
        found = listed(getattr(opgrad, name)(**given))
        for got, theirs in zip(found, session.run(None, arrays(given)), strict=False):
            np.testing.assert_allclose(got, theirs, rtol=1e-4, atol=1e-5)


REFUSED = {
    "clip": ({"clip": 1.0}, "clip is 1.0, expected 0"),
    "coupled gates": ({"input_forget": 1}, "input_forget is True, expected False"),
    "batch first": ({"layout": 1}, "layout is 1, expected 0"),
    "activations": ({"activations": ["Tanh"] * 3}, "the node has the attribute activations, expected none"),
    "direction": ({"direction": "both"}, "direction is 'both', expected one of forward, reverse, bidirectional"),
    "hidden_size": ({"hidden_size": 3}, r"w has shape \(1, 8, 2\), expected \(1, 12, 2\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    attributes, message = REFUSED[case]
    feeds = {"x": np.zeros((3, 1, 2), "f4"), "w": np.zeros((1, 8, 2), "f4"), "r": np.zeros((1, 8, 2), "f4")}
    inputs = [(name, "float32") for name in feeds]
    model = one_node("LSTMTraining", inputs, [("y", "float32")], **({"hidden_size": 2} | attributes))
    with pytest.raises(Exception, match=message):
        run(model, feeds)


def test_attributes_that_say_nothing():
    """1.19.2 writes the largest float32 where nothing is clipped."""
    feeds = {"x": np.ones((2, 1, 2), "f4"), "w": np.ones((1, 8, 2), "f4"), "r": np.ones((1, 8, 2), "f4")}
    inputs = [(name, "float32") for name in feeds]
    plain, told = (
        one_node("LSTMTraining", inputs, [("y", "float32")], hidden_size=2, **more)
        for more in ({}, {"clip": float(np.finfo("f4").max), "input_forget": 0, "direction": "forward"})
    )
    np.testing.assert_array_equal(run(plain, feeds)[0], run(told, feeds)[0])
    lowered = lower(onnx.load_from_string(told)).SerializeToString()
    stock = onnxruntime.InferenceSession(lowered, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(stock.run(None, feeds)[0], run(told, feeds)[0], rtol=1e-6)


@pytest.mark.parametrize("case", [case for case in REFUSED if case != "hidden_size"])
def test_what_has_no_plain_form(case):
    model = onnx.load_from_string(
        one_node("LSTMTraining", [("x", "float32")] * 3, [("y", "float32")], **REFUSED[case][0])
    )
    with pytest.raises(NotImplementedError, match="LSTMTraining has no form of plain operators"):
        lower(model)
