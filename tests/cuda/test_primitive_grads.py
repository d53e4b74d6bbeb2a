"""The gradients of softmax in their general form on CUDA, against the reference."""

import functools
import itertools

import numpy as np
import pytest
from post_op_cases import ELTWISE, made, operand_of
from primitive_attributes import AXES, some_where
from primitive_cases import Placed, check_gradient, laid_out, numbers
from samples import bits, cast

pytest.importorskip("triton", reason="needs Triton")

from cuda_backend import EVERYTHING, FROM_PTX, ON_GPU, WAYS, call_kernels, gradients, lower_limits, some

import opgrad
from opgrad.ops import operators
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import GRADIENT_TYPES

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    call_kernels(monkeypatch)


@pytest.fixture
def lowered(monkeypatch):
    yield from lower_limits(monkeypatch)


def outputs(rng, name, shape, axis, dtype):
    """What the forward operator leaves."""
    return cast(operators()[name.removesuffix("_grad")].reference(rng.normal(size=shape), axis), dtype)


@gradients
def test_gradients_of_every_dtype(name, rng):
    for dtype, of_y in some(itertools.product(GRADIENT_TYPES, GRADIENT_TYPES), name, 2):
        shape, axis = AXES[rng.integers(len(AXES))]
        given = {"out_dtype": GRADIENT_TYPES[rng.integers(6)], "note": f"{dtype}, {of_y}, {shape}"}
        check_gradient(name, numbers(rng, shape, dtype), outputs(rng, name, shape, axis, of_y), axis, **given)


def some_gradient_attributes(rng, shape):
    choices = {
        "where": some_where(rng, shape),
        "logit_scale": float(rng.uniform(-2, 2)),
        "result_scale": float(rng.uniform(-2, 2)),
        "dropout": Dropout(float(rng.uniform(0, 0.9)), int(rng.integers(2**62)), 5),
        "out_scale": float(rng.uniform(0.1, 2)),
    }
    return {key: value for key, value in choices.items() if rng.random() < 0.5}


@gradients
@pytest.mark.parametrize("layout", WAYS, ids=lambda each: each.__name__)
def test_gradients_with_attributes_and_layouts(layout, name, rng):
    for shape, axis in some(AXES, name + layout.__name__, 4):
        other = WAYS[rng.integers(len(WAYS))]
        dy = laid_out(numbers(rng, shape, "float32"), layout)
        y = laid_out(outputs(rng, name, shape, axis, "bfloat16"), other)
        attributes = some_gradient_attributes(rng, shape)
        results = check_gradient(name, dy, y, axis, note=f"{shape}, axis {axis}, {attributes}", **attributes)
        out = check_gradient(name, dy, y, axis, place=functools.partial(Placed, layout=other), **attributes)[0]
        in_place = getattr(opgrad, name)(dy, y, axis, out=dy, **attributes)
        assert in_place is dy
        if not (ON_GPU or FROM_PTX):  # compiled for another layout, a kernel may add in another order
            assert bits(out) == bits(dy) == bits(results[0])


# Where a slope is not defined at 0, or jumps, y is kept clear of it by result_scale.
SLOPED = [op for op in ELTWISE if post_ops.has_gradient(op.name)]


@pytest.mark.parametrize("op", SLOPED, ids=lambda op: f"{op.name} {op.alpha} {op.beta}")
def test_slopes(op, rng):
    for dtype, scale in some(itertools.product(("float32", "float64"), (1.0, -1.0, 7.0, -7.0)), f"{op.alpha}", 4):
        if scale > 0 or (op.name not in ("log", "sqrt") and (op.name != "pow" or op.beta == round(op.beta))):
            y, dy = outputs(rng, "softmax_grad", (3, 19), -1, dtype), numbers(rng, (3, 19), dtype)
            check_gradient("softmax_grad", dy, y, post_ops=[op], result_scale=scale, note=f"{dtype}, {scale}")


def test_gelu_far_from_0():
    """The slopes are 0 and 1 there, where squares and cubes overflow."""
    dy, y = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    far = np.array([[-1e30, 1e30], [-50, 50]], np.float32)
    for op in (post_ops.gelu_tanh(), post_ops.gelu_erf()):
        given = {"post_ops": [post_ops.add(far), op], "post_op_grads": True}
        np.testing.assert_array_equal(opgrad.log_softmax_grad(dy, y, **given)[1], [[0, 1], [0, 1]])


@gradients
@pytest.mark.parametrize("op", post_ops.BINARY_SLOPES)
def test_gradients_of_operands(op, name, rng):
    """Of every shape that broadcasts, summed to it; of floating-point operands alone."""
    shape = (2, 3, 9)
    patterns = [shape, (1, 3, 9), (2, 1, 9), (2, 3, 1), (3, 9), (9,), (1,), ()]
    for number, pattern in some(enumerate(patterns), name + op, 3):
        dtype = ("float32", "bfloat16", "float64", "float8_e5m2")[number % 4]
        y, dy = outputs(rng, name, shape, -1, "float32"), numbers(rng, shape, "float32")
        chain = [made(op, operand_of(rng, pattern, dtype), rng), post_ops.add(np.ones(9, np.int8)), post_ops.tanh()]
        results = check_gradient(name, dy, y, post_ops=chain, post_op_grads=True, note=f"{pattern}, {dtype}")
        assert [(each.shape, each.dtype.name) for each in results[1:]] == [(pattern, dtype)]


@gradients
def test_gradients_of_long_rows(name, rng, lowered):
    cases = itertools.product([((2, 67), 1), ((2, 64), 1), ((20, 3), 0)], ("float32", "float64"))
    for (shape, axis), dtype in some(cases, name, 3):
        y, dy = outputs(rng, name, shape, axis, dtype), numbers(rng, shape, dtype)
        chain = [
            post_ops.mul(numbers(rng, shape[1:], "float32")),
            post_ops.swish(),
            post_ops.add(numbers(rng, shape, "float32")),
        ]
        given = {"post_ops": chain, "post_op_grads": True, "dropout": Dropout(0.3, 5), "where": some_where(rng, shape)}
        check_gradient(name, dy, y, axis, note=f"{shape}", **given)


@gradients
def test_gradients_through_long_chains(name, rng):
    for _ in range(3 if EVERYTHING else 1):
        ops = [SLOPED[i] for i in rng.permutation(len(SLOPED)) if SLOPED[i].name not in ("log", "sqrt", "pow", "exp")]
        chain = [each for op in ops[:10] for each in (op, post_ops.mul(numbers(rng, (33,), "float32", 1.0)))]
        y, dy = outputs(rng, name, (3, 33), -1, "float64"), numbers(rng, (3, 33), "float64")
        check_gradient(name, dy, y, post_ops=chain, post_op_grads=True, note=f"{[op.name for op in ops[:10]]}")


@gradients
def test_gradients_of_special_numbers(name, rng):
    """A NaN or an infinity in dy makes NaN of its row alone; y of what was left out counts for nothing."""
    y, dy = outputs(rng, name, (9, 9), -1, "float32"), numbers(rng, (9, 9), "float32")
    dy[2, 3], dy[4, 4] = np.nan, np.inf
    results = getattr(opgrad, name)(dy, y, logit_scale=0.5)
    with np.errstate(all="ignore"):
        exact = operators()[name].reference(dy.astype("f8"), y.astype("f8"), logit_scale=0.5)
    np.testing.assert_allclose(results, exact, 1e-5, 1e-6)
    y[5, 5] = 0.0 if name == "softmax_grad" else -np.inf
    assert np.isfinite(getattr(opgrad, name)(np.nan_to_num(dy, posinf=0), y, where=np.arange(9) != 5)).all()


@gradients
def test_gradients_of_empty_arrays(name):
    for shape in [(0, 3), (3, 0), (2, 0, 4)]:
        x = np.zeros(shape, np.float32)
        assert getattr(opgrad, name)(x, x, logit_scale=0.5, dropout=Dropout(0.5)).shape == shape
