"""The gradients of pooling: the references against their forwards, what the attributes mean, errors, large sizes."""

import math

import ml_dtypes
import numpy as np
import pytest
from graph_cases import call, check_close
from onnx.reference.ops.op_average_pool import AveragePool_19
from onnx.reference.ops.op_max_pool import MaxPool

import opgrad
from bench.cells import large_cases
from opgrad.cli.examples import examples
from opgrad.cli.examples import expected as expected_of
from opgrad.cli.examples.arrays import average_pool_grad as averages
from opgrad.ops import graph_operators
from opgrad.ops.reference.windows import axes

MAX, AVERAGE = (graph_operators()[name] for name in ("max_pool_grad", "average_pool_grad"))


@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 3, 9), {"kernel_shape": (4,), "strides": (3,), "pads": (1, 2), "dilations": (1,)}),
        ((1, 2, 7, 8), {"kernel_shape": (3, 2), "strides": (2, 1), "pads": (1, 0, 2, 1), "dilations": (1, 2)}),
        ((1, 1, 4, 5, 4), {"kernel_shape": (2, 3, 2), "strides": (1, 2, 3), "pads": (1,) * 6, "dilations": (2, 1, 1)}),
    ],
)
def test_average_reference_is_the_forwards_derivative(shape, attributes, count_include_pad):
    rng = np.random.default_rng(1)
    x, direction = rng.normal(size=shape), rng.normal(size=shape)
    attributes["count_include_pad"] = count_include_pad
    y = AveragePool_19.eval(x, **attributes)
    dy = rng.normal(size=y.shape)
    dx = AVERAGE.reference(dy, shape, **attributes)
    change = AveragePool_19.eval(direction, **attributes)  # pooling is linear
    assert math.isclose((dx * direction).sum(), (dy * change).sum(), rel_tol=1e-12)


def test_max_reference_is_the_forwards_derivative():
    dy, x, direction = (np.random.default_rng(2).normal(size=(2, 3, *size)) for size in ((4, 3), (8, 6), (8, 6)))
    y, indices = MaxPool.eval(x, n_outputs=2, kernel_shape=(2, 2), strides=(2, 2))
    dx = MAX.reference(dy, indices, x.shape)
    step = 1e-7
    moved = MaxPool.eval(x + step * direction, n_outputs=1, kernel_shape=(2, 2), strides=(2, 2))
    slope = (dy * (moved - y)).sum() / step
    assert math.isclose((dx * direction).sum(), slope, rel_tol=1e-6)


def test_columns_first():
    dy, indices = np.array([[[[1.0, 2], [3, 4]]]]), np.array([[[[5, 13], [7, 15]]]])  # MaxPool's with storage_order 1
    dx = opgrad.max_pool_grad(dy, indices, (1, 1, 4, 4), storage_order=1)
    expected = np.zeros((4, 4))
    expected[1, 1], expected[1, 3], expected[3, 1], expected[3, 3] = 1, 2, 3, 4
    np.testing.assert_array_equal(dx[0, 0], expected)


def test_padding_beyond_the_last_window_does_not_count():
    shape, dy = (1, 1, 5), np.ones((1, 1, 3))
    attributes = {"kernel_shape": (3,), "strides": (2,), "pads": (1, 0), "ceil_mode": True}
    dx = opgrad.average_pool_grad(dy, shape, count_include_pad=True, **attributes)
    np.testing.assert_allclose(dx[0, 0], [1 / 3, 1 / 3 + 1 / 3, 1 / 3, 1 / 3 + 1 / 2, 1 / 2])
    dx = opgrad.average_pool_grad(dy, shape, **attributes)
    np.testing.assert_allclose(dx[0, 0], [1 / 2, 1 / 2 + 1 / 3, 1 / 3, 1 / 3 + 1 / 2, 1 / 2])


def test_numbers_that_are_not_finite_stay_in_their_windows(dtype):
    dy = np.array([[[1, np.inf, 2, np.nan, -np.inf]]]).astype(getattr(ml_dtypes, dtype, dtype))
    dx = opgrad.average_pool_grad(dy, (1, 1, 9), (1,), strides=(2,)).astype("float64")
    np.testing.assert_array_equal(dx[0, 0], [1, 0, np.inf, 0, 2, 0, np.nan, 0, -np.inf])
    dx = opgrad.max_pool_grad(dy, np.array([[[0, 3, 1, 5, 7]]]), (1, 1, 9)).astype("float64")
    np.testing.assert_array_equal(dx[0, 0], [1, 2, 0, np.inf, 0, np.nan, 0, -np.inf, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large(dtype, threads):
    for op in (MAX, AVERAGE):
        (example,) = examples(op, dtype, cases=large_cases(op.name))
        small = {**example.arguments}
        count = {"max_pool_grad": 3, "average_pool_grad": 6}[op.name]
        small["dy"], small["shape"] = small["dy"][:count], (count, *small["shape"][1:])
        if "indices" in small:
            small["indices"] = small["indices"][:count]
        found = threads(lambda op=op, small=small: call(op, small))
        check_close(found, expected_of(op, small), example.terms)


def test_wide_rows_and_large_windows():
    rng = np.random.default_rng(5)
    for shape, kernel_shape in (((1, 1, 100_000), (1000,)), ((2, 2, 300, 5), (290, 5)), ((1, 1, 1, 40_000), (1, 7))):
        along = axes("", shape[2:], kernel_shape, (), (), (), "NOTSET")
        dy = rng.normal(size=(*shape[:2], *(axis.count for axis in along))).astype("float32")
        given = {"dy": dy, "shape": shape, "kernel_shape": kernel_shape}
        before = np.concatenate([np.zeros((*dy.shape[:-1], 1)), np.cumsum(dy.astype("float64"), -1)], -1)
        if dy.shape[-1] > 1 and math.prod(kernel_shape[:-1]) == 1:
            i = np.arange(shape[-1])
            high, low = np.minimum(i + 1, dy.shape[-1]), np.maximum(i - kernel_shape[-1] + 1, 0)
            expected = (before[..., high] - before[..., low]) / kernel_shape[-1]
        else:
            expected = expected_of(AVERAGE, given)[0]
        check_close(call(AVERAGE, given), [expected], math.prod(kernel_shape))


def test_wrong_indices_are_named_before_anything_is_written():
    dy, indices = np.ones((2, 2, 2, 2), "float32"), np.arange(4).reshape(2, 2, 1, 1) * 9 + np.zeros((2, 2), np.int64)
    out = np.full((2, 2, 3, 3), 7, "float32")
    for value, place in (
        (9, (0, 0, 1, 1)),
        (-1, (0, 0, 0, 0)),
        (8, (0, 1, 0, 1)),
        (36, (1, 1, 1, 0)),
        (-(2**63), (1, 0, 0, 0)),
    ):
        wrong = indices.copy()
        wrong[place] = value
        first = 9 * (2 * place[0] + place[1])
        message = (
            rf"^max_pool_grad: indices\[{', '.join(map(str, place))}\] is {value}, expected {first} to {first + 8}"
        )
        with pytest.raises(ValueError, match=message):
            opgrad.max_pool_grad(dy, wrong, (2, 2, 3, 3), out=out)
        assert (out == 7).all()


def test_examples_cover_every_attribute():
    found = [example.arguments for example in averages(np.random.default_rng(0))]
    for name in AVERAGE.attributes:
        assert len({str(each.get(name)) for each in found}) > 1, name
