"""Arrays as they come: any strides, any rank, any alignment, read-only; never another result."""

import numpy as np
import pytest
from accuracy import assert_close, check
from relayouts import OTHER_LOOPS, SAME_LOOPS, fortran, relaid, selections
from samples import bits, call, for_operators, sample

import opgrad

SHAPES = [(6, 10), (2, 67, 4), (40, 33)]


@pytest.fixture(params=["float32", "float16"])
def dtype(request):
    """Two item sizes: the other dtypes' layouts follow in test_properties."""
    return request.param


@pytest.mark.parametrize("change", SAME_LOOPS, ids=lambda change: change.__name__)
def test_same_bits_as_contiguous(op, dtype, change, rng):
    for shape in SHAPES:
        arguments = sample(op, shape, dtype, rng, indices=(3, 2))
        expected = [bits(array) for array in call(op, arguments)]
        for names in selections(arguments):
            results = check(op, relaid(arguments, change, names), f"{shape}, {names}")
            assert [bits(array) for array in results] == expected, f"{shape}, {names}"


@pytest.mark.parametrize("change", OTHER_LOOPS, ids=lambda change: change.__name__)
def test_other_memory_orders(op, dtype, change, rng):
    for shape in SHAPES:
        for axis in range(len(shape)) if "axis" in op.attributes else [0]:
            arguments = sample(op, shape, dtype, rng, indices=(3, 2), axis=axis)
            for names in selections(arguments):
                check(op, relaid(arguments, change, names), f"{shape}, axis {axis}, {names}")


def test_broadcast_inputs(op, dtype, rng):
    for shape in [(4, 5), (3, 5, 7)]:
        arguments = sample(op, shape, dtype, rng)
        for axis in range(len(shape)):
            names = [name for name, value in arguments.items() if getattr(value, "shape", ()) == shape]
            one = (slice(None),) * axis + (slice(0, 1),)
            check(op, relaid(arguments, lambda array, o=one: np.broadcast_to(array[o], array.shape), names), f"{shape}")


def test_many_dimensions(op, dtype, rng):
    shape = (1, 3, 2, 1, 2, 1, 3, 1, 2, 1, 2, 2)
    for axis in (1, 6, 11) if "axis" in op.attributes else (1,):
        arguments = sample(op, shape, dtype, rng, axis=axis)
        check(op, arguments, f"axis {axis}")
        check(op, relaid(arguments, fortran, list(arguments)), f"axis {axis}, Fortran order")


@for_operators(lambda op: op.kind == "elements")
def test_memory_order_is_kept(op, rng):
    arguments = sample(op, (6, 7), "float32", rng)
    results = call(op, relaid(arguments, fortran, list(arguments)))
    assert all(result.flags.f_contiguous for result in results)


@pytest.mark.parametrize("change", [*SAME_LOOPS, *OTHER_LOOPS], ids=lambda change: change.__name__)
def test_out_with_strides(op, dtype, change, rng):
    for shape in [(6, 10), (2, 67, 4)]:
        arguments = sample(op, shape, dtype, rng, reduction="none")
        outputs = tuple(change(np.zeros_like(array)) if array.ndim else array for array in call(op, arguments))
        call(op, arguments, out=outputs if len(outputs) > 1 else outputs[0])
        assert_close(op, arguments, outputs, str(shape))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_columns_whose_lines_share_few_sets_of_a_cache(name, dtype, rng):
    """Neither the distance of a column's elements nor the start of memory changes a bit."""
    x = rng.standard_normal((2, 65, 2041)).astype(dtype)
    x[0, 3], x[:, :, 7], x[1, 2, 9] = -np.inf, -np.inf, np.nan
    run = getattr(opgrad, name)
    expected = bits(run(x, axis=1))
    for start in (0, 1):
        near = np.zeros((2, 65, 2048), dtype)[:, :, start : start + 2041]
        near[...] = x
        assert bits(run(near, axis=1)) == expected
        assert bits(run(near, axis=1, out=near)) == expected
