"""Each operator's form of plain ONNX operators, in onnxruntime without opgrad, against a float64 formula."""

import numpy as np
import onnx
import pytest
from accuracy import relative_tolerance
from lowering_cases import ACTIVATIONS, GATHER, JOINS, SOFTMAX
from lowering_cases_layers import ATTENTION, CONTRIB, LOSSES, NORMALIZATION, SUMS
from lowering_cases_windows import CONVOLUTION, POOLING, RESIZING, TRANSPOSED
from lowering_models import graph_of, run
from onnx import helper

from opgrad.onnxruntime import LOWERED, NOT_LOWERED, InferenceSession, lower
from opgrad.ops import operators

CASES = [*ACTIVATIONS, *SOFTMAX, *GATHER, *JOINS, *LOSSES, *NORMALIZATION, *SUMS]
CASES += [*CONVOLUTION, *TRANSPOSED, *POOLING, *RESIZING, *CONTRIB, *ATTENTION]
CHANGED = [*GATHER, *JOINS, *NORMALIZATION, *POOLING, *LOSSES]  # whose bodies have operators that opset 18 changed
# Operators on sequences and MaxPoolGrad, which needs its forward node, have tests of their own.
ELSEWHERE = {"AdamWOptimizer", "InplaceClipGradNorm", "MaxPoolGrad", "SGDOptimizerV2"}
ELSEWHERE |= {"LSTMTraining", "LSTMGrad", "GRUTraining", "GRUGrad"}  # test_recurrent.py
ELSEWHERE |= {"LinearCrossEntropyLoss", "LinearCrossEntropyLossAndGrad"}  # operators/test_linear_loss.py
ELSEWHERE |= {"QuantizedMatMulGrad"}  # gradients/test_quantized_products.py


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


def built(case, dtype, opset, rng):
    """The model of one node, its inputs, and what the formula says of each output."""
    arrays = [None if each is None else typed(each, dtype) for each in case.inputs(rng)]
    exact = {f"out{index}": each for index, each in enumerate(exact_results(case, arrays, dtype))}
    inputs = {f"in{index}": each for index, each in enumerate(arrays) if each is not None}
    names = ["" if each is None else f"in{index}" for index, each in enumerate(arrays)]
    outputs = ["" if each is None else name for name, each in exact.items()]
    exact = {name: each for name, each in exact.items() if each is not None}
    wanted = [
        (name, typed(each, dtype), each.shape if case.sizes else [None] * each.ndim) for name, each in exact.items()
    ]
    return graph_of([node_of(case, names, outputs, dtype)], inputs, wanted, opset), inputs, exact


def assert_close(result, exact, dtype, terms, name):
    assert result.dtype == typed(exact, dtype).dtype, name
    assert result.shape == exact.shape, name
    if exact.dtype.kind != "f":
        np.testing.assert_array_equal(result, exact, name)
    else:
        allowed = relative_tolerance(dtype, terms) * (1 + np.abs(exact[np.isfinite(exact)]).max(initial=0))
        np.testing.assert_allclose(result, exact, rtol=0, atol=allowed, err_msg=name)


def check_case(case, dtype, opset, rng):
    model, inputs, exact = built(case, dtype, opset, rng)
    lowered = lower(model, operators=[case.op])
    onnx.checker.check_model(lowered)
    assert {node.domain for node in lowered.graph.node} == {"opgrad"}
    assert {node.domain for function in lowered.functions for node in function.node} == {""}
    for (name, each), result in zip(exact.items(), run(lowered, inputs, [*exact]), strict=True):
        assert_close(result, each, dtype, case.terms, name)


@pytest.mark.parametrize(
    ("case", "dtype", "opset"),
    [
        pytest.param(case, dtype, opset, id=f"{case}-{dtype}-{opset}")
        for case in CASES
        for dtype, opset in (("float32", 15), ("float32", 21), ("float64", 15))
        if dtype in case.dtypes and (opset == 15 or case in CHANGED)
    ],
)
def test_form_computes_the_formula(case, dtype, opset, rng):
    check_case(case, dtype, opset, rng)


def test_every_form_has_a_test():
    assert set(LOWERED) == {case.op for case in CASES} | ELSEWHERE
    assert not set(LOWERED) & NOT_LOWERED.keys()


REGISTERED = {each.name for op in operators().values() for each in op.onnx}


@pytest.mark.parametrize("case", [case for case in CASES if case.op in REGISTERED], ids=str)
def test_form_computes_what_opgrads_operator_does(case, rng):
    model, inputs, exact = built(case, "float32", 15, rng)
    lowered = run(lower(model, operators=[case.op]), inputs, [*exact])
    results = InferenceSession(model.SerializeToString()).run([*exact], inputs)  # may write into its inputs
    for name, result, other in zip(exact, results, lowered, strict=True):
        other = other.astype(np.float64) if other.dtype.kind == "f" else other
        assert_close(result, other, "float32", case.terms, name)
