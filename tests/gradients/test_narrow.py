"""Gradients in float16 and bfloat16 by value: against float64 on the same rounded inputs, by the reference of ONNX."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from differences import build, computed, in_float64, run
from gradient_cases import numbers
from onnx import TensorProto, helper, numpy_helper

from opgrad.gradients import gradients

KINDS = {"float16": (TensorProto.FLOAT16, np.float16), "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16)}
LONG = 300 * 300  # more than float16 holds as a number


def ties(*shape):
    """Few different numbers, so that many elements are the largest one."""
    return np.random.default_rng(0).integers(-2, 3, shape).astype(np.float64)


# A graph that makes y of x, and the value of x. Sizes are names, so that counts are found when the graph runs.
CASES = {
    "ReduceMean": ("y = ReduceMean <axes = [1]> (x)", 300 * ties(2, LONG)),
    "ReduceMean, all": ("y = ReduceMean <keepdims = 0> (x)", ties(300, 300)),
    "ReduceMean, axes": ("a = Constant <value_ints = [0]> ()\n y = ReduceMean(x, a)", ties(LONG, 2)),
    "GlobalAveragePool": ("y = GlobalAveragePool(x)", ties(1, 2, 300, 300)),
    "GlobalMaxPool": ("y = GlobalMaxPool(x)", ties(1, 2, 300, 300)),
    "ReduceMax": ("y = ReduceMax <axes = [1]> (x)", ties(2, LONG)),
    "ReduceMin": ("y = ReduceMin <axes = [0]> (x)", np.zeros((LONG, 2))),
    "Max": ("z = Neg(x)\n y = Max(x, z, zero)", ties(3, 8)),
    "Min": ("z = Neg(x)\n y = Min(x, z, zero)", ties(3, 8)),
    "InstanceNormalization": ("y = InstanceNormalization(x, scale, bias)", 400 * numbers(2, 2, 40, 40)),
    "MeanVarianceNormalization": ("y = MeanVarianceNormalization(x)", 400 * numbers(2, 2, 40, 40)),
    "LpNormalization": ("y = LpNormalization(x)", 100 * numbers(2, 600)),
    "LpNormalization, p = 1": ("y = LpNormalization <p = 1> (x)", 100 * numbers(2, 600)),
    "LRN": ("y = LRN <size = 3, alpha = 0.01> (x)", 300 * numbers(2, 6, 3, 3)),
    "GroupNormalization": ("y = GroupNormalization <num_groups = 1> (x, scale, bias)", 400 * numbers(2, 2, 40, 40)),
    "RMSNormalization": ("y = RMSNormalization(x, gain)", 400 * numbers(3, 8)),
    "AveragePool": ("y = AveragePool <kernel_shape = [60, 60], strides = [60, 60]> (x)", ties(1, 1, 120, 120)),
    "ReduceL1": ("y = ReduceL1 <axes = [1]> (x)", numbers(2, 600)),
    "ReduceL2": ("y = ReduceL2 <axes = [1]> (x)", numbers(2, 3000)),
    "ReduceLogSum": ("y = ReduceLogSum <axes = [1]> (x)", 3 + numbers(2, 9000)),
    "ReduceLogSumExp": ("y = ReduceLogSumExp <axes = [1]> (x)", numbers(2, 9000)),
    "ReduceSumSquare": ("y = ReduceSumSquare <axes = [1]> (x)", numbers(2, 3000)),
    "Mean": ("z = Neg(x)\n w = Exp(z)\n y = Mean(x, z, w)", numbers(3, 8)),
    "LayerNormalization": ("y = LayerNormalization(x, gain)", 20 * numbers(3, 8, seed=1)),
    "CumSum": ("a = Constant <value_int = 1> ()\n y = CumSum(x, a)", numbers(2, 500)),
    "BatchNormalization": ("y = BatchNormalization(x, scale, bias, mean, var)", 300 * numbers(2, 2, 3, 3)),
}  # fmt: skip
CONSTANTS = {
    "zero": np.zeros(1), "scale": np.array([1, 0.5]), "bias": np.array([0.25, 0]), "gain": np.full(8, 0.5),
    "mean": np.array([10.0, -20]), "var": np.array([40000.0, 60000]),
}  # fmt: skip
OPSETS = {"GroupNormalization": 21, "RMSNormalization": 23, "ReduceMean, axes": 18}


def typed(name, number, dtype):
    """A model of a case in a float type, whose loss weighs the results; its inputs, rounded to that type."""
    body, x = CASES[name]
    sizes = ", ".join(f"n{axis}" if axis != 1 or "Norm" not in name else str(x.shape[1]) for axis in range(x.ndim))
    constants = {key: value.astype(np.float32) for key, value in CONSTANTS.items() if key in body}
    model = build(f"g (float[{sizes}] x) => (float[] y) {{ {body} }}", OPSETS.get(name, 17), constants)
    return in_float64(model, number), x.astype(dtype)


def takes(name, number):
    """Whether ONNX gives the operator this type."""
    model, _ = typed(name, number, np.float32)
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in CASES for kind in KINDS if takes(name, KINDS[kind][0])]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_halves_are_those_of_float64(name, kind):
    number, dtype = KINDS[kind]
    model, x = typed(name, number, dtype)
    found = _gradient(model, x)
    wide, _ = typed(name, TensorProto.DOUBLE, np.float64)
    for tensor in wide.graph.initializer:  # the numbers that the halves are
        rounded = numpy_helper.to_array(tensor).astype(dtype).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    expected = _gradient(wide, x.astype(np.float64))
    assert found.dtype == dtype
    # One rounding of the result, one of dy, and those of y where a rule reads it: four units in the last place.
    unit = float(ml_dtypes.finfo(dtype).eps)
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    bound = 4 * unit * np.maximum(np.abs(expected), np.abs(expected).max() * unit) + 2 * least
    # Where a gradient is a difference of nearly equal numbers, its largest element stands in for them.
    cancelled = np.abs(expected).max() if "Normalization" in name or name == "LRN" else 0
    assert (np.abs(found.astype(np.float64) - expected) <= bound + 4 * unit * cancelled).all()
    assert (found != 0).any() == (expected != 0).any()


def _gradient(model, x):
    """The gradient of the sum of all results; of a normalization, each times a number of its own."""
    kind = model.graph.input[0].type.tensor_type.elem_type
    normalizes = "Norm" in model.graph.node[-1].op_type or model.graph.node[-1].op_type == "LRN"
    factor = np.round(8 * numbers(*x.shape)) / 8 if normalizes else np.array(0.75)  # which halves hold
    model.graph.node.append(helper.make_node("Mul", ["y", "factor"], ["weighted"]))
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    model.graph.initializer.append(numpy_helper.from_array(factor.astype(dtype), "factor"))
    return run(gradients(model, "weighted", "x", plain=True), {"x": x})[-1]


def test_onnxruntime_finds_the_same():
    """It computes in float32 between casts of its own, which hid what other runtimes found."""
    model, x = typed("ReduceMean, all", TensorProto.FLOAT16, np.float16)
    graph = gradients(model, "y", "x", plain=True)
    found = computed(graph, {"x": x})[-1]
    np.testing.assert_allclose(found.astype(np.float64), 1 / LONG, rtol=5e-3)
    assert (found == run(graph, {"x": x})[-1]).all()


def both(text, feeds, constants):
    """The last result of the plain gradient with respect to x, in float16 and in float64."""
    found = []
    for kind, dtype in (("float16", np.float16), ("double", np.float64)):
        wide = np.promote_types(dtype, np.float32)
        held = {key: each.astype(wide if key in ("mean", "var") else dtype) for key, each in constants.items()}
        model = build(text.replace("half", kind), constants=held)
        given = {name: each.astype(dtype) if each.dtype.kind == "f" else each for name, each in feeds.items()}
        found.append(run(gradients(model, "y", "x", plain=True), given)[-1].astype(np.float64))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_loss_over_more_labels_than_float16_counts(weighted):
    feeds = {"x": ties(LONG, 3), "labels": np.arange(LONG) % 3}
    weight = {"w": np.array([1.0, 2, 4])} if weighted else {}
    call = f"SoftmaxCrossEntropyLoss (x, labels{', w' * weighted})"
    text = f"g (half[N, 3] x, int64[N] labels) => (half[] y) {{ y = {call} }}"
    found, expected = both(text, feeds, weight)
    assert np.abs(expected).max() > 1e-6
    # The results are below 2**-14, where float16 has steps of 2**-24; probabilities come from a rounded logarithm.
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=2**-24)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_statistics_of_a_batch_that_float16_cannot_square():
    body = "b = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)\n y = Mul(b, factor)"
    x = 400 * numbers(4, 2, 40)
    constants = {**CONSTANTS, "factor": np.round(8 * numbers(4, 2, 40)) / 8}
    constants = {name: constants[name] for name in ("scale", "bias", "mean", "var", "factor")}
    constants["var"] = np.ones(2)
    found, expected = both(f"g (half[4, 2, 40] x) => (half[] y) {{ {body} }}", {"x": x.astype(np.float16)}, constants)
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=2**-8 * np.abs(expected).max())


# --- sampling ---

PAIRS = [("float16", np.float16, "float"), ("float16", np.float16, "float16"), ("float", np.float32, "float16")]


@pytest.mark.parametrize(("kind", "dtype", "of_grid"), PAIRS)
def test_images_and_grids_of_halves(kind, dtype, of_grid):
    body = 'g ({0}[1, 1, 8, H] x, {1}[1, 2, 3, 2] grid) => ({0}[] y) {{ y = GridSample <mode = "linear"> (x, grid) }}'
    width = 2050  # more than float16 counts
    x = np.zeros((1, 1, 8, width), dtype)
    grid = np.array([[-0.5, 0.5], [0.25, -0.25], [0, 0], [0.125, 0.5], [-1, -1], [1, 1]]).reshape(1, 2, 3, 2)
    grid = grid.astype(np.float16 if of_grid == "float16" else np.float32)
    found = []
    for kinds, arrays in (((kind, of_grid), (x, grid)), (("double", "double"), (np.float64(x), np.float64(grid)))):
        graph = gradients(build(body.format(*kinds), 20), "y", ["x", "grid"], plain=True)
        found.append(computed(graph, dict(zip(["x", "grid"], arrays, strict=True)))[1])
    np.testing.assert_allclose(found[0].astype(np.float64), found[1], atol=2e-3)
    assert found[0].astype(np.float64).sum() == pytest.approx(found[1].sum(), rel=1e-3)


def test_places_beyond_2_to_the_24():
    """In float32 the places of such a picture would meet; their gradient came to wrong elements."""
    height, width = 3, 2**23 + 3
    body = "y = GridSample <align_corners = 1> (x, grid)"
    model = build(f"g (float[1, 1, H, W] x, float[1, 1, 3, 2] grid) => (float[] y) {{ {body} }}", 16)
    grid = np.array([[[[-1, 1], [0, 1], [1, 1]]]], np.float32)  # the last row: its first, middle and last element
    feeds = {"x": np.zeros((1, 1, height, width), np.float32), "grid": grid}
    dx = computed(gradients(model, "y", "x"), feeds, plain=False)[1].reshape(height, width)
    assert np.argwhere(dx).tolist() == [[2, 0], [2, width // 2], [2, width - 1]]
