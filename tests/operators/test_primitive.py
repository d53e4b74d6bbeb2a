"""Softmax in its general form: every mix of dtypes, layouts, attributes, lengths and special numbers."""

import functools
import itertools

import numpy as np
import pytest
from primitive_attributes import ALONE, AXES, flag, forms, some_attributes, some_where
from primitive_cases import (
    LAYOUTS,
    Placed,
    c_order,
    check_forward,
    fortran,
    in_records,
    laid_out,
    numbers,
    permuted,
    step_of,
)
from samples import bits, cast

import opgrad
from opgrad.contract import BYTES, DTYPES
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import TYPES


@forms
@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", TYPES)
def test_dtypes_layouts_and_attributes(source, target, name, inf_as_zero, rng):
    """Every pair of dtypes; axis, layouts and attributes are drawn for each call."""
    for _ in range(6):
        shape, axis = AXES[rng.integers(len(AXES))]
        first, second = (LAYOUTS[rng.integers(len(LAYOUTS))] for _ in range(2))
        x = laid_out(numbers(rng, shape, source), first, int(rng.integers(0, 3)))
        x.flags.writeable = False
        attributes = some_attributes(rng, shape, target) | flag(inf_as_zero)
        place = functools.partial(Placed, layout=second, offset=int(rng.integers(0, 3)))
        note = f"{shape}, axis {axis}, {first.__name__} to {second.__name__}, {attributes}"
        check_forward(name, x, axis, out_dtype=target, place=place, note=note, **attributes)


@forms
@pytest.mark.parametrize(("first", "second"), list(itertools.product(LAYOUTS, LAYOUTS)), ids=lambda each: each.__name__)
def test_every_pair_of_layouts(first, second, name, inf_as_zero, rng):
    for number, (shape, axis) in enumerate(AXES):
        source, target = TYPES[number % 8], TYPES[rng.integers(8)]
        x = laid_out(numbers(rng, shape, source), first, number % 2)
        place = functools.partial(Placed, layout=second, offset=number % 2)
        attributes = {"out_scale": step_of(target), "where": some_where(rng, shape)} | flag(inf_as_zero)
        note = f"{shape}, axis {axis}, {source} to {target}"
        check_forward(name, x, axis, out_dtype=target, place=place, note=note, **attributes)


@forms
def test_other_layouts_give_the_same_bits(name, inf_as_zero, rng):
    """What is read and written where an array lies is what a copy of it would give."""
    for shape, axis in AXES:
        x = numbers(rng, shape, "float16")
        call = functools.partial(getattr(opgrad, name), axis=axis, out_dtype="float32", logit_scale=0.7)
        expected = bits(call(x, **flag(inf_as_zero)))
        for layout in (in_records, LAYOUTS[3], LAYOUTS[4]):
            assert bits(call(laid_out(x, layout), **flag(inf_as_zero))) == expected, f"{shape}, {layout.__name__}"


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_repeated_elements(name, rng):
    for shape, axis in AXES:
        for repeated in range(len(shape)):
            one = numbers(rng, [1 if each == repeated else size for each, size in enumerate(shape)], "bfloat16")
            x = np.broadcast_to(one, shape)
            for target in ("bfloat16", "int8", "float64"):
                check_forward(name, x, axis, out_dtype=target, out_scale=step_of(target), note=f"{shape}, {repeated}")
    check_forward(name, np.broadcast_to(cast(1.5, "float32"), (3, 5)), stats=True, save=True)


@forms
def test_every_length(name, inf_as_zero, rng):
    """Rows, columns and tiles of 1 to 130 numbers."""
    for n in range(1, 131):
        targets = rng.permutation(TYPES)
        for target, shape, axis in zip(targets, ((3, n), (n, 5), (2, n, 35)), (1, 0, 1), strict=False):
            attributes = {"out_scale": step_of(target), "stats": True} | flag(inf_as_zero)
            x = numbers(rng, shape, TYPES[n % 8])
            check_forward(name, x, axis, out_dtype=target, place=Placed, note=f"{shape} {target}", **attributes)


@forms
@pytest.mark.parametrize("n", [4094, 4095, 4096, 4097, 4111, 8191, 8193, 65535, 65536, 65537])
def test_long_rows(n, name, inf_as_zero, rng):
    for (shape, axis), source, target in [
        (((2, n), 1), "bfloat16", "float32"), (((n, 3), 0), "float32", "float16"), (((2, n), 1), "float64", "float32"),
        (((n, 3), 0), "int8", "float64"), (((1, n), -1), "float32", "bfloat16"),
    ]:  # fmt: skip
        x = laid_out(numbers(rng, shape, source), fortran if n % 2 else c_order)
        dropout = Dropout(0.3, n, 7, mask=True)
        attributes = {"stats": True, "save": True, "dropout": dropout, "logit_scale": 0.5} | flag(inf_as_zero)
        check_forward(name, x, axis, out_dtype=target, place=Placed, note=f"{shape}, {source}", **attributes)


@forms
def test_many_rows(name, inf_as_zero, rng):
    """Several blocks, and several parts of work."""
    for shape, axis in [((3000, 7), 1), ((700, 131), -1), ((7, 2000), 0), ((3, 50, 700), 1), ((90, 5, 130), (1, 2))]:
        x = laid_out(numbers(rng, shape, "float16"), permuted)
        attributes = {"where": some_where(rng, shape), "dropout": Dropout(0.5, 3, 4, mask=True), "stats": True}
        check_forward(name, x, axis, out_dtype="uint8", out_scale=1 / 255, note=f"{shape}", **attributes)


# --- one attribute at a time -----------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("attributes", ALONE.values(), ids=ALONE)
def test_attributes_alone(attributes, name, inf_as_zero, rng):
    for dtype in TYPES:
        x = numbers(rng, (5, 33), dtype)
        results = check_forward(name, x, note=dtype, **attributes, **flag(inf_as_zero))
        again = check_forward(name, x, note=dtype, place=Placed, **attributes, **flag(inf_as_zero))
        assert [bits(each) for each in again] == [bits(each) for each in results], dtype


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_defaults_are_the_plain_form(name, rng):
    x, function = rng.normal(size=(5, 33)).astype("float32"), getattr(opgrad, name)
    expected = bits(function(x))
    defaults = {
        "out": None, "out_dtype": None, "where": None, "logit_scale": 1, "result_scale": 1.0, "dropout": None,
        "post_ops": [], "out_scale": np.float32(1), "accumulation": "relaxed", "stats": False, "save": np.False_,
    }  # fmt: skip
    assert bits(function(x, **defaults)) == expected
    for key, value in defaults.items():
        assert bits(function(x, **{key: value})) == expected, key


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("target", TYPES)
def test_the_dtype_comes_from_out_dtype_or_out(name, target, rng):
    for source in TYPES:
        x, function = numbers(rng, (4, 9), source), getattr(opgrad, name)
        own = DTYPES["float32"] if source in BYTES else x.dtype
        assert function(x).dtype == own
        asked = function(x, out_dtype=target)
        assert asked.dtype == DTYPES[target]
        assert bits(function(x, out_dtype=DTYPES[target])) == bits(asked)
        out = np.empty(x.shape, DTYPES[target])
        assert function(x, out=out) is out
        assert bits(out) == bits(asked)
        assert function(x, out=out, out_dtype=target) is out


def test_where_takes_what_broadcasts(rng):
    x = rng.normal(size=(3, 4, 5)).astype("float32")
    full = rng.random((3, 4, 5)) < 0.6
    for where in (
        full,
        full[0],
        full[0, 0],
        full[:, :1],
        full[:, :, :1],
        full[:1, :, :1],
        full.tolist(),
        np.True_,
        False,
    ):
        check_forward("softmax", x, 1, where=where, inf_as_zero=True)
        check_forward("log_softmax", x, (0, 1, 2), where=where)
    check_forward("softmax", x, where=np.asfortranarray(full)[::-1, :, ::-1])


# --- special numbers -------------------------------------------------------------------------------------------------

BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "denormal": 1e-40, "largest": 3e38, "smallest": -3e38}


@forms
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize(("source", "target"), [("float32", "float32"), ("float64", "float32"), ("bfloat16", "int8")])
def test_special_numbers_in_every_place(source, target, bad, name, inf_as_zero, rng):
    """In every lane and in the tail; the other rows stay as they are."""
    for n in (3, 37, 67):
        for axis in (0, 1):
            x = numbers(rng, (n, n), source)
            for each in range(n):  # one place in each row, which is another place in each column
                x[each, (each + 1) % n] = bad
            where = np.ones(n, bool)
            attributes = {"out_scale": step_of(target), "where": where, "stats": True} | flag(inf_as_zero)
            check_forward(name, x, axis, out_dtype=target, note=f"{n}, axis {axis}", **attributes)
            x[: n // 2] = numbers(rng, (n // 2, n), source)
            check_forward(name, x, axis, out_dtype=target, note=f"{n}, axis {axis}, some rows", **attributes)


@pytest.mark.parametrize("source", ["float32", "float64", "float16", "bfloat16", "float8_e5m2"])
@forms
def test_rows_of_minus_infinity(source, name, inf_as_zero, rng):
    for shape, axis in [((5, 4), 1), ((5, 67), 1), ((67, 21), 0), ((4, 5), 0), ((3, 5, 33), 1)]:
        x = numbers(rng, shape, source)
        place = [slice(None)] * len(shape)
        place[axis - 1 if axis else 1] = slice(0, None, 2)
        for value, where in ((-np.inf, None), (1.0, False)):
            kept = np.ones(shape, bool)
            if where is None:
                x[tuple(place)] = value
            else:
                kept[tuple(place)] = False
            for target in ("float32", "float64", "float8_e4m3fn", "int8", "uint8"):
                attributes = {"out_scale": step_of(target), "where": kept, "stats": True, "save": True}
                results = check_forward(name, x, axis, out_dtype=target, **attributes, **flag(inf_as_zero))
                if inf_as_zero:
                    assert (results[0][tuple(place)].astype("float64") == 0).all()


def test_integers_are_rounded_to_even_and_saturate():
    x = np.zeros((1, 1), np.float32)
    for value, signed, unsigned in [
        (0.5, 0, 0), (1.5, 2, 2), (2.5, 2, 2), (-0.5, 0, 0), (-1.5, -2, 0), (-2.5, -2, 0), (126.5, 126, 126),
        (127.5, 127, 128), (300, 127, 255), (-300, -128, 0), (254.5, 127, 254), (255.5, 127, 255), (1e30, 127, 255),
        (-1e30, -128, 0), (3e38 * 100, 127, 255),
    ]:  # fmt: skip
        for dtype, expected in (("int8", signed), ("uint8", unsigned)):
            assert opgrad.softmax(x, out_dtype=dtype, result_scale=value) == expected, value
    assert opgrad.softmax(np.full((1, 1), np.nan, np.float32), out_dtype="int8") == 0
    assert opgrad.softmax(np.full((1, 1), np.inf, np.float64), out_dtype="uint8") == 0


def test_float8_overflows_as_ml_dtypes_does():
    x = np.zeros((1, 1), np.float32)
    for value in (447, 448, 464, 465, 57344, 61439, 61441, 1e9, -500, -1e9):
        for dtype in ("float8_e5m2", "float8_e4m3fn"):
            expected = cast(np.float32(value), dtype)
            given = opgrad.softmax(x, out_dtype=dtype, result_scale=value)
            np.testing.assert_array_equal(given.astype("float32"), expected.astype("float32"))


def test_denormals_are_kept(rng):
    x = np.array([[0, -88.0, -95.0, -100.0, -103.0]], np.float32)
    check_forward("softmax", x, where=np.True_)
    assert (opgrad.softmax(x, where=np.True_, save=True)[1] > 0).all()
    tiny = np.full((5, 37), 1e-40, np.float32)
    assert bits(opgrad.log_softmax(tiny, stats=True)[0]) == bits(opgrad.log_softmax(tiny * 0, stats=True)[0])


# --- empty arrays, results, memory -----------------------------------------------------------------------------------


@forms
def test_empty_arrays(name, inf_as_zero):
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0), (2, 3, 0), (0, 5, 9)]:
        for axis in [*range(len(shape)), tuple(range(len(shape)))]:
            for dtype in TYPES:
                x = np.zeros(shape, DTYPES[dtype])
                attributes = {"stats": True, "save": True, "dropout": Dropout(0.5, mask=True), "where": np.True_}
                check_forward(name, x, axis, out_dtype="int8", place=Placed, **attributes, **flag(inf_as_zero))
                check_forward(name, x, axis, out_dtype="bfloat16", **flag(inf_as_zero))


def test_a_row_without_elements_has_a_sum_of_0():
    for shape, axis in (((3, 0), 1), ((0, 3), 0), ((2, 0, 40), 1), ((5000, 0), 1)):
        for function in (opgrad.softmax, opgrad.log_softmax):
            assert (function(np.zeros(shape, np.float32), axis, stats=True)[1] == -np.inf).all()


@forms
def test_in_place(name, inf_as_zero, rng):
    for shape, axis in [*AXES, ((2, 9000), 1), ((9000, 3), 0)]:
        for dtype in TYPES:
            for layout in (c_order, fortran, in_records):
                x = laid_out(numbers(rng, shape, dtype), layout)
                given = {"axis": axis, "out_dtype": dtype, "out_scale": step_of(dtype), "logit_scale": 0.5}
                expected = bits(getattr(opgrad, name)(x, **given, **flag(inf_as_zero)))
                assert getattr(opgrad, name)(x, out=x, **given, **flag(inf_as_zero)) is x
                assert bits(x) == expected, f"{shape}, axis {axis}, {dtype}, {layout.__name__}"


@forms
def test_in_place_with_all_results(name, inf_as_zero, rng):
    for saved_in_place in (False, True):
        x = rng.normal(size=(40, 130)).astype("float32")
        given = {"save": True, "stats": True, "dropout": Dropout(0.2, 5, mask=True), "where": x > -1}
        expected = [bits(each) for each in getattr(opgrad, name)(x, **given, **flag(inf_as_zero))]
        stats, mask, other = np.empty((40, 1), "float32"), np.empty(x.shape, bool), np.empty_like(x)
        out = (other, stats, x, mask) if saved_in_place else (x, stats, other, mask)
        if saved_in_place:
            with pytest.raises(ValueError, match="out for saved overlaps x, expected separate memory"):
                getattr(opgrad, name)(x, out=out, **given, **flag(inf_as_zero))
        else:
            results = getattr(opgrad, name)(x, out=out, **given, **flag(inf_as_zero))
            assert all(result is array for result, array in zip(results, out, strict=True))
            assert [bits(each) for each in results] == expected


@pytest.mark.usefixtures("threads")
@forms
def test_threads_change_no_bit(name, inf_as_zero, rng):
    for shape, axis in [((3000, 37), 1), ((7, 40_000), 1), ((40, 33, 65), 1), ((500, 700), 0), ((20_000, 4), 1)]:
        x = numbers(rng, shape, "float16")
        given = {"stats": True, "save": True, "dropout": Dropout(0.3, 9, mask=True), "out_dtype": "float32"}
        given |= {"where": rng.random(shape) < 0.9, "result_scale": 1.5}
        found = []
        for count in (1, 2, 4):
            opgrad.set_num_threads(count)
            found.append([bits(each) for each in getattr(opgrad, name)(x, axis, **given, **flag(inf_as_zero))])
        assert found[0] == found[1] == found[2], shape


def test_dropout_is_decided_by_the_place_in_c_order(rng):
    x = rng.normal(size=(6, 7, 8)).astype("float32")
    for axis in (0, 1, 2, (0, 1), (1, 2)):
        given = {"axis": axis, "dropout": Dropout(0.5, 11, 12, mask=True)}
        _, mask = opgrad.softmax(x, **given)
        for layout in LAYOUTS:
            assert bits(opgrad.softmax(laid_out(x, layout), **given)[1]) == bits(mask), layout.__name__


def test_new_results_follow_the_memory_order_of_x(rng):
    x = np.asfortranarray(rng.normal(size=(6, 7)).astype("float32"))
    for results in (opgrad.softmax(x, out_dtype="int8", save=True), opgrad.log_softmax(x, save=True)):
        assert all(each.flags.f_contiguous for each in results)
