"""The ONNX project's own node tests, run through our NumPy functions."""

import importlib
import pkgutil

import numpy as np
import pytest
from onnx import helper
from onnx.backend.test.case import node as nodes

import opgrad

FUNCTIONS = {
    "Softmax": opgrad.softmax,
    "LogSoftmax": opgrad.log_softmax,
    "SoftmaxCrossEntropyLoss": opgrad.softmax_cross_entropy_loss,
    "Gather": opgrad.gather,
    "Relu": opgrad.relu,
    "Sigmoid": opgrad.sigmoid,
    "Tanh": opgrad.tanh,
    "LeakyRelu": opgrad.leaky_relu,
}


def cases():
    """The tests whose model is one node of an operator that we have; a module of onnx computes its tests on import."""
    for _, name, _ in pkgutil.iter_modules(nodes.__path__):
        if any(op.lower().startswith(name.replace("_", "")) for op in FUNCTIONS):
            importlib.import_module(f"{nodes.__name__}.{name}")
    known = [(case, case.model.graph.node) for case in nodes._NodeTestCases if case.model is not None]
    return [
        pytest.param(found[0], *case.data_sets[0], id=case.name)
        for case, found in known
        if len(found) == 1 and found[0].op_type in FUNCTIONS
    ]


CASES = cases()


@pytest.mark.parametrize(("node", "inputs", "outputs"), CASES)
def test_node(node, inputs, outputs):
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if "reduction" in attributes:
        attributes["reduction"] = attributes["reduction"].decode()
    results = FUNCTIONS[node.op_type](*inputs, **attributes)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) >= len(outputs)
    for result, expected in zip(results, map(np.asarray, outputs), strict=False):
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-7)


def test_every_operator_has_cases():
    assert {case.values[0].op_type for case in CASES} == set(FUNCTIONS)
