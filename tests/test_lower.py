"""Each operator's form of plain ONNX operators, in onnxruntime without opgrad, against a float64 formula."""

import numpy as np
import onnx
import onnxruntime
import pytest
from accuracy import tolerance
from lowering_cases import ACTIVATIONS, GATHER, JOINS, SOFTMAX
from lowering_cases_layers import CONVOLUTION, LOSSES, NORMALIZATION, POOLING, SUMS
from onnx import helper

from opgrad.onnxruntime import LOWERED, NOT_LOWERED, lower

CASES = [*ACTIVATIONS, *SOFTMAX, *GATHER, *JOINS, *LOSSES, *NORMALIZATION, *CONVOLUTION, *POOLING, *SUMS]
# Operators on sequences and MaxPoolGrad, which needs its forward node, have tests of their own.
ELSEWHERE = {"AdamWOptimizer", "InplaceClipGradNorm", "MaxPoolGrad", "SGDOptimizerV2"}


def typed(array, dtype):
    """Numbers in the dtype of the test; integers and truth values as they are."""
    array = np.asarray(array)
    return array.astype(dtype) if array.dtype.kind == "f" else array


def value_info(name, array, shape=None):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


def graph_of(nodes, inputs, outputs, opset=15):
    """A model of 1.19.2's kind: arrays by name, of which the outputs give no more than type and rank."""
    given = [value_info(name, array, [None] * array.ndim) for name, array in inputs.items()]
    wanted = [each if isinstance(each, onnx.ValueInfoProto) else value_info(*each) for each in outputs]
    graph = helper.make_graph(nodes, "graph", given, wanted)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(model, inputs, outputs=None):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(outputs, inputs)


def node_of(case, inputs, outputs, dtype):
    attributes = {
        name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) if value == "dtype" else value
        for name, value in case.attributes.items()
    }
    return helper.make_node(case.op, inputs, outputs, domain=case.domain, **attributes)


def exact_results(case, arrays, dtype):
    """The formula's outputs, rounded nowhere, and each one's dtype."""
    with np.errstate(all="ignore"):
        wide = [None if each is None else typed(each, np.float64) for each in arrays]
        results = case.formula(*wide)
    return [
        None if each is None else np.asarray(each)
        for each in (results if isinstance(results, (tuple, list)) else [results])
    ]


def check_case(case, dtype, opset, rng):
    arrays = [None if each is None else typed(each, dtype) for each in case.inputs(rng)]
    exact = exact_results(case, arrays, dtype)
    inputs = {f"in{index}": each for index, each in enumerate(arrays) if each is not None}
    names = ["" if each is None else f"in{index}" for index, each in enumerate(arrays)]
    outputs = ["" if each is None else f"out{index}" for index, each in enumerate(exact)]
    wanted = [
        (name, typed(each, dtype), each.shape if case.sizes else [None] * each.ndim)
        for name, each in zip(outputs, exact, strict=True)
        if each is not None
    ]
    model = graph_of([node_of(case, names, outputs, dtype)], inputs, wanted, opset)
    lowered = lower(model, operators=[case.op])
    onnx.checker.check_model(lowered)
    assert {node.domain for node in lowered.graph.node} == {"opgrad"}
    assert {node.domain for function in lowered.functions for node in function.node} == {""}
    results = run(lowered, inputs, [name for name, *_ in wanted])
    for (name, each, _), result in zip(wanted, results, strict=True):
        assert result.dtype == each.dtype, name
        assert result.shape == each.shape, name
        reference = next(array for array, output in zip(exact, outputs, strict=True) if output == name)
        if reference.dtype.kind != "f":
            np.testing.assert_array_equal(result, reference)
        else:
            allowed = tolerance(dtype, case.terms) * (1 + np.abs(reference[np.isfinite(reference)]).max(initial=0))
            np.testing.assert_allclose(result, reference, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "opset"), [("float32", 15), ("float32", 21), ("float64", 15)])
def test_form_computes_the_formula(case, dtype, opset, rng):
    if dtype in case.dtypes:
        check_case(case, dtype, opset, rng)


def test_every_form_has_a_test():
    assert set(LOWERED) == {case.op for case in CASES} | ELSEWHERE
    assert not set(LOWERED) & NOT_LOWERED.keys()
