"""Every operator's CUDA kernels, in every dtype, against the float64 reference: sizes, layouts, options.

The interpreter takes milliseconds for a program: shapes are small.
"""

import itertools

import numpy as np
import pytest
from accuracy import assert_close
from guards import Placed
from relayouts import OTHER_LOOPS, SAME_LOOPS, relaid, selections, unaligned
from samples import (
    axis_choices,
    bits,
    cast,
    elements,
    in_place_calls,
    losses_and_gradients,
    packed,
    positive_zeros,
    reference,
    sample,
)

from opgrad.contract import DTYPES, FLOATS

pytest.importorskip("triton", reason="needs Triton")

from cuda_backend import ON_GPU, call, check, for_kernels, has_own_kernels, some

pytestmark = [pytest.mark.gpu] if ON_GPU else []

EVERY = for_kernels()
KERNELS = for_kernels(has_own_kernels)
KERNELS_IN_TWO_DTYPES = for_kernels(has_own_kernels, ["float32", "bfloat16"])
CLASSES = for_kernels(lambda op: op.kind == "classes")


# --- sizes and axes ------------------------------------------------------------------------------------------------

ROWS = [(3, n) for n in (1, 2, 7, 8, 9, 17, 32, 33, 257)] + [(70, 9), (1, 1), (2, 1001)]
SIZES = {
    "elements": [(1,), (7,), (3, 5), (63,), (2, 512), (1025,), (4103,)],
    "rows": ROWS,
    "classes": ROWS,
    "slices": [(3, 1), (5, 7), (9, 16), (40, 33), (130, 3), (2, 1030), (7,)],
}


@EVERY
@pytest.mark.one_in(2)
def test_sizes(op, dtype, rng):
    for shape in SIZES[op.kind]:
        check(op, sample(op, shape, dtype, rng), str(shape))


@EVERY
@pytest.mark.one_in(2)
def test_axes(op, dtype, rng):
    for attributes in axis_choices(op, 3):
        check(op, sample(op, (4, 6, 5), dtype, rng, **attributes), str(attributes))
    attributes = {"axis": 1} if "axis" in op.attributes else {}
    for shape in [(2, 33, 9), (3, 4, 1), (1, 9, 70), (2, 3, 2, 5)]:
        check(op, sample(op, shape, dtype, rng, **attributes), str(shape))
    fewest = {"elements": (), "rows": (7,), "classes": (5, 3), "slices": (7,)}[op.kind]
    check(op, sample(op, fewest, dtype, rng, axis=0, indices=()), str(fewest))


@KERNELS
def test_empty_arrays(op, dtype, rng):
    for shape in [(0, 3), (2, 3, 0), (5, 9, 0), (3, 0, 5), (2, 0, 0)]:
        for reduction in ("none", "mean") if op.kind == "classes" else ("none",):
            arguments = sample(op, shape, dtype, rng, axis=1, reduction=reduction)
            if op.kind != "classes" or shape[1] or not arguments["labels"].size:
                check(op, arguments, f"{shape}, {reduction}")


# --- special values ------------------------------------------------------------------------------------------------


SPECIAL = [np.nan, np.inf, -np.inf, -0.0, "denormal"]


@EVERY
def test_special_values(op, dtype, rng):
    """One special value a row, each row in another place; rows of 19 and columns of 19."""
    smallest = 3 * 2.0**-24 if dtype == "float16" else 3 * float(np.finfo(np.float32).smallest_subnormal)
    values = cast([smallest if value == "denormal" else value for value in SPECIAL], dtype)
    size = 19
    rows = np.arange(size)
    for shape, place in [((size, size), (rows, rows)), ((2, size, 5), (1, rows, rows % 5))]:
        arguments = sample(op, shape, dtype, rng, reduction="none", axis=1)
        for name in elements(op, arguments):
            if arguments[name].shape == shape:
                changed = arguments[name].copy()
                changed[place] = np.resize(values, size)
                check(op, arguments | {name: changed}, f"in {name}, {shape}")


@EVERY
def test_large_values_dominant_entries_and_rows_of_minus_infinity(op, dtype, rng):
    for shape in [(4, 100), (2, 6, 40)]:
        check(op, sample(op, shape, dtype, rng, size=1e4, reduction="none"), str(shape))
    for shape, value in itertools.product([(5, 7), (2, 6, 40)], [80.0, -np.inf] * (op.kind in ("rows", "classes"))):
        arguments = sample(op, shape, dtype, rng, reduction="none", axis=1)
        arguments[elements(op, arguments)[0]][:1, 2 if value == 80.0 else slice(None)] = cast(value, dtype)
        check(op, arguments, f"{shape}, {value}")


# --- layouts -------------------------------------------------------------------------------------------------------


def shifted(array):
    """One element behind an aligned address."""
    wide = np.zeros(array.size + 1, array.dtype)
    wide[1:] = array.ravel()
    return wide[1:].reshape(array.shape)


def repeated(array):
    return np.broadcast_to(array[:, :1], array.shape) if array.ndim > 1 else array


def stretched(array):
    return np.broadcast_to(array[:1], array.shape)


LAYOUTS = [change for change in (*SAME_LOOPS, *OTHER_LOOPS) if change is not unaligned] + [shifted]


@KERNELS_IN_TWO_DTYPES
@pytest.mark.parametrize("change", [*LAYOUTS, repeated, stretched], ids=lambda change: change.__name__)
def test_inputs_with_strides(op, dtype, change, rng):
    for shape in some([(6, 10), (2, 33, 8)], op.name + change.__name__, 2):
        arguments = sample(op, shape, dtype, rng, indices=(3, 2), axis=1)
        if change in (repeated, stretched):
            arguments = {name: value for name, value in arguments.items() if name not in op.optional}
            names = [name for name in elements(op, arguments) if arguments[name].shape == shape]
            check(op, relaid(arguments, change, names), str(shape))
        else:
            for names in selections(arguments):
                check(op, relaid(arguments, change, names), f"{shape}, {names}")


@KERNELS_IN_TWO_DTYPES
@pytest.mark.parametrize("change", LAYOUTS, ids=lambda change: change.__name__)
def test_out_with_strides(op, dtype, change, rng):
    for shape in some([(2, 33, 8), (6, 10)], op.name + change.__name__, 2):
        arguments = sample(op, shape, dtype, rng, reduction="none", axis=1)
        outputs = tuple(change(np.zeros_like(array)) if array.ndim else array for array in call(op, arguments))
        check(op, arguments, str(shape), out=packed(outputs))


@KERNELS
def test_many_dimensions(op, rng):
    """Of arrays that cannot be written."""
    shape = (1, 3, 2, 1, 2, 1, 3, 1, 2, 1, 2, 2)
    for axis in (1, 6) if "axis" in op.attributes else (1,):
        arguments = sample(op, shape, "float32", rng, axis=axis)
        for value in arguments.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        check(op, arguments, f"axis {axis}")
        check(op, relaid(arguments, np.asfortranarray, list(arguments)), f"axis {axis}, Fortran order")


# --- out -----------------------------------------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "shifted"])
def test_nothing_around_the_result_is_written(op, dtype, offset, rng):
    for shape in [(1, 1), (5, 33), (2, 5, 3), (1, 1001)]:
        arguments = sample(op, shape, dtype, rng)
        expected = call(op, arguments)
        guards = [Placed(result.shape, result.dtype, offset=offset * result.itemsize) for result in expected]
        call(op, arguments, out=packed([guard.array for guard in guards]))
        for guard, plain in zip(guards, expected, strict=True):
            assert guard.untouched(), shape
            np.testing.assert_array_equal(*(a.astype("f8") for a in (guard.array, plain)), str(shape))


@KERNELS
def test_nothing_between_spaced_rows_is_written(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng, reduction="none")
    expected = reference(op, arguments)
    wide = [Placed((2 * len(result), *result.shape[1:]), dtype) for result in expected]
    gaps = [guard.array[1::2] for guard in wide]
    for gap in gaps:
        gap[...] = 7
    check(op, arguments, out=packed([guard.array[::2] for guard in wide]))
    assert all((gap == 7).all() for gap in gaps)
    assert all(guard.untouched() for guard in wide)


@EVERY
@pytest.mark.one_in(2)
def test_in_place(op, dtype, rng):
    for shape in [(5, 33), (2, 5, 3), (1, 2051)]:
        arguments = sample(op, shape, dtype, rng)
        expected = call(op, arguments)
        for name, own, outputs in in_place_calls(op, arguments, expected):
            results = call(op, own, out=packed(outputs))
            assert all(given is output for given, output in zip(results, outputs, strict=True))
            assert [bits(array) for array in results] == [bits(array) for array in expected], f"{shape}, {name}"


@for_kernels(lambda op: op.kind in ("elements", "rows") and len(op.inputs) > 1 and "factor" not in op.inputs)
def test_both_arguments_may_be_one_array(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng)
    names = elements(op, arguments)
    check(op, arguments | dict.fromkeys(names, arguments[names[0]]))


# --- labels and indices --------------------------------------------------------------------------------------------


@for_kernels(lambda op: {"labels", "indices"} & set(op.inputs))
def test_integer_types(op, dtype, rng):
    for integer in ("int32", "int64"):
        check(op, sample(op, (9, 35), dtype, rng, integer=integer), integer)


@CLASSES
def test_reductions_and_optional_arguments(op, dtype, rng):
    for reduction, optional, shape in itertools.product(("none", "mean", "sum"), (False, True), [(9, 35), (3, 4, 6)]):
        arguments = sample(op, shape, dtype, rng, reduction=reduction, optional=optional, ignore_index=2)
        arguments["labels"].flat[::3] = 2
        check(op, arguments, f"{shape}, {reduction}, {optional}")


@CLASSES
def test_out_dtype(op, dtype, rng):
    for other in FLOATS:
        results = check(op, sample(op, (9, 35), dtype, rng, out_dtype=other), other)
        assert all(result.dtype == DTYPES[other] for result in results)


@CLASSES
def test_all_samples_ignored(op, dtype, rng):
    for reduction in ("none", "mean", "sum"):
        arguments = sample(op, (4, 3, 5), dtype, rng, reduction=reduction, ignore_index=-100)
        arguments["labels"][...] = -100
        arguments[op.arrays[0] if "logits" in op.inputs else "log_prob"][1] = np.nan
        arguments.pop("bias", None)
        for result in losses_and_gradients(op, check(op, arguments)):
            assert result is None or positive_zeros(result), reduction


OUT_OF_RANGE = (-1, -36, 35, 2**31 - 1, -(2**31))


@CLASSES
def test_labels_out_of_range(op, dtype, rng):
    """Loss and gradient of such a sample are NaN; no other sample's are, unless the losses are summed."""
    wrong = [1, 3]
    for number, (label, integer) in enumerate(itertools.product(OUT_OF_RANGE, ("int32", "int64"))):
        shape = (9, 35, 3)[: 2 + number % 2]
        arguments = sample(op, shape, dtype, rng, reduction="none", integer=integer, optional=False)
        arguments["labels"][wrong] = label if integer == "int32" else np.int64(label) << 31
        for result in losses_and_gradients(op, call(op, arguments)):
            if result is not None:
                nan = np.isnan(result.astype(np.float64)).reshape(len(result), -1)
                assert nan[wrong].all(), label
                assert not np.delete(nan, wrong, 0).any(), label
    for reduction in ("mean", "sum"):
        arguments = sample(op, (9, 35), dtype, rng, reduction=reduction)
        arguments["labels"][4] = 35
        loss, gradient = losses_and_gradients(op, call(op, arguments))
        assert loss is None or np.isnan(float(loss))
        assert gradient is None or np.isnan(gradient[4].astype(np.float64)).all()


@for_kernels(lambda op: {"labels", "indices"} & set(op.inputs))
def test_check_raises_for_numbers_out_of_range(op, rng):
    name = "labels" if "labels" in op.inputs else "indices"
    arguments = sample(op, (9, 35), "float32", rng, reduction="none", indices=(9,)) | {"check": True}
    check(op, arguments)
    arguments[name][4:] = 77
    with pytest.raises(ValueError, match=rf"^{op.name}: {name}\[4\] is 77, expected "):
        call(op, arguments)


@for_kernels(lambda op: op.name == "gather_grad")
def test_indices_out_of_range_contribute_nothing(op, dtype, rng):
    for count, index in [*((20, each) for each in (*OUT_OF_RANGE, 2**62, -(2**63))), (70, 35), (70, -(2**63))]:
        arguments = sample(op, (35, 9), dtype, rng, indices=(count,))
        arguments["indices"][::3] = index
        wrong = (arguments["indices"] < -35) | (arguments["indices"] >= 35)
        right = arguments | {"indices": arguments["indices"][~wrong], "dy": arguments["dy"][~wrong]}

        assert_close(op, right, call(op, arguments), f"{count}, {index}")
