"""Each operator's form of plain ONNX operators, in onnxruntime without opgrad, against a float64 formula."""

import numpy as np
import onnx
import pytest
from accuracy import tolerance
from lowering_cases import ACTIVATIONS, GATHER, JOINS, SOFTMAX
from lowering_cases_layers import CONVOLUTION, LOSSES, NORMALIZATION, POOLING, SUMS, TRANSPOSED
from lowering_models import graph_of, run
from onnx import helper

from opgrad.onnxruntime import LOWERED, NOT_LOWERED, lower

CASES = [*ACTIVATIONS, *SOFTMAX, *GATHER, *JOINS, *LOSSES, *NORMALIZATION, *CONVOLUTION, *TRANSPOSED, *POOLING, *SUMS]
# Operators on sequences and MaxPoolGrad, which needs its forward node, have tests of their own.
ELSEWHERE = {"AdamWOptimizer", "InplaceClipGradNorm", "MaxPoolGrad", "SGDOptimizerV2"}


def typed(array, dtype):
    """Numbers in the dtype of the test; integers and truth values as they are."""
    array = np.asarray(array)
    return array.astype(dtype) if array.dtype.kind == "f" else array


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


@pytest.mark.parametrize(
    ("case", "dtype", "opset"),
    [
        pytest.param(case, dtype, opset, id=f"{case}-{dtype}-{opset}")
        for case in CASES
        for dtype, opset in (("float32", 15), ("float32", 21), ("float64", 15))
        if dtype in case.dtypes
    ],
)
def test_form_computes_the_formula(case, dtype, opset, rng):
    check_case(case, dtype, opset, rng)


def test_every_form_has_a_test():
    assert set(LOWERED) == {case.op for case in CASES} | ELSEWHERE
    assert not set(LOWERED) & NOT_LOWERED.keys()
