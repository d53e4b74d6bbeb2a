"""Softmax and log-softmax with attributes on CPUs, against the float64 reference.

Each form of a call has a kernel of its own, which takes a second to compile: so the tables here have few forms, and
many shapes, strides and numbers for each. The formulas of post-ops are tested one by one in
cpu/test_post_op_kernels.py.
"""

import functools
import itertools

import numpy as np
import pytest
from post_op_cases import PATTERNS, SHAPE, operand_of
from primitive_attributes import AXES, flag, forms
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
from opgrad import Dropout, post_ops
from opgrad.contract import BYTES, DTYPES
from opgrad.ops.reference import post_ops as reference_post_ops
from opgrad.ops.reference.primitive import TYPES

names = pytest.mark.parametrize("name", ["softmax", "log_softmax"])
# By layout: shapes with tails and several parts.
SHAPES = {
    "rows": ((5, 67, 133), -1),
    "transposed": ((5, 67, 13), -1),
    "columns": ((3, 131, 5, 9), 1),
    "split": ((1, 131077), -1),
}


def usual(rng, shape, **attributes):
    """The attributes of most tests here, with which all calls of a layout and dtype have one form."""
    return {"where": rng.random(shape) < 0.7, "logit_scale": 0.5, "stats": True} | attributes


def everything(rng, shape, axis):
    own = [size if place == axis % len(shape) else 1 for place, size in enumerate(shape)]
    return {
        "where": rng.random([1 if place == 1 and len(shape) > 2 else size for place, size in enumerate(shape)]) < 0.7,
        "logit_scale": 0.5, "result_scale": 2.0, "out_scale": 0.01, "stats": True, "save": True, "out_dtype": "int8",
        "dropout": Dropout(0.2, 3, 1, mask=True), "post_ops": [post_ops.add(numbers(rng, own, "bfloat16", 1.0))],
    }  # fmt: skip


def eltwise_chains():
    """All post-ops without operands."""
    return [
        [
            post_ops.linear(4, -1), post_ops.elu(0.7), post_ops.gelu_erf(), post_ops.swish(1.5), post_ops.tanh(),
            post_ops.linear(3, 0.1), post_ops.gelu_tanh(), post_ops.mish(), post_ops.abs(), post_ops.sqrt(),
        ],
        [
            post_ops.exp(), post_ops.log(), post_ops.logistic(), post_ops.soft_relu(-3), post_ops.square(),
            post_ops.pow(2, 0.5), post_ops.hardswish(), post_ops.hardsigmoid(0.3, 0.2), post_ops.linear(4, -2),
            post_ops.relu(-0.25), post_ops.clip(-0.25, 0.75), post_ops.linear(4, 0), post_ops.round(),
            post_ops.clip_v2(-0.5, 2),
        ],
    ]  # fmt: skip


def binary_chains(rng, shape):
    """All post-ops with operands: of every dtype, along vectors or one number for each, of other strides."""
    row, column = (*(1 for _ in shape[1:]), shape[-1]), (*shape[:-1], 1)
    arithmetic = [
        post_ops.add(numbers(rng, row, "float32")), post_ops.sub(0.25), post_ops.mul(numbers(rng, column, "bfloat16")),
        post_ops.div(2 + np.abs(numbers(rng, shape, "float16"))[..., ::-1]),
        post_ops.max(operand_of(rng, row, "int8")), post_ops.min(numbers(rng, shape, "float8_e5m2")),
        post_ops.add(numbers(rng, shape, "float64")), post_ops.mul(numbers(rng, row, "float8_e4m3fn")),
        post_ops.select(rng.random(shape) < 0.5, operand_of(rng, shape, "int32")),
        post_ops.select(operand_of(rng, column, "uint8"), 2.0),
    ]  # fmt: skip
    compared = [post_ops.linear(7, 1), post_ops.round()]
    for op in ("ge", "gt", "le", "lt", "eq", "ne"):
        compared += [getattr(post_ops, op)(1), post_ops.add(operand_of(rng, row, "int8"))]
    return [arithmetic, compared]


def test_all_post_ops_are_here(rng):
    chains = [*eltwise_chains(), *binary_chains(rng, (3, 5))]
    every = {*reference_post_ops.VALUES, *reference_post_ops.BINARY_VALUES}
    assert {op.name for chain in chains for op in chain} == every
    assert len(every) == 34


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("chain", [0, 1])
def test_post_ops_without_operands(chain, dtype, rng):
    for scale in (3.0, -3.0, 30.0, 1e-3):
        for shape in ((3, 67), (5, 4, 37), (2, 41)):
            x, note = numbers(rng, shape, dtype), f"{shape}, {scale}"
            check_forward("softmax", x, post_ops=eltwise_chains()[chain], result_scale=scale, note=note, place=Placed)


@pytest.mark.parametrize(("name", "shape", "axis"), [("softmax", (5, 67), -1), ("log_softmax", (5, 9, 37), 1)])
@pytest.mark.parametrize("chain", [0, 1])
def test_post_ops_with_operands(name, shape, axis, chain, rng):
    x = numbers(rng, shape, "float32")
    for _ in range(3):
        check_forward(name, x, axis, post_ops=binary_chains(rng, shape)[chain], place=Placed)


def test_operands_of_every_broadcast_pattern(rng):
    for pattern, axis in itertools.product(PATTERNS, (-1, 1, (1, 2))):
        chain = [post_ops.add(operand_of(rng, pattern, "float32"))]
        check_forward("softmax", numbers(rng, SHAPE, "float32"), axis, post_ops=chain, note=f"{pattern}", place=Placed)


def test_operands_of_any_layout(rng):
    for shape, axis in (((5, 33), 1), ((4, 9, 6), 1), ((3, 5, 40), (0, 1))):
        x, operand = numbers(rng, shape, "float32"), numbers(rng, shape, "float32")
        expected = bits(check_forward("softmax", x, axis, post_ops=[post_ops.add(operand)])[0])
        for layout in LAYOUTS:
            relaid, note = laid_out(operand, layout, 1), f"{shape}, {layout.__name__}"
            assert bits(check_forward("softmax", x, axis, post_ops=[post_ops.add(relaid)], note=note)[0]) == expected
            check_forward("softmax", laid_out(x, layout), axis, post_ops=[post_ops.add(operand)], place=Placed)


def test_conditions():
    """Whatever is not 0 is true: NaN, the smallest numbers, negative ones. A row for each dtype of a condition."""
    tiny = {"float32": np.finfo(np.float32).smallest_subnormal, "float8_e4m3fn": 2.0**-9}
    chain, expected = [], np.ones((4, 7), bool)
    for row, dtype in enumerate(("bool", "int32", *tiny)):
        condition = np.ones((4, 7), DTYPES[dtype])
        condition[row] = np.array([0, 1, 0, 1, 1, 0, 1]).astype(DTYPES[dtype])
        if dtype in tiny:
            condition[row] = cast([np.nan, np.inf, -np.inf, tiny[dtype], -tiny[dtype], 0.0, -0.0], dtype)
        expected[row] = condition[row].astype("float32") != 0
        chain.append(post_ops.select(condition, -1.0))
    np.testing.assert_array_equal(opgrad.softmax(np.zeros((4, 7), np.float32), post_ops=chain) > 0, expected)


def test_a_long_chain_of_operands(rng):
    """More arrays than native code takes one by one, in the form of torch/test_memory."""
    chosen = [post_ops.add(rng.normal(size=(6, 50)).astype("float32")) for _ in range(9)]
    check_forward("softmax", numbers(rng, (6, 50), "float32"), post_ops=chosen, place=Placed)


def test_an_operation_may_change_between_calls(rng):
    """Its constants are part of the call, and operands are read anew."""
    x, operand = numbers(rng, (5, 33), "float32"), np.ones(33, np.float32)
    op, scale = post_ops.add(operand), post_ops.linear(1.0, 0.5)
    first = opgrad.softmax(x, post_ops=[op, scale])
    operand += 1
    scale.alpha = 2.0
    np.testing.assert_allclose(opgrad.softmax(x, post_ops=[op, scale]), 2 * (first + 0.5) + 0.5, rtol=1e-6)


def test_order():
    """What is saved; result_scale, dropout, the operations one after the other, out_scale."""
    x, chain = np.zeros((1, 1), np.float32), [post_ops.linear(2.0, 1.0), post_ops.square(), post_ops.linear(3.0, 1.0)]
    for dropout, expected in (Dropout(0.0), (7**2 * 3 + 1) / 7), (Dropout(1.0), 4 / 7):
        given = {"result_scale": 3.0, "out_scale": 7.0, "dropout": dropout, "post_ops": chain}
        y, saved = opgrad.softmax(x, **given, save=True)
        np.testing.assert_allclose((y.item(), saved.item()), (expected, 1.0), rtol=1e-6)


# --- layouts, lengths and strides ------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("layout", SHAPES)
def test_everything_at_once(name, layout, rng):
    """Also of rows of -inf, and of rows with NaN and inf; in one thread the same bits."""
    shape, axis = SHAPES[layout]
    x = numbers(rng, shape, "float32")
    x[0, :60] = -np.inf
    if layout != "split":
        x[1], x[2, 7, 3], x[2, 30, 4] = -np.inf, np.nan, np.inf
    attributes = everything(rng, shape, axis) | {"axis": axis}
    results = check_forward(name, x, place=Placed, **attributes)
    expected = [bits(each) for each in results]
    plan = opgrad.plan(getattr(opgrad, name), x, **attributes, out=results)
    assert plan.implementation == f"fused, {layout}, float32"
    threads = opgrad.get_num_threads()
    for count in (1, 4):
        opgrad.set_num_threads(count)
        assert [bits(each) for each in getattr(opgrad, name)(x, **attributes)] == expected
    opgrad.set_num_threads(threads)


@forms
def test_every_length(name, inf_as_zero, rng):
    """Rows, columns and strips of 1 to 130 numbers, long ones, and rows in several blocks."""
    for n in (*range(1, 131), 4095, 4096, 4097, 65537):
        for shape, axis in (((9 if n <= 130 else 3, n), 1), ((n, 5), 0), *(((2, n, 35), 1),) * (n <= 130)):
            x = numbers(rng, shape, "float32")
            check_forward(name, x, axis, place=Placed, note=f"{shape}", **usual(rng, shape), **flag(inf_as_zero))


@names
def test_every_axis_and_layout(name, rng):
    for (shape, axis), first, second in itertools.product(AXES, LAYOUTS, LAYOUTS):
        x = laid_out(numbers(rng, shape, "float32"), first, 1)
        place = functools.partial(Placed, layout=second, offset=1)
        note = f"{shape}, axis {axis}, {first.__name__} to {second.__name__}"
        check_forward(name, x, axis, place=place, note=note, **usual(rng, shape))


def test_other_layouts_give_the_same_bits(rng):
    """What is read and written where an array lies is what a copy of it would give; dropout is decided in C order."""
    for shape, axis in AXES:
        x = numbers(rng, shape, "float32")
        call = functools.partial(opgrad.softmax, axis=axis, dropout=Dropout(0.5, 11, 12, mask=True), logit_scale=0.7)
        expected = [bits(each) for each in call(x)]
        for layout in LAYOUTS:
            found = [bits(each) for each in call(laid_out(x, layout))]
            assert found[1] == expected[1], f"{shape}, {layout.__name__}: mask"
            assert found[0] == expected[0], f"{shape}, {layout.__name__}"


def test_repeated_elements(rng):
    for shape, axis in AXES:
        for repeated in range(len(shape)):
            one = numbers(rng, [1 if each == repeated else size for each, size in enumerate(shape)], "float32")
            check_forward("softmax", np.broadcast_to(one, shape), axis, note=f"{shape}", **usual(rng, shape))


def test_where_takes_what_broadcasts(rng):
    x, full = rng.normal(size=(3, 4, 5)).astype("float32"), rng.random((3, 4, 5)) < 0.6
    for where in (
        full, full[0], full[0, 0], full[:, :1], full[:, :, :1], full[:1, :, :1], full.tolist(), np.True_, False,
        np.asfortranarray(full)[::-1, :, ::-1],
    ):  # fmt: skip
        check_forward("softmax", x, 1, where=where, logit_scale=0.5, stats=True, inf_as_zero=True)
        check_forward("log_softmax", x, (0, 1, 2), where=where, logit_scale=0.5, stats=True)


@names
def test_long_and_many_rows(name, rng):
    """Several blocks, and several parts of work."""
    for shape, axis in [((3000, 7), 1), ((700, 131), -1), ((7, 2000), 0), ((3, 50, 700), 1), ((90, 5, 130), (1, 2)),
                        ((2, 4097), 1), ((65537, 3), 0)]:  # fmt: skip
        x = laid_out(numbers(rng, shape, "float32"), permuted if len(shape) > 2 else c_order)
        check_forward(name, x, axis, place=Placed, note=f"{shape}", **usual(rng, shape))


# --- one attribute, one dtype at a time ------------------------------------------------------------------------------

ALONE = {
    "where": [{"where": np.arange(33) % 3 > 0}],
    "logit_scale": [{"logit_scale": scale} for scale in (0.3, -1.7, 0)],
    "scales behind": [{"result_scale": 2.5}, {"result_scale": 0.0}, {"out_scale": 0.125}, {"out_scale": -3}],
    "dropout": [{"dropout": Dropout(0.4, 1, 2)}],
    "mask": [{"dropout": Dropout(p, -1, 2**64 - 3, mask=True)} for p in (0, 0.5, 1)],
    "stats": [{"stats": True}],
    "save": [{"save": True}],
    "accumulation": [{"accumulation": "strict"}],
}


@pytest.mark.parametrize("attributes", ALONE.values(), ids=ALONE)
def test_attributes_alone(attributes, rng):
    for each in attributes:
        x = numbers(rng, (5, 33), "float32")
        results = check_forward("softmax", x, note=f"{each}", **each)
        again = check_forward("softmax", x, note=f"{each}", place=Placed, **each)
        assert [bits(each) for each in again] == [bits(each) for each in results]


def test_a_scale_that_float32_does_not_hold(rng):
    x = numbers(rng, (9, 131), "float32") * np.float32(1e37)
    check_forward("softmax", x, place=Placed, **usual(rng, x.shape, logit_scale=1e-40))


@pytest.mark.parametrize("shape", [(4, 33), (5, 9, 37)], ids=["rows", "columns"])
@pytest.mark.parametrize("number", range(8))
def test_dtypes(number, shape, rng):
    """Each dtype of x with another of y, and the dtype of y by `out_dtype` or by `out`."""
    source, target = TYPES[number], TYPES[(number + 3) % 8]
    x, out = numbers(rng, shape, source), np.empty(shape, DTYPES[target])
    (y,) = check_forward("softmax", x, 1, out_dtype=target, out_scale=step_of(target), place=Placed)
    assert opgrad.softmax(x, 1, out=out, out_scale=step_of(target)) is out
    assert bits(out) == bits(y)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_results_have_the_dtype_of_x_or_float32(dtype, rng):
    own = DTYPES["float32" if dtype in BYTES else dtype]
    assert opgrad.softmax(numbers(rng, (4, 33), dtype)).dtype == own


@names
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


# --- special numbers -------------------------------------------------------------------------------------------------

BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "denormal": 1e-40, "largest": 3e38, "smallest": -3e38}


@forms
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_special_numbers_in_every_place(bad, name, inf_as_zero, rng):
    """In every lane and in the tail; the other rows stay as they are."""
    for n, axis in itertools.product((3, 37, 67), (0, 1)):
        x, kept = numbers(rng, (n, n), "float32"), {"where": np.ones((n, n), bool), "logit_scale": 0.5, "stats": True}
        for each in range(n):  # one place in each row, which is another place in each column
            x[each, (each + 1) % n] = bad
        check_forward(name, x, axis, note=f"{n}, axis {axis}", **kept, **flag(inf_as_zero))
        x[: n // 2] = numbers(rng, (n // 2, n), "float32")
        check_forward(name, x, axis, note=f"{n}, axis {axis}, some rows", **kept, **flag(inf_as_zero))


@forms
def test_rows_of_minus_infinity(name, inf_as_zero, rng):
    for shape, axis in [((5, 4), 1), ((5, 67), 1), ((67, 21), 0), ((4, 5), 0), ((3, 5, 33), 1)]:
        place = [slice(None)] * len(shape)
        place[axis - 1 if axis else 1] = slice(0, None, 2)
        for by_mask in (False, True):
            x, kept = numbers(rng, shape, "float32"), np.ones(shape, bool)
            (kept if by_mask else x)[tuple(place)] = False if by_mask else -np.inf
            given = {"where": kept, "logit_scale": 0.5, "stats": True} | flag(inf_as_zero)
            results = check_forward(name, x, axis, **given)
            if inf_as_zero:
                assert (results[0][tuple(place)] == 0).all()


def test_integers_are_rounded_to_even_and_saturate():
    x = np.zeros((1, 1), np.float32)
    for value, signed, unsigned in [
        (0.5, 0, 0), (1.5, 2, 2), (2.5, 2, 2), (-0.5, 0, 0), (-1.5, -2, 0), (-2.5, -2, 0), (126.5, 126, 126),
        (127.5, 127, 128), (300, 127, 255), (-300, -128, 0), (254.5, 127, 254), (255.5, 127, 255), (1e30, 127, 255),
        (-1e30, -128, 0), (3e38 * 100, 127, 255),
    ]:  # fmt: skip
        for dtype, expected in (("int8", signed), ("uint8", unsigned)):
            assert opgrad.softmax(x, out_dtype=dtype, result_scale=value) == expected, value
    assert opgrad.softmax(np.full((1, 1), np.nan, np.float32), out_dtype="int8", result_scale=2.0) == 0


def test_float8_overflows_as_ml_dtypes_does():
    x = np.zeros((1, 1), np.float32)
    for value in (447, 448, 464, 465, 57344, 61439, 61441, 1e9, -500, -1e9):
        for dtype in ("float8_e5m2", "float8_e4m3fn"):
            expected = cast(np.float32(value), dtype)
            given = opgrad.softmax(x, out_dtype=dtype, result_scale=value)
            np.testing.assert_array_equal(given.astype("float32"), expected.astype("float32"))


def test_denormals_are_kept():
    x = np.array([[0, -88.0, -95.0, -100.0, -103.0]], np.float32)
    check_forward("softmax", x, save=True)
    assert (opgrad.softmax(x, save=True)[1] > 0).all()


# --- empty arrays, memory --------------------------------------------------------------------------------------------


@forms
def test_empty_arrays(name, inf_as_zero):
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0), (2, 3, 0), (0, 5, 9)]:
        for axis in [*range(len(shape)), tuple(range(len(shape)))]:
            x = np.zeros(shape, np.float32)
            given = {"where": np.ones(shape, bool), "logit_scale": 0.5, "stats": True} | flag(inf_as_zero)
            stats = check_forward(name, x, axis, place=Placed, **given)[1]
            assert x.size or (stats == -np.inf).all()


def test_in_place(rng):
    for shape, axis in [*AXES, ((2, 9000), 1), ((9000, 3), 0)]:
        for layout in (c_order, fortran, in_records):
            x = laid_out(numbers(rng, shape, "float32"), layout)
            given = usual(rng, shape, axis=axis)
            y, stats = opgrad.softmax(x, **given)
            expected = bits(y)
            assert opgrad.softmax(x, out=(x, stats), **given)[0] is x
            assert bits(x) == expected, f"{shape}, axis {axis}, {layout.__name__}"


def test_in_place_with_all_results(rng):
    x = rng.normal(size=(40, 130)).astype("float32")
    given = everything(rng, x.shape, -1) | {"out_dtype": "float32"}
    expected = [bits(each) for each in opgrad.softmax(x, **given)]
    stats, mask, other = np.empty((40, 1), "float32"), np.empty(x.shape, bool), np.empty_like(x)
    with pytest.raises(ValueError, match="out for saved overlaps x, expected separate memory"):
        opgrad.softmax(x, out=(other, stats, x, mask), **given)
    out = x, stats, other, mask
    results = opgrad.softmax(x, out=out, **given)
    assert all(result is array for result, array in zip(results, out, strict=True))
    assert [bits(each) for each in results] == expected


def test_new_results_follow_the_memory_order_of_x(rng):
    x = np.asfortranarray(rng.normal(size=(6, 7)).astype("float32"))
    assert all(each.flags.f_contiguous for each in opgrad.log_softmax(x, save=True))
