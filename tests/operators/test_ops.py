"""Every operator, in every dtype, against its float64 reference: sizes around block limits, axes, special values."""

import numpy as np
import pytest
from accuracy import check
from samples import axis_choices, call, cast, elements, sample

from opgrad.contract import DTYPES

SIZES = {
    # Nothing, one, and rows shorter than a vector: labels, heads.
    "short": [(3, n) for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64)],
    # Below, at and above two, four, … vectors; an odd tail.
    "blocks": [(3, n) for n in (65, 127, 128, 129, 255, 257, 1000, 1001, 4095, 4096, 4097)],
    # More rows than one part or one tile takes.
    "many rows": [(1000, 3), (997, 10), (513, 64), (300, 65), (0, 5), (1, 1), (129, 1)],
    # Rows that are split over threads, at and around the blocks of a split row.
    "long": [(1, 16383), (2, 16384), (1, 16385), (2, 65536), (1, 65537), (1, 131072), (3, 131075)],
}
# The reduced axis has something behind it: vectors run across it, whole or with a tail.
INNER = [(2, 5, 3), (3, 10, 33), (2, 7, 64), (2, 129, 5), (4, 3, 100), (1, 1000, 17), (3, 4, 1), (2, 3, 1000)]


@pytest.mark.parametrize("group", SIZES)
def test_sizes(op, dtype, group, rng):
    for shape in SIZES[group]:
        if op.kind != "classes" or shape[1]:
            check(op, sample(op, shape, dtype, rng), str(shape))


def test_middle_axis(op, dtype, rng):
    for shape in INNER:
        axis = {"axis": 1} if "axis" in op.attributes else {}
        check(op, sample(op, shape, dtype, rng, **axis), str(shape))


def test_each_axis(op, dtype, rng):
    for shape in [(4, 6, 5), (3, 4, 2, 5), (40, 3, 2), (70, 9), (1, 70, 9)]:
        for axis in axis_choices(op, len(shape)):
            check(op, sample(op, shape, dtype, rng, **axis), f"{shape} {axis}")


@pytest.mark.every_case
def test_fewest_dimensions(op, dtype, rng):
    shapes = {"elements": [(), (7,)], "rows": [(7,)], "classes": [(5, 3)], "slices": [(7,)]}[op.kind]
    for shape in shapes:
        check(op, sample(op, shape, dtype, rng, axis=0), str(shape))


@pytest.mark.parametrize("special", [-np.inf, np.inf, np.nan, "denormal", "zero"])
def test_special_values_in_each_lane(op, dtype, special, rng):
    # One special value a row, each row in another place: every lane of a vector and of the tail, pieces of long rows.
    size, lanes = 67, np.arange(9)
    places = {(size, size): np.diag_indices(size), (2, size, 9): (1, lanes * 7, lanes)}
    places[3, 70_001] = np.arange(3), np.array([0, 35_000, 70_000])
    value = {"denormal": -2.5 * float(np.finfo(np.float32).smallest_subnormal), "zero": -0.0}.get(special, special)
    if dtype == "float16" and special == "denormal":
        value = -3 * 2.0**-24
    for shape, place in places.items():
        arguments = sample(op, shape, dtype, rng, reduction="none", axis=1)
        for name in elements(op, arguments):
            if arguments[name].shape == shape:
                changed = arguments[name].copy()
                changed[place] = cast(value, dtype)
                check(op, arguments | {name: changed}, f"{special} in {name}, {shape}")


@pytest.mark.parametrize(("value", "place"), [(-np.inf, np.s_[1:2]), (80.0, np.s_[:, 2]), (None, None)], ids=str)
def test_rows_of_minus_infinity_dominant_entries_and_large_values(op, dtype, value, place, rng):
    for shape in [(3, 5), (4, 100), (2, 5, 33)] + [(2, 3000)] * (value is None):
        arguments = sample(op, shape, dtype, rng, size=1e4 if value is None else 1.0, reduction="none")
        name = op.arrays[0]
        if value is None:
            check(op, arguments, str(shape))
        elif name in elements(op, arguments) and arguments[name].shape == shape:
            arguments[name] = arguments[name].copy()
            arguments[name][place] = cast(value, dtype)
            check(op, arguments, str(shape))


def test_results_are_new_arrays(op, dtype, rng):
    """Of arguments that cannot be written."""
    arguments = sample(op, (5, 33), dtype, rng, integer="int32")
    for value in arguments.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    for result in call(op, arguments):
        assert type(result) is np.ndarray
        assert result.dtype == DTYPES[dtype]
        assert result.flags.c_contiguous
        assert result.flags.writeable
        assert not any(np.may_share_memory(result, array) for array in arguments.values() if hasattr(array, "dtype"))
