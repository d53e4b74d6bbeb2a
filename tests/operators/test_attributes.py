"""Softmax, log-softmax and their gradients with attributes on CPUs, against the float64 reference.

Each form of a call has a kernel of its own, which takes a second to compile: so the tables here have few forms, and
many shapes, strides and numbers for each. The formulas of post-ops are tested one by one in
cpu/test_post_op_kernels.py.
"""

import functools
import itertools

import numpy as np
import pytest
from accuracy import check_slopes
from guards import LAYOUTS, Placed, c_order, fortran, gapped, in_records, laid_out, permuted
from post_op_cases import PATTERNS, SHAPE, made, operand_of
from primitive_attributes import AXES, flag, forms, specials, typed_call
from primitive_cases import check_forward, check_gradient, numbers
from samples import bits, cast, several

import opgrad
from opgrad import Dropout, post_ops
from opgrad.contract import BYTES, DTYPES
from opgrad.ops import operators
from opgrad.ops.reference import post_ops as reference_post_ops
from opgrad.ops.reference.dropout import keep_mask
from opgrad.ops.reference.primitive import GRADIENT_TYPES

FORWARD, GRADIENT = ("softmax", "log_softmax"), ("softmax_grad", "log_softmax_grad")
forward_names = pytest.mark.parametrize("name", FORWARD)
gradient_names = pytest.mark.parametrize("name", GRADIENT)
every = pytest.mark.parametrize("name", FORWARD + GRADIENT)
one_of_each = pytest.mark.parametrize("name", ["softmax", "softmax_grad"])
# The three forward forms, and the gradients, which take no flag.
every_form = pytest.mark.parametrize(
    ("name", "inf_as_zero"),
    [("softmax", False), ("softmax", True), *((name, False) for name in (*FORWARD, *GRADIENT)[1:])],
    ids=str,
)
# By layout: shapes with tails and several parts.
SHAPES = {
    "rows": ((5, 67, 133), -1),
    "transposed": ((5, 67, 13), -1),
    "columns": ((3, 131, 5, 9), 1),
    "split": ((1, 131077), -1),
}


def arrays(name, rng, shape, axis=-1, dtype="float32"):
    """x of a forward operator; dy and y of a gradient, y as the forward operator saves it."""
    if name in FORWARD:
        return [numbers(rng, shape, dtype)]
    x = numbers(rng, shape, "float64", 1.5)
    y = operators()[name.removesuffix("_grad")].reference(x, axis)
    return [numbers(rng, shape, dtype, 1.0), cast(y, dtype)]


def check(name, given, axis=-1, **attributes):
    return (check_forward if name in FORWARD else check_gradient)(name, *given, axis, **attributes)


def usual(name, rng, shape, inf_as_zero=False):
    """The attributes of most tests here, with which all calls of a layout and dtype have one form."""
    more = {"stats": True} | flag(inf_as_zero) if name in FORWARD else {"dropout": Dropout(0.3, 3)}
    return {"where": rng.random(shape) < 0.7, "logit_scale": 0.5} | more


def everything(rng, shape, axis):
    own = [size if place == axis % len(shape) else 1 for place, size in enumerate(shape)]
    return {
        "where": rng.random([1 if place == 1 and len(shape) > 2 else size for place, size in enumerate(shape)]) < 0.7,
        "logit_scale": 0.5, "result_scale": 2.0, "out_scale": 0.01, "stats": True, "save": True, "out_dtype": "int8",
        "dropout": Dropout(0.2, 3, 1, mask=True), "post_ops": [post_ops.add(numbers(rng, own, "bfloat16", 1.0))],
    }  # fmt: skip


def eltwise_chains(name):
    """All post-ops without operands that the operator takes; constants put a kink among the numbers that occur."""
    behind = [post_ops.linear(4, 0), post_ops.round()] if name in FORWARD else []
    return [
        [
            post_ops.linear(4, -1), post_ops.elu(0.7), post_ops.gelu_erf(), post_ops.swish(1.5), post_ops.tanh(),
            post_ops.linear(3, 0.1), post_ops.gelu_tanh(), post_ops.mish(), post_ops.abs(), post_ops.linear(1, 0.25),
            post_ops.sqrt(),
        ],
        [
            post_ops.exp(), post_ops.log(), post_ops.logistic(), post_ops.soft_relu(-3), post_ops.square(),
            post_ops.pow(2, 0.5), post_ops.hardswish(), post_ops.hardsigmoid(0.3, 0.2), post_ops.relu(-0.25),
            post_ops.linear(4, -2), post_ops.clip(-1, 0.25), post_ops.clip_v2(-0.9, 2), *behind,
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


def operand_chain(rng, shape):
    """All post-ops with operands that have a gradient: of several dtypes, along vectors or one number for each."""
    row, column = (*(1 for _ in shape[1:]), shape[-1]), (*shape[:-1], 1)
    return [
        post_ops.mul(numbers(rng, row, "float32")), post_ops.add(numbers(rng, column, "bfloat16")),
        post_ops.max(numbers(rng, shape, "float64")), post_ops.tanh(), post_ops.sub(1.5),
        post_ops.div(2 + np.abs(numbers(rng, shape, "float16"))[..., ::-1]),
        post_ops.min(operand_of(rng, row, "int32") / np.float32(4)), post_ops.mul(operand_of(rng, shape, "int8")),
        post_ops.select(rng.random(shape) < 0.5, numbers(rng, shape, "float32")),
    ]  # fmt: skip


def names_in(*chains):
    return {op.name for chain in chains for op in chain}


def test_all_post_ops_are_here(rng):
    known = {*reference_post_ops.VALUES, *reference_post_ops.BINARY_VALUES}
    assert names_in(*eltwise_chains("softmax"), *binary_chains(rng, (3, 5))) == known
    with_gradient = {name for name in known if reference_post_ops.has_gradient(name)}
    assert names_in(*eltwise_chains("softmax_grad"), operand_chain(rng, (3, 5))) == with_gradient
    assert len(known) == 34


SCALES = {"softmax": (3.0, -3.0, 30.0, 1e-3), "softmax_grad": (0.9, -1.0, 20.0)}


@one_of_each
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("chain", [0, 1])
@pytest.mark.one_in(4)
def test_post_ops_without_operands(name, chain, dtype, rng):
    for shape, scale in itertools.product(((3, 67), (2, 2, 37), (2, 41)), SCALES[name]):  # rows, which have one kernel
        given = {"result_scale": scale, "post_ops": eltwise_chains(name)[chain], "note": f"{shape}, {scale}"}
        check(name, arrays(name, rng, shape, dtype=dtype), place=Placed, **given)


@pytest.mark.parametrize(("name", "shape", "axis"), [("softmax", (5, 67), -1), ("log_softmax", (5, 9, 37), 1)])
@pytest.mark.parametrize("chain", [0, 1])
@pytest.mark.one_in(2)
def test_post_ops_with_operands(name, shape, axis, chain, rng):
    x = numbers(rng, shape, "float32")
    for _ in range(3):
        check_forward(name, x, axis, post_ops=binary_chains(rng, shape)[chain], place=Placed)


@one_of_each
@pytest.mark.one_in(2)
def test_operands_of_every_broadcast_pattern(name, rng):
    for pattern, axis in itertools.product(PATTERNS, (-1, 1, (1, 2))):
        operand = operand_of(rng, pattern, "float32")
        if name in FORWARD:
            given = {"post_ops": [post_ops.add(operand)], "place": Placed}
        else:
            given = {"post_ops": [post_ops.mul(operand)], "post_op_grads": True}
        results = check(name, arrays(name, rng, SHAPE, axis), axis, note=f"{pattern}, axis {axis}", **given)
        assert len(results) == (1 if name in FORWARD else 2)


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


def test_order():
    """What is saved; result_scale, dropout, the operations one after the other, out_scale."""
    x, chain = np.zeros((8, 1), np.float32), [post_ops.linear(2.0, 1.0), post_ops.square(), post_ops.linear(3.0, 1.0)]
    given = {"result_scale": 3.0, "out_scale": 7.0, "dropout": Dropout(0.5, 2), "post_ops": chain}
    y, saved = opgrad.softmax(x, **given, save=True)
    kept = keep_mask(x.shape, 0.5, 2, 0)
    assert 0 < kept.sum() < 8
    np.testing.assert_allclose(y, np.where(kept, ((2 * 6 + 1) ** 2 * 3 + 1) / 7, 4 / 7), rtol=1e-6)
    assert (saved == 1).all()


# --- layouts, lengths and strides ------------------------------------------------------------------------------------


@forward_names
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.one_in(2)
def test_everything_at_once(name, layout, rng, threads):
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
    again = threads(lambda: getattr(opgrad, name)(x, **attributes), (1, 4))
    assert [bits(each) for each in again] == expected


@gradient_names
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.one_in(4)
def test_gradients_of_operands(name, layout, rng, threads):
    """In the order of the post-ops, floating-point ones alone; in one thread the same bits."""
    shape, axis = SHAPES[layout]
    dy, y = arrays(name, rng, shape, axis)
    chain = operand_chain(rng, shape)[:: 1 if layout == "rows" else 4]
    given = usual(name, rng, shape) | {"post_ops": chain, "post_op_grads": True, "result_scale": 2.0, "out_scale": 0.5}
    results = check_gradient(name, dy, y, axis, **given)
    operands = [np.asarray(op.operands[-1]) for op in chain if op.operands]
    assert [each.shape for each in results[1:]] == [each.shape for each in operands if each.dtype.kind != "i"]
    again = threads(lambda: getattr(opgrad, name)(dy, y, axis, **given), [1])
    assert [bits(each) for each in again] == [bits(each) for each in results]


@every_form
@pytest.mark.one_in(3)
def test_every_length(name, inf_as_zero, rng):
    """Rows of 1 to 130 numbers, long ones, and rows in several blocks; columns and strips, whose vectors lie across,
    of fewer lengths."""
    for n in (*range(1, 131), 4095, 4096, 4097, 65537):
        across = n < 18 or n % 8 in (0, 1) or n == 4095
        columns, strips = (((n, 5), 0),) * across, (((2, n, 35), 1),) * (across and n <= 130 and name in FORWARD)
        for shape, axis in (((9 if n <= 130 else 3, n), 1), *columns, *strips):
            given = usual(name, rng, shape, inf_as_zero)
            check(name, arrays(name, rng, shape, axis), axis, place=Placed, note=f"{shape}", **given)


@gradient_names
def test_short_rows(name, rng):
    """Formulas go through several rows at once where these lie without gaps, which changes no bit."""
    for n in range(1, 34):
        dy, y = arrays(name, rng, (37, n))
        given, function = usual(name, rng, (37, n)), getattr(opgrad, name)
        assert bits(function(dy, y, **given)) == bits(function(laid_out(dy, gapped), laid_out(y, gapped), **given)), n


@every
def test_every_axis_and_layout(name, rng):
    """For each axis every layout is read, and every one is written; all pairs of them occur among the axes."""
    for (number, (shape, axis)), (place, first) in itertools.product(enumerate(AXES), enumerate(LAYOUTS)):
        second = LAYOUTS[(number + place) % len(LAYOUTS)]
        given = [laid_out(each, layout, 1) for each, layout in zip(arrays(name, rng, shape, axis), (first, second))]  # noqa: B905
        written = functools.partial(Placed, layout=second, offset=1)
        note = f"{shape}, axis {axis}, {first.__name__} to {second.__name__}"
        check(name, given, axis, place=written, note=note, **usual(name, rng, shape))


def test_other_layouts_give_the_same_bits(rng):
    """What is read and written where an array lies is what a copy of it would give; dropout is decided in C order."""
    for shape, axis in AXES:
        x = numbers(rng, shape, "float32")
        call = functools.partial(opgrad.softmax, axis=axis, dropout=Dropout(0.5, 11, 12, mask=True))
        expected = [bits(each) for each in call(x)]
        for layout in LAYOUTS:
            found = [bits(each) for each in call(laid_out(x, layout))]
            assert found[1] == expected[1], f"{shape}, {layout.__name__}: mask"
            assert found[0] == expected[0], f"{shape}, {layout.__name__}"


@every
def test_repeated_elements(name, rng):
    for shape, axis in AXES:
        for repeated in range(len(shape)):
            first, *others = arrays(name, rng, shape, axis)
            one = numbers(rng, [1 if each == repeated else size for each, size in enumerate(shape)], "float32")
            given = [np.broadcast_to(one, first.shape), *others]
            check(name, given, axis, note=f"{shape}", **usual(name, rng, shape))


def test_where_takes_what_broadcasts(rng):
    x, full = rng.normal(size=(3, 4, 5)).astype("float32"), rng.random((3, 4, 5)) < 0.6
    for where in (
        full, full[0], full[0, 0], full[:, :1], full[:, :, :1], full[:1, :, :1], full.tolist(), np.True_, False,
        np.asfortranarray(full)[::-1, :, ::-1],
    ):  # fmt: skip
        check_forward("softmax", x, 1, where=where, logit_scale=0.5, stats=True, inf_as_zero=True)
        check_forward("log_softmax", x, (0, 1, 2), where=where, logit_scale=0.5, stats=True)


@every
def test_long_and_many_rows(name, rng):
    """Several blocks, and several parts of work."""
    for shape, axis in [((3000, 7), 1), ((700, 131), -1), ((7, 20_000), 1), ((7, 2000), 0), ((3, 50, 700), 1),
                        ((90, 5, 130), (1, 2)), ((500, 700), 0), ((65537, 3), 0), ((20_000, 4), 1)]:  # fmt: skip
        layout = permuted if len(shape) > 2 else c_order
        given = [laid_out(each, layout) for each in arrays(name, rng, shape, axis)]
        check(name, given, axis, place=Placed, note=f"{shape}", **usual(name, rng, shape))


# --- one attribute, one dtype at a time ------------------------------------------------------------------------------

ALONE = {
    "where": [{"where": np.arange(33) % 3 > 0}],
    "logit_scale": [{"logit_scale": scale} for scale in (0.3, -1.7, 0)],
    "other scales": [{"result_scale": 2.5}, {"result_scale": 0.0}, {"out_scale": 0.125}, {"out_scale": -3}],
}
ALONE_FORWARD = ALONE | {
    "dropout": [{"dropout": Dropout(0.4, 1, 2)}],
    "mask": [{"dropout": Dropout(p, -1, 2**64 - 3, mask=True)} for p in (0, 0.5, 1)],
    "more results": [{"stats": True, "save": True}],
    "accumulation": [{"accumulation": "strict"}],
}
ALONE_GRADIENT = ALONE | {
    "dropout": [
        {"dropout": dropout} for dropout in (Dropout(0.4, 1, 2), Dropout(1, 1, 2), Dropout(0.5, -1, 2**64 - 3))
    ],
    "no dropout": [{"dropout": Dropout(0, 1, 2)}],
}
CASES_ALONE = [("softmax", each) for each in ALONE_FORWARD] + [("softmax_grad", each) for each in ALONE_GRADIENT]


@pytest.mark.parametrize(("name", "attribute"), CASES_ALONE)
@pytest.mark.one_in(2)
def test_attributes_alone(name, attribute, rng):
    for each in (ALONE_FORWARD if name in FORWARD else ALONE_GRADIENT)[attribute]:
        given = arrays(name, rng, (5, 33))
        results = check(name, given, note=f"{each}", **each)
        again = check(name, given, note=f"{each}", place=Placed, **each)
        assert [bits(one) for one in again] == [bits(one) for one in results]


def test_a_scale_that_float32_does_not_hold(rng):
    x = numbers(rng, (9, 131), "float32") * np.float32(1e37)
    check_forward("softmax", x, place=Placed, **(usual("softmax", rng, x.shape) | {"logit_scale": 1e-40}))


@pytest.mark.parametrize("shape", [(4, 33), (5, 9, 37)], ids=["rows", "columns"])
@pytest.mark.parametrize("number", range(8))
def test_dtypes(number, shape, rng):
    """Each dtype of x with another of y, and the dtype of y by `out_dtype` or by `out`."""
    x, given = typed_call(number, rng, shape)
    out = np.empty(shape, DTYPES[given["out_dtype"]])
    (y,) = check_forward("softmax", x, 1, place=Placed, **given)
    assert opgrad.softmax(x, 1, out=out, out_scale=given["out_scale"]) is out
    assert bits(out) == bits(y)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_results_have_the_dtype_of_x_or_float32(dtype, rng):
    own = DTYPES["float32" if dtype in BYTES else dtype]
    assert opgrad.softmax(numbers(rng, (4, 33), dtype)).dtype == own


@pytest.mark.parametrize("shape", [(4, 33), (5, 9, 37)], ids=["rows", "columns"])
@pytest.mark.parametrize("number", range(len(GRADIENT_TYPES)))
@pytest.mark.one_in(2)
def test_dtypes_of_gradients(number, shape, rng):
    """Each dtype of dy with others of y and dx."""
    dtypes = [GRADIENT_TYPES[(number + step) % len(GRADIENT_TYPES)] for step in (0, 1, 3)]
    dy, y = (arrays("softmax_grad", rng, shape, 1, dtype)[place] for place, dtype in enumerate(dtypes[:2]))
    check_gradient("softmax_grad", dy, y, 1, out_dtype=dtypes[2], place=Placed, note=f"{dtypes}")


DEFAULTS = {
    "out": None, "out_dtype": None, "where": None, "logit_scale": 1, "result_scale": 1.0, "dropout": None,
    "post_ops": [], "out_scale": np.float32(1),
}  # fmt: skip


@every
def test_defaults_are_the_plain_form(name, rng):
    given, function = arrays(name, rng, (5, 33)), getattr(opgrad, name)
    expected = bits(function(*given))
    more = {"accumulation": "relaxed", "stats": False, "save": np.False_}
    defaults = DEFAULTS | (more if name in FORWARD else {"post_op_grads": False})
    assert bits(function(*given, **defaults)) == expected
    for key, value in defaults.items():
        assert bits(function(*given, **{key: value})) == expected, key


# --- special numbers -------------------------------------------------------------------------------------------------


@forms
@specials
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


def test_denormals_are_kept():
    x = np.array([[0, -88.0, -95.0, -100.0, -103.0]], np.float32)
    saved = check_forward("softmax", x, stats=True, save=True)[2]
    assert (saved > 0).all()


# --- empty arrays, memory --------------------------------------------------------------------------------------------


@every_form
def test_empty_arrays(name, inf_as_zero):
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0), (2, 3, 0), (0, 5, 9)]:
        for axis in [*range(len(shape)), tuple(range(len(shape)))]:
            x = np.zeros(shape, np.float32)
            if name in FORWARD:
                given = {"where": np.ones(shape, bool), "logit_scale": 0.5, "stats": True} | flag(inf_as_zero)
                stats = check_forward(name, x, axis, place=Placed, **given)[1]
                assert x.size or (stats == -np.inf).all()
                continue
            check_gradient(name, x, x, axis, out_dtype="bfloat16", place=Placed)
            operand = np.ones((*shape[:-1], 1), np.float32)
            chain = [post_ops.mul(operand), post_ops.add(1.5)]
            _, first, second = getattr(opgrad, name)(x, x, axis, post_ops=chain, post_op_grads=True)
            assert (first.shape, second.shape) == (operand.shape, ())
            assert not first.any()
            assert second == 0


@one_of_each
def test_in_place(name, rng):
    for (shape, axis), layout in itertools.product(
        [*AXES, ((2, 9000), 1), ((9000, 3), 0)], (c_order, fortran, in_records)
    ):
        given, made = usual(name, rng, shape) | {"axis": axis}, arrays(name, rng, shape, axis)
        expected = getattr(opgrad, name)(*(laid_out(each, layout) for each in made), **given)
        first, *more = several(expected)
        for place in range(len(made)):
            own = [laid_out(each, layout) for each in made]
            getattr(opgrad, name)(*own, **given, out=(own[place], *more) if more else own[place])
            assert bits(own[place]) == bits(first), f"{shape}, axis {axis}, {layout.__name__}, {place}"


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


# --- the references, by differences of the forward operators' in float64 ----------------------------------------------


SLOPED = {op.name: op for chain in eltwise_chains("softmax_grad") for op in chain} | {"pow": post_ops.pow(1.5, 0.7)}
BINARY = ("add", "sub", "mul", "div", "max", "min", "select")
CASES = {
    "plain": {},
    "scales": {"logit_scale": -0.7, "result_scale": 3.0, "out_scale": 0.3},
    "where": {"where": np.array([True, True, False, True, True]), "logit_scale": 2.0},
    "dropout": {"dropout": Dropout(0.4, 3, 4), "out_scale": 2.0},
    "everything": {
        "where": np.array([[True], [True], [False]]), "logit_scale": 0.5, "result_scale": 2.0, "out_scale": 0.7,
        "dropout": Dropout(0.3, 5, 6),
    },
}  # fmt: skip


@gradient_names
@pytest.mark.parametrize("of", [*CASES, *SLOPED, *BINARY])
def test_references_are_slopes(name, of, rng):
    """The references of dx and of the operand's gradient, where the forward operator's result is finite."""
    above_0 = of in ("log", "sqrt", "pow")
    case = CASES.get(of, {"result_scale": 2.0} | ({"dropout": Dropout(0.3, 7, 8)} if above_0 or of in BINARY else {}))
    chain = [post_ops.square(), post_ops.linear(1, 0.5)] if above_0 else []
    chain += [SLOPED[of]] if of in SLOPED else []
    if of in BINARY:
        chain = [post_ops.linear(2, 0.1), made(of, rng.uniform(0.5, 2, (3, 1)), rng), post_ops.tanh()]
    forward, backward = operators()[name.removesuffix("_grad")].reference, operators()[name].reference
    (operand,) = [np.asarray(op.operands[-1]) for op in chain if op.operands] or [np.zeros(())]
    for axis in (0, 1, (0, 1)):
        x = rng.normal(size=(3, 5))
        y = forward(x, axis, **{key: each for key, each in case.items() if key in ("where", "logit_scale")})
        finite = np.isfinite(y)
        dy = np.where(finite, rng.normal(size=(3, 5)), 0.0)

        def total(x, operand, axis=axis, finite=finite, dy=dy):
            ops = [
                post_ops.PostOp(op.name, operands=(*op.operands[:-1], operand)) if op.operands else op for op in chain
            ]
            return (np.where(finite, forward(x, axis, **case, post_ops=ops), 0.0) * dy).sum()

        with np.errstate(all="ignore"):
            dx, *slopes = backward(dy, y, axis, post_op_grads=True, **case, post_ops=chain)
            found = {"x": np.where(finite, dx, 0.0), "operand": slopes[0] if slopes else np.zeros(())}
            check_slopes(total, {"x": x, "operand": operand}, found, rng)


@gradient_names
def test_where_is_where_the_gradient_is_0(name, rng):
    """Also where y is what the forward operator gives there."""
    x, given = rng.normal(size=(6, 40)).astype("float32"), usual(name, rng, (6, 40))
    where = given["where"]
    y, _ = getattr(opgrad, name.removesuffix("_grad"))(x, where=where, logit_scale=0.5, stats=True)
    dx = check_gradient(name, rng.normal(size=x.shape).astype("float32"), y, **given)[0]
    assert (dx[~where] == 0).all()
    assert np.isfinite(dx).all()
