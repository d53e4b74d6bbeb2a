"""Every rule in float16 and bfloat16 by value, against float64 on the same rounded inputs, also with ties.

The gradients are computed by the reference of ONNX, which rounds the result of every operator to its type, and in stock
onnxruntime where that has kernels for the type.
"""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from differences import build, computed, in_onnxruntime, run
from gradient_cases import CASES, NEWEST, REFERENCE_FROM, numbers
from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, NotImplemented, RuntimeException
from typed_cases import allowed, typed

from opgrad.gradients import gradients
from opgrad.onnxruntime import lower

KINDS = {"float16": (TensorProto.FLOAT16, np.float16), "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16)}
SINGLE, DOUBLE = (TensorProto.FLOAT, np.float32), (TensorProto.DOUBLE, np.float64)
WEIGHTED, FACTOR = "the_weighted", "the_factor"
# Rounding errors are random: those of one type may be so many times those of another, in units of their types.
LUCK = 8


def newest():
    """The case of every form in the last opset that has it, by operator."""
    known = sorted((case for case in CASES if case.opset <= NEWEST), key=lambda case: (case.domain, case.op, case.form))
    found = {}
    for (domain, op, _), group in itertools.groupby(known, lambda case: (case.domain, case.op, case.form)):
        found.setdefault(f"{domain}.{op}".strip("."), []).append(max(group, key=lambda case: case.opset))
    return found


BY_OPERATOR = newest()


def rounded(case, dtype, ties):
    """The inputs of a case as numbers of a type; with ties they are whole, so that many are equal, 0, or at a bound."""
    return {
        name: np.asarray(np.round(array) if ties else array, dtype).astype(np.float64)
        if array.dtype == np.float64
        else array
        for name, array in case.feeds.items()
    }


def differentiated(case, of, feeds, shape):
    """The model with gradients of its first result times numbers that halves hold, and what is fed to it."""
    model, fed = typed(case, of[0], feeds)
    model.graph.node.append(helper.make_node("Mul", ["y0", FACTOR], [WEIGHTED]))
    factor = np.round(8 * numbers(*shape)) / 8
    model.graph.initializer.append(numpy_helper.from_array(factor.astype(of[1]), FACTOR))
    return derived(model.SerializeToString(), tuple(fed), not case.domain), fed


@functools.lru_cache(maxsize=64)
def derived(model, names, plain):
    """A model, which is often the same with ties and without, and in float64 for each narrow type, with gradients."""
    graph = gradients(ModelProto.FromString(model), WEIGHTED, list(names), plain=plain)
    return graph if plain else lower(graph)


def result_of(case, feeds):
    """The first result of a case in float64, or in float32 where the reference lacks the operator."""
    model, fed = typed(case, TensorProto.DOUBLE, feeds)
    if case.domain or case.opset < REFERENCE_FROM.get(case.op, 0):
        return in_onnxruntime(model, fed)[0]
    return run(model, fed)[0]


def by_reference(graph, fed):
    return run(graph, fed)[-len(fed) :]


def by_onnxruntime(graph, fed):
    """The gradients in stock onnxruntime; None where it has no kernels for the type."""
    if any(array.dtype == ml_dtypes.bfloat16 for array in fed.values()):
        return None
    try:
        return computed(graph, fed)[-len(fed) :]
    except (NotImplemented, Fail, InvalidGraph):
        return None
    except RuntimeException as error:  # what some kernels find out when they run
        if "data type is not supported" in str(error):
            return None
        raise


def units(found, expected, dtype):
    """How far numbers are from those of float64, in units of their type at the largest of them."""
    found, finite = found.astype(np.float64), np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    largest = np.abs(expected[finite]).max(initial=0)
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    away = np.abs(found - expected)[finite].max(initial=0)
    return away / (float(ml_dtypes.finfo(dtype).eps) * max(largest, least))


def check(case, of, feeds):
    """Gradients in a narrow type are as exact as its numbers allow: as those in float32 are, in units of each type."""
    shape = result_of(case, feeds).shape
    expected = by_reference(*differentiated(case, DOUBLE, feeds, shape))
    single = functools.cache(lambda: by_reference(*differentiated(case, SINGLE, feeds, shape)))
    graph, fed = differentiated(case, of, feeds, shape)
    if not case.domain:
        shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
    for results in filter(None, (by_reference(graph, fed), by_onnxruntime(graph, fed))):
        for place, (name, found, exact) in enumerate(zip(fed, results, expected, strict=True)):
            assert found.dtype == of[1], name
            assert found.shape == exact.shape, name
            away = units(found, exact, of[1])
            assert away <= LUCK or away <= LUCK * units(single()[place], exact, np.float32), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", BY_OPERATOR)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.one_in(3)
def test_gradients_of_halves_are_those_of_float64(op, kind):
    for case, ties in itertools.product(BY_OPERATOR[op], (False, True)):
        feeds = rounded(case, KINDS[kind][1], ties)
        if not allowed(case, KINDS[kind][0]):
            continue
        try:
            check(case, KINDS[kind], feeds)
        except Exception as error:
            error.add_note(f"case: {case}{', ties' * ties}")
            raise


# Where a derivative jumps, what PyTorch takes; x, and the gradient there.
BOUNDS = {
    "HardSwish": ([-3, -2, 3], [0, -1 / 6, 1]),
    "HardSigmoid <alpha = 0.25>": ([-2, 0, 2], [0, 0.25, 0]),
    "Relu": ([-1, 0, 1], [0, 0, 1]),
    "ThresholdedRelu": ([0.5, 1, 2], [0, 0, 1]),
    "Shrink <lambd = 0.5>": ([-0.5, 0.5, 1], [0, 0, 1]),
    "Abs": ([-1, 0, 1], [-1, 0, 1]),
}


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("call", BOUNDS)
def test_bounds_are_the_same_in_every_type(call, kind):
    op, _, attributes = call.partition(" ")
    model = build(f"g ({kind}[3] x) => ({kind}[3] y) {{ y = {op} {attributes} (x) }}", 22)
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    x, expected = BOUNDS[call]
    found = run(gradients(model, "y", "x", plain=True), {"x": np.array(x, dtype)})[-1].astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=2 * float(ml_dtypes.finfo(dtype).eps))
