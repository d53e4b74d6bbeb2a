"""Elements and slices picked by index and by range, and their gradients, beyond what every graph operator is held to.

Facts of the original operators (onnxruntime-training 1.19.2) stand beside the calls that gave them.
"""

import numpy as np
import pytest
from graph_cases import call, check_close

import opgrad
from opgrad.cli.examples import expected
from opgrad.contract import DTYPES, INTEGERS
from opgrad.ops import graph_operators

OPERATORS = graph_operators()


def check(name, **arguments):
    op = OPERATORS[name]
    terms = max([1, *(arguments[each].size for each in ("indices",) if each in arguments)])
    check_close(call(op, arguments), expected(op, arguments), terms)
    return getattr(opgrad, name)(**arguments)


# --- the original's results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", INTEGERS)
def test_facts_of_gather_elements_grad(integer):
    dy = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    along_1 = opgrad.gather_elements_grad(dy, (3, 4), np.array([[0, -1, 2], [1, 1, 3]], integer), 1)
    assert along_1.tolist() == [[1, 0, 3, 2], [0, 9, 0, 6], [0, 0, 0, 0]]
    along_0 = opgrad.gather_elements_grad(dy, (3, 4), np.array([[0, -1, 2], [0, 1, 2]], integer))
    assert along_0.tolist() == [[5, 0, 0, 0], [0, 5, 0, 0], [0, 2, 9, 0]]
    longer = opgrad.gather_elements_grad(dy.reshape(1, 6), (1, 4), np.array([[0, -1, 2, 3, 0, 0]], integer), -1)
    assert longer.tolist() == [[12, 0, 3, 6]]


def test_facts_of_gather_nd_grad():
    dy = np.arange(1, 9, dtype=np.float32)
    pairs = opgrad.gather_nd_grad((2, 3, 2), np.array([[0, -1], [1, 2], [1, 2]]), dy[:6].reshape(3, 2))
    assert pairs.tolist() == [[[0, 0], [0, 0], [1, 2]], [[0, 0], [0, 0], [8, 10]]]
    indices = np.array([[[-1], [0]], [[1], [1]]])
    batched = opgrad.gather_nd_grad((2, 3, 2), indices, dy.reshape(2, 2, 2), batch_dims=1)
    assert batched.tolist() == [[[3, 4], [0, 0], [1, 2]], [[0, 0], [12, 14], [0, 0]]]


def test_facts_of_slice_grad():
    dy = np.arange(1, 11, dtype=np.float32).reshape(2, 5)
    dx = opgrad.slice_grad(dy, (4, 5), (1,), (-1,))
    assert dx.tolist() == [[0, 0, 0, 0, 0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0, 0, 0, 0, 0]]
    assert opgrad.slice_grad(dy[:0], (4, 5), (3,), (1,)).tolist() == [[0] * 5] * 4


# --- the references are the gradients ------------------------------------------------------------------------------


def test_the_gradient_of_a_slice_undoes_it(rng):
    for arguments in ({"starts": (1, -1), "ends": (3, -9), "steps": (1, -2)}, {"starts": (2,), "ends": (9,)}):
        taken = tuple(map(slice, arguments["starts"], arguments["ends"], arguments.get("steps", (None,))))
        dy = rng.normal(size=np.empty((4, 5))[taken].shape)
        dx = OPERATORS["slice_grad"].reference(dy, (4, 5), **arguments)
        np.testing.assert_array_equal(dx[taken], dy)
        assert np.count_nonzero(dx) == dy.size


def test_forward_functions_are_numpys(rng):
    x = rng.normal(size=(4, 6, 5)).astype(np.float32)
    indices = rng.integers(-6, 6, (4, 9, 5))
    np.testing.assert_array_equal(opgrad.gather_elements(x, indices, 1), np.take_along_axis(x, indices, 1))
    rows, columns = rng.integers(-4, 4, 8), rng.integers(-6, 6, 8)
    np.testing.assert_array_equal(opgrad.gather_nd(x, np.stack([rows, columns], -1)), x[rows, columns])


# --- sums: many parts, one place for all, special values -----------------------------------------------------------

# dy's shape, x's shape, axis
LARGE = [
    ((300, 700), (300, 3000), 1),
    ((700, 2000), (40, 2000), 0),
    ((3, 90000), (3, 50), 1),
    ((400000,), (1000,), 0),
    ((100000,), (3000000,), 0),
    ((8, 600, 40), (8, 30, 50), 1),
]


@pytest.mark.parametrize(("given", "shape", "axis"), LARGE)
def test_large_gather_elements_grad_in_any_number_of_threads(given, shape, axis, rng, threads):
    dy = rng.normal(size=given).astype(np.float32)
    indices = rng.integers(-shape[axis], shape[axis], given)
    threads(lambda: check("gather_elements_grad", dy=dy, shape=shape, indices=indices, axis=axis), (1, 3))


@pytest.mark.parametrize(("shape", "count"), [((50, 40, 33), 20000), ((2000, 3000), 30000), ((1 << 23, 2), 300)])
@pytest.mark.one_case
def test_large_gather_nd_grad_in_any_number_of_threads(shape, count, rng, threads):
    indices = np.stack([rng.integers(-size, size, count) for size in shape[:2]], -1)
    dy = rng.normal(size=(count, *shape[2:])).astype(np.float32)
    threads(lambda: check("gather_nd_grad", shape=shape, indices=indices, dy=dy), (1, 3))


@pytest.mark.parametrize("shape", [(3_000_001,), (3000, 1001), (50, 3, 20011)])
@pytest.mark.parametrize("step", [1, 3, -2])
def test_large_slice_grad(shape, step, rng):
    start, end = (1, -3) if step > 0 else (-3, 1)
    arguments = {"starts": (start,) * len(shape), "ends": (end,) * len(shape), "steps": (step,) * len(shape)}
    dy = rng.normal(size=np.empty(shape, "i1")[(slice(start, end, step),) * len(shape)].shape).astype(np.float32)
    check("slice_grad", dy=dy, shape=shape, **arguments)


@pytest.mark.parametrize("shape", [(7, 50), (9000, 50)])
def test_all_to_one_element_errs_little(shape, dtype):
    """A plain sum of so many numbers stops growing in half precision, and errs by thousands of ulp in float32."""
    count, value = 60000, np.asarray(1 / 192, DTYPES[dtype])
    exact = np.zeros(shape)
    exact[3] = count * value.astype(np.float64)
    indices = np.full((count, shape[1]), 3)
    dx = opgrad.gather_elements_grad(np.full(indices.shape, value), shape, indices)
    check_close([dx], [exact], 1)
    for size in (shape[0], 400000):
        exact = np.zeros(size)
        exact[3] = count * value.astype(np.float64)
        dx = opgrad.gather_nd_grad((size,), indices[:, :1], np.full(count, value))
        check_close([dx], [exact], count)


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("size", [4, 3000])
def test_infinities_and_nan_stay_where_they_belong(count, size, dtype):
    dy = np.ones((2, count, 2), DTYPES[dtype])
    dy[0, 0], dy[0, 1], dy[1, 0], dy[1, 1] = np.inf, -np.inf, -np.inf, np.nan
    indices = np.zeros(dy.shape, np.int64)
    indices[0, 1] = 1
    dx = opgrad.gather_elements_grad(dy, (2, size, 2), indices, 1).astype(np.float64)
    assert (dx[0, 0] == np.inf).all()
    assert (dx[0, 1] == -np.inf).all()
    assert np.isnan(dx[1, 0]).all()
    assert not dx[:, 2:].any()


def test_denormals_are_kept():
    tiny = np.finfo(np.float32).smallest_subnormal
    dy = np.full((1, 100), tiny)
    assert opgrad.gather_elements_grad(dy, (1, 2), np.zeros((1, 100), np.int64), 1)[0, 0] == 100 * tiny
    assert opgrad.slice_grad(dy, (2, 100), (1,), (2,))[1, 7] == tiny


# --- errors --------------------------------------------------------------------------------------------------------

ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize("wrong", [4, -5])
def test_wrong_indices_are_named_before_anything_is_written(wrong, integer):
    indices = np.zeros((2, 3), integer)
    indices[1, 1] = wrong
    indices[1, 2] = 99
    along, named = np.full((2, 4), 7, np.float32), np.full((2, 3), 7, np.float32)
    message = rf"indices\[1, 1\] is {wrong}, expected -4 to 3$"
    with pytest.raises(ValueError, match=f"^gather_elements: {message}"):
        opgrad.gather_elements(along, indices, 1, out=named)
    with pytest.raises(ValueError, match=f"^gather_elements_grad: {message}"):
        opgrad.gather_elements_grad(ONES, (2, 4), indices, 1, out=along)
    assert (along == 7).all()
    assert (named == 7).all()


@pytest.mark.parametrize("count", [3, 30000])
@pytest.mark.parametrize("size", [4, 400000])
def test_wrong_tuples_are_named_before_anything_is_written(count, size):
    shape = (5, size)
    indices = np.zeros((count, 2), np.int64)
    indices[-2:, 1] = size
    dx, y = np.full(shape, 7, np.float32), np.full(count, 7, np.float32)
    message = rf"indices\[{count - 2}, 1\] is {size}, expected -{size} to {size - 1}$"
    with pytest.raises(ValueError, match=f"^gather_nd: {message}"):
        opgrad.gather_nd(dx, indices, out=y)
    with pytest.raises(ValueError, match=f"^gather_nd_grad: {message}"):
        opgrad.gather_nd_grad(shape, indices, np.ones(count, np.float32), out=dx)
    assert (dx == 7).all()
    assert (y == 7).all()
