"""What the design defines where the original kernels differ, fail or crash."""

import numpy as np
import pytest
from accuracy import check
from element_cases import optional_calls
from samples import bits, call, cast, for_operators, losses_and_gradients, positive_zeros, sample

import opgrad
from opgrad.contract import DTYPES
from opgrad.ops import operators

CLASSES = for_operators(lambda op: op.kind == "classes")
REDUCTIONS = ("none", "mean", "sum")


# --- empty arrays ----------------------------------------------------------------------------------------------


@CLASSES
@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0), (0, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_empty_labels(op, shape, reduction, dtype, rng):
    loss, gradient = losses_and_gradients(op, check(op, sample(op, shape, dtype, rng, reduction=reduction)))
    assert gradient is None or gradient.shape == shape
    if loss is not None:
        assert loss.shape == ((*shape[:1], *shape[2:]) if reduction == "none" else ())
        assert positive_zeros(loss)


@CLASSES
def test_no_classes(op, rng):
    """Without classes every label must be ignored."""
    arguments = sample(op, (2, 0), "float32", rng, ignore_index=5)
    arguments["labels"][...] = 5
    loss, gradient = losses_and_gradients(op, call(op, arguments))
    assert loss is None or float(loss) == 0
    assert gradient is None or gradient.shape == (2, 0)
    with pytest.raises(ValueError, match=r"labels\[0\] is 5, expected "):
        call(op, arguments | {"ignore_index": 4})


def test_empty_gathers(dtype, rng):
    gather, gradient = operators()["gather"], operators()["gather_grad"]
    for shape, axis in [((0, 3), 0), ((3, 0), 0), ((3, 0), 1), ((0,), 0), ((4, 3), 1)]:
        for indices in [(0,), (2, 0)]:
            check(gather, sample(gather, shape, dtype, rng, axis=axis, indices=indices))
            (dx,) = check(gradient, sample(gradient, shape, dtype, rng, axis=axis, indices=indices))
            assert positive_zeros(dx)


# --- softmax family --------------------------------------------------------------------------------------------


def test_axis_of_the_old_operators(dtype, rng):
    """SoftmaxGrad(axis=k) of opset < 13 reduces all axes from k on."""
    for name in ("softmax_grad", "log_softmax_grad"):
        op = operators()[name]
        arguments = sample(op, (2, 3, 4, 5), dtype, rng, axis=(1, 2, 3))
        flat = {key: arguments[key].reshape(2, 60) for key in ("dy", "y")}
        assert bits(check(op, arguments)[0]) == bits(call(op, flat)[0])
        whole = sample(op, (2, 3, 4), dtype, rng, axis=(0, 1, 2))
        check(op, whole)


def test_gradients_take_any_y(dtype, rng):
    """The saved output is used as it is, distribution or not."""
    for name in ("softmax_grad", "log_softmax_grad", "sigmoid_grad", "tanh_grad"):
        check(operators()[name], {key: cast(rng.uniform(-1.5, 1.5, (5, 33)), dtype) for key in ("dy", "y")})


# --- gather ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax_grad", "log_softmax_grad"])
def test_a_rows_gradient_has_the_same_bits_alone(name, rng):
    """Threads share the blocks of a single row, and add up the blocks' sums as one thread does among many rows."""
    function = getattr(opgrad, name)
    dy, x = rng.normal(size=(2, 8, 150_001)).astype(np.float32)
    y = getattr(opgrad, name.removesuffix("_grad"))(x)
    together = function(dy, y)
    for row in range(3):
        assert function(dy[row], y[row]).tobytes() == together[row].tobytes()


def test_negative_and_positive_names_of_a_row_add_up(dtype):
    indices = np.array([1, -3, 1, -1, 3, -3, -4, 0])
    dx = opgrad.gather_grad((4, 2), indices, cast(np.ones((8, 2)), dtype))
    assert dx[:, 0].tolist() == [2, 4, 0, 2]


@pytest.mark.parametrize("count", [31, 32, 33, 1000, 5000])
def test_equal_indices_are_summed_before_rounding(count, dtype, rng):
    op = operators()["gather_grad"]
    arguments = {"shape": (3, 7), "indices": np.full(count, 1), "dy": cast(rng.uniform(0.5, 1, (count, 7)), dtype)}
    check(op, arguments)


@pytest.mark.parametrize("columns", [1, 7, 8, 65, 4097])
@pytest.mark.parametrize("names", [1, 3])
def test_few_indices_are_summed_in_pieces(names, columns, dtype, rng):
    """Around the limits of pieces, in addends and columns, for one and for two indices before the axis."""
    op = operators()["gather_grad"]
    for count in (255, 511, 512, 1025) if columns < 4096 else (600,):
        indices = rng.integers(0, names, count)
        check(op, {"shape": (4, columns), "indices": indices, "dy": cast(rng.uniform(0.5, 1, (count, columns)), dtype)})
    dy = cast(rng.uniform(0.5, 1, (2, 600, columns)), dtype)
    check(op, {"shape": (2, 4, columns), "indices": rng.integers(0, names, 600), "dy": dy, "axis": 1})


def test_scalar_indices(dtype, rng):
    for name in ("gather", "gather_grad"):
        for axis in (0, 1, 2, -1):
            op = operators()[name]
            check(op, sample(op, (4, 5, 6), dtype, rng, indices=(), axis=axis), f"axis {axis}")


def test_index_arrays_of_many_shapes(dtype, rng):
    for name in ("gather", "gather_grad"):
        op = operators()[name]
        for integer in ("int32", "int64"):
            for shape, axis, indices in [
                ((50, 33), 0, (7, 9)), ((50, 33), 1, (7, 9)), ((5, 6, 7), 1, (200,)), ((1000, 1), 0, (3000,)),
                ((3,), 0, (100,)), ((2000, 64), 0, (500,)), ((2, 3, 129), -2, (4, 5)), ((100000, 2), 0, (50,)),
            ]:  # fmt: skip
                arguments = sample(op, shape, dtype, rng, axis=axis, indices=indices, integer=integer)
                check(op, arguments, f"{shape}, axis {axis}, {indices}")


def test_gather_copies_bits(dtype):
    kind = DTYPES[dtype]
    odd = np.frombuffer(bytes(range(1, 1 + 16 * kind.itemsize)), kind).reshape(8, 2)
    special = np.concatenate([odd, cast([[np.nan, -0.0], [np.inf, -np.inf]], dtype)])
    indices = np.array([9, 0, 3, 8, -1])
    assert bits(opgrad.gather(special, indices)) == bits(special[indices])


def test_shape_may_be_an_array(rng):
    dy = rng.normal(size=(2, 3)).astype("float32")
    expected = bits(opgrad.gather_grad((4, 3), np.array([0, 1]), dy))
    for shape in (np.array([4, 3]), np.array([4, 3], np.int32), [4, 3]):
        assert bits(opgrad.gather_grad(shape, np.array([0, 1]), dy)) == expected


# --- activations -----------------------------------------------------------------------------------------------


def test_negative_tails_are_kept(dtype):
    """No flush to 0 below alpha * x = -18, and half precision keeps what it can hold."""
    x = cast(np.linspace(-60, -4, 113), dtype)
    check(operators()["quick_gelu"], {"x": x})
    check(operators()["quick_gelu_grad"], {"dy": cast(np.ones(113), dtype), "x": x})
    if dtype in ("float32", "float64"):
        assert (opgrad.quick_gelu(x) < 0).all()


def test_leaky_relu_grad_at_and_below_0(dtype):
    y, dy = cast([-1.0, -0.0, 0.0, 1.0, np.nan], dtype), cast(np.full(5, 2.0), dtype)
    assert opgrad.leaky_relu_grad(dy, y, alpha=0.5).tolist() == [1, 1, 1, 2, 1]
    assert opgrad.leaky_relu_grad(dy, y, alpha=-0.5).tolist() == [-1, -1, -1, 2, -1]


def test_relu_grad_is_0_at_0_and_nan(dtype):
    x, dy = cast([-1.0, -0.0, 0.0, 1.0, np.nan], dtype), cast([np.nan, np.inf, 1, 2, 3], dtype)
    assert opgrad.relu_grad(dy, x).tolist() == [0, 0, 0, 2, 0]


def test_options_of_elements(dtype, rng):
    for op, arguments, note in optional_calls(dtype, rng):
        check(op, arguments, note)
