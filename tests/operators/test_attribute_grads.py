"""softmax_grad and log_softmax_grad with attributes on CPUs: through scales, dropout, post-ops and the mask.

As in test_attributes, few forms of calls, and many shapes, strides and numbers for each. The references themselves are
tested against differences of the forward operators' in float64.
"""

import itertools

import numpy as np
import pytest
from accuracy import differences
from post_op_cases import PATTERNS, SHAPE, operand_of
from primitive_attributes import AXES
from primitive_cases import LAYOUTS, Placed, c_order, check_gradient, fortran, gapped, in_records, laid_out, numbers
from samples import bits, cast

import opgrad
from opgrad import post_ops
from opgrad.ops import operators
from opgrad.ops.reference import post_ops as reference_post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import GRADIENT_TYPES

NAMES = ("softmax_grad", "log_softmax_grad")
names = pytest.mark.parametrize("name", NAMES)
LAYOUT_SHAPES = {
    "rows": ((5, 67, 133), -1),
    "transposed": ((5, 67, 13), -1),
    "columns": ((3, 131, 5, 9), 1),
    "split": ((1, 131077), -1),
}
# Those with a gradient; constants that put a kink among the numbers that occur.
ELTWISE = [
    post_ops.abs(), post_ops.clip(-1, 0.25), post_ops.clip_v2(0.1, 2), post_ops.elu(0.7), post_ops.exp(),
    post_ops.gelu_erf(), post_ops.gelu_tanh(), post_ops.hardsigmoid(0.3, 0.2), post_ops.hardswish(),
    post_ops.linear(-3.7, 0.3), post_ops.log(), post_ops.logistic(), post_ops.mish(), post_ops.pow(2, 0.5),
    post_ops.pow(-1.5, 3), post_ops.relu(), post_ops.relu(-0.25), post_ops.soft_relu(-3), post_ops.sqrt(),
    post_ops.square(), post_ops.swish(1.5), post_ops.tanh(),
]  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "max", "min", "select")


def saved(rng, name, shape, axis, dtype):
    """What the forward operator saves."""
    x = numbers(rng, shape, "float64", 1.5)
    return cast(operators()[name.removesuffix("_grad")].reference(x, axis), dtype)


def made(op, operand, rng):
    if op == "select":
        return post_ops.select(rng.random(np.shape(operand)) < 0.5, operand)
    if op == "div":
        operand = np.asarray(operand)
        return post_ops.div(np.where(operand == 0, np.ones_like(operand), operand))
    return getattr(post_ops, op)(operand)


def usual(rng, shape):
    """The attributes of most tests here, with which all calls of a layout and dtype have one form."""
    return {"where": rng.random(shape) < 0.8, "logit_scale": 0.5, "dropout": Dropout(0.3, 3)}


def chains():
    """All post-ops without operands that have a gradient."""
    return [
        [
            post_ops.linear(4, -1), post_ops.elu(0.7), post_ops.gelu_erf(), post_ops.swish(1.5), post_ops.tanh(),
            post_ops.linear(3, 0.1), post_ops.gelu_tanh(), post_ops.mish(), post_ops.abs(), post_ops.linear(1, 0.25),
            post_ops.sqrt(),
        ],
        [
            post_ops.exp(), post_ops.log(), post_ops.logistic(), post_ops.soft_relu(-3), post_ops.square(),
            post_ops.pow(2, 0.5), post_ops.hardswish(), post_ops.hardsigmoid(0.3, 0.2), post_ops.relu(-0.25),
            post_ops.linear(4, -2), post_ops.clip(-1, 0.25), post_ops.clip_v2(-0.9, 2),
        ],
    ]  # fmt: skip


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


def test_all_post_ops_are_here(rng):
    found = {op.name for chain in (*chains(), operand_chain(rng, (3, 5))) for op in chain}
    every = (*reference_post_ops.VALUES, *reference_post_ops.BINARY_VALUES)
    assert found == {name for name in every if reference_post_ops.has_gradient(name)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("chain", [0, 1])
def test_post_ops_without_operands(chain, dtype, rng):
    for shape, scale in itertools.product(((3, 67), (5, 4, 37)), (0.9, -1.0, 20.0)):
        dy, y = numbers(rng, shape, dtype, 1.0), saved(rng, "softmax_grad", shape, -1, dtype)
        given = {"result_scale": scale, "post_ops": chains()[chain], "note": f"{shape}, {scale}"}
        check_gradient("softmax_grad", dy, y, place=Placed, **given)


@names
@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_gradients_of_operands(name, layout, rng):
    """In the order of the post-ops, floating-point ones alone; in one thread the same bits."""
    shape, axis = LAYOUT_SHAPES[layout]
    dy, y = numbers(rng, shape, "float32", 1.0), saved(rng, name, shape, axis, "float32")
    chain = operand_chain(rng, shape)[:: 1 if layout == "rows" else 4]
    given = usual(rng, shape) | {"post_ops": chain, "post_op_grads": True, "result_scale": 2.0, "out_scale": 0.5}
    results = check_gradient(name, dy, y, axis, **given)
    operands = [np.asarray(op.operands[-1]) for op in chain if op.operands]
    assert [each.shape for each in results[1:]] == [each.shape for each in operands if each.dtype.kind != "i"]
    threads = opgrad.get_num_threads()
    opgrad.set_num_threads(1)
    again = getattr(opgrad, name)(dy, y, axis, **given)
    opgrad.set_num_threads(threads)
    assert [bits(each) for each in again] == [bits(each) for each in results]


def test_operands_of_every_broadcast_pattern(rng):
    for pattern, axis in itertools.product(PATTERNS, (-1, 1, (1, 2))):
        dy, y = numbers(rng, SHAPE, "float32", 1.0), saved(rng, "softmax_grad", SHAPE, axis, "float32")
        chain = [post_ops.mul(operand_of(rng, pattern, "float32"))]
        given = {"post_ops": chain, "post_op_grads": True, "note": f"{pattern}, axis {axis}"}
        assert len(check_gradient("softmax_grad", dy, y, axis, **given)) == 2


# --- layouts, lengths, strides and dtypes ----------------------------------------------------------------------------


@names
def test_every_length(name, rng):
    for n in (*range(1, 131), 4095, 4096, 4097, 65537):
        for shape, axis in [((3, n), 1), ((n, 5), 0)]:
            dy, y = numbers(rng, shape, "float32", 1.0), saved(rng, name, shape, axis, "float32")
            check_gradient(name, dy, y, axis, place=Placed, note=f"{shape}", **usual(rng, shape))


@names
def test_short_rows(name, rng):
    """Formulas go through several rows at once where these lie without gaps, which changes no bit."""
    for n in range(1, 34):
        shape = (37, n)
        dy, y, given = numbers(rng, shape, "float32", 1.0), saved(rng, name, shape, -1, "float32"), usual(rng, shape)
        check_gradient(name, dy, y, -1, place=Placed, note=f"{shape}", **given)
        found, apart = (getattr(opgrad, name)(*arrays, **given) for arrays in ((dy, y), map(with_gaps, (dy, y))))
        assert bits(found) == bits(apart), f"{shape}"


def with_gaps(array):
    return laid_out(array, gapped)


@names
def test_every_axis_and_layout(name, rng):
    for (shape, axis), first, second in itertools.product(AXES, LAYOUTS, LAYOUTS):
        dy = laid_out(numbers(rng, shape, "float32", 1.0), first, 1)
        y = laid_out(saved(rng, name, shape, axis, "float32"), second)
        note = f"{shape}, axis {axis}, {first.__name__}, {second.__name__}"
        check_gradient(name, dy, y, axis, place=Placed, note=note, **usual(rng, shape))


def test_long_and_many_rows(rng):
    for shape, axis in [((3000, 37), 1), ((7, 40_000), 1), ((40, 33, 65), 1), ((500, 700), 0), ((20_000, 4), 1)]:
        dy, y = numbers(rng, shape, "float32", 1.0), saved(rng, "softmax_grad", shape, axis, "float32")
        check_gradient("softmax_grad", dy, y, axis, place=Placed, **usual(rng, shape))


ALONE = {
    "where": [{"where": np.arange(33) % 3 > 0}],
    "logit_scale": [{"logit_scale": 0.3}, {"logit_scale": 0}],
    "scales before": [{"result_scale": -2.5}, {"result_scale": 0.0}, {"out_scale": 0.125}, {"out_scale": -3}],
    "dropout": [
        {"dropout": Dropout(0.4, 1, 2)},
        {"dropout": Dropout(1, 1, 2)},
        {"dropout": Dropout(0.5, -1, 2**64 - 3)},
    ],
    "no dropout": [{"dropout": Dropout(0, 1, 2)}],
    "nothing": [{"post_op_grads": True}],
}


@pytest.mark.parametrize("attributes", ALONE.values(), ids=ALONE)
def test_attributes_alone(attributes, rng):
    for each in attributes:
        dy, y = numbers(rng, (5, 33), "float32", 1.0), saved(rng, "softmax_grad", (5, 33), -1, "float32")
        results = check_gradient("softmax_grad", dy, y, note=f"{each}", **each)
        if "post_op_grads" not in each:
            assert bits(check_gradient("softmax_grad", dy, y, place=Placed, **each)[0]) == bits(results[0])


@pytest.mark.parametrize("shape", [(4, 33), (5, 9, 37)], ids=["rows", "columns"])
@pytest.mark.parametrize("number", range(len(GRADIENT_TYPES)))
def test_dtypes(number, shape, rng):
    """Each dtype of dy with others of y and dx."""
    dtypes = [GRADIENT_TYPES[(number + step) % len(GRADIENT_TYPES)] for step in (0, 1, 3)]
    dy, y = numbers(rng, shape, dtypes[0], 1.0), saved(rng, "softmax_grad", shape, 1, dtypes[1])
    check_gradient("softmax_grad", dy, y, 1, out_dtype=dtypes[2], place=Placed, note=f"{dtypes}")


@names
def test_defaults_are_the_plain_form(name, rng):
    dy, y = numbers(rng, (5, 33), "float32"), saved(rng, name, (5, 33), -1, "float32")
    expected = bits(getattr(opgrad, name)(dy, y))
    defaults = {
        "out": None, "out_dtype": None, "where": None, "logit_scale": 1, "result_scale": 1.0, "dropout": None,
        "post_ops": (), "out_scale": np.float64(1), "post_op_grads": False,
    }  # fmt: skip
    assert bits(getattr(opgrad, name)(dy, y, **defaults)) == expected


# --- the references, by differences of the forward operators' in float64 ----------------------------------------------


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


@names
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_references_are_slopes(name, case, rng):
    check_slopes(name, case, [], rng)


@names
@pytest.mark.parametrize("op", [op for op in ELTWISE if op.name not in ("log", "sqrt", "pow")], ids=lambda op: op.name)
def test_references_of_eltwise_are_slopes(name, op, rng):
    check_slopes(name, {"result_scale": 2.0}, [op], rng)


@names
@pytest.mark.parametrize("op", [*BINARY, "log", "sqrt", "pow"])
def test_references_of_operands_are_slopes(name, op, rng):
    if op in BINARY:
        chain = [post_ops.linear(2, 0.1), made(op, rng.uniform(0.5, 2, (3, 1)), rng), post_ops.tanh()]
    else:
        chain = [
            post_ops.square(),
            post_ops.linear(1, 0.5),
            getattr(post_ops, op)(*((1.5, 0.7) if op == "pow" else ())),
        ]
    check_slopes(name, {"result_scale": 2.0, "dropout": Dropout(0.3, 7, 8)}, chain, rng)


def check_slopes(name, case, chain, rng):
    """The references of dx and of the operands' gradients."""
    forward, backward = operators()[name.removesuffix("_grad")].reference, operators()[name].reference
    for axis in (0, 1, (0, 1)):
        x, dy = rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
        where = {"where": case["where"]} if "where" in case else {}
        y = forward(x, axis, logit_scale=case.get("logit_scale", 1.0), **where)
        if "where" in case and not np.isfinite(y).all():
            dy = np.where(np.isfinite(y), dy, 0.0)
            finite = np.isfinite(y)
        else:
            finite = np.ones(y.shape, bool)
        given = case | {"post_ops": chain}

        def value(point, given=given, axis=axis, finite=finite):
            with np.errstate(all="ignore"):
                return np.where(finite, forward(point, axis, **given), 0.0)

        with np.errstate(all="ignore"):
            dx, *operands = backward(dy, y, axis, post_op_grads=True, **given)
        np.testing.assert_allclose(dx[finite], differences(value, x, dy)[finite], rtol=1e-5, atol=1e-7)
        for place, op in enumerate(chain):
            if op.operands:

                def moved(point, x=x, axis=axis, given=given, place=place, op=op):
                    changed = post_ops.PostOp(op.name, operands=(*op.operands[:-1], point))
                    return forward(x, axis, **given | {"post_ops": [*chain[:place], changed, *chain[place + 1 :]]})

                slope = differences(moved, np.asarray(op.operands[-1]), dy)
                np.testing.assert_allclose(operands[0], slope, rtol=1e-5, atol=1e-7)


# --- ties, memory, special numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "shares"), [(post_ops.max, [0.5, 0.0, 1.0]), (post_ops.min, [0.5, 1.0, 0.0])])
def test_a_tie_is_shared(op, shares):
    """max and min give half of the gradient to each of two equal numbers."""
    y = np.array([[0.5, 0.25, 0.25]], np.float32)
    given = {"post_ops": [op(np.array([0.5, 0.5, 0.125], np.float32))], "post_op_grads": True}
    _, gradient = check_gradient("softmax_grad", np.ones((1, 3), np.float32), y, **given)
    np.testing.assert_array_equal(gradient, 1 - np.array(shares))


def test_in_place(rng):
    for shape, axis in [*AXES, ((2, 9000), 1), ((9000, 3), 0)]:
        for layout in (c_order, fortran, in_records):
            dy, y = numbers(rng, shape, "float32", 1.0), saved(rng, "softmax_grad", shape, axis, "float32")
            given = {"axis": axis, **usual(rng, shape)}
            expected = bits(opgrad.softmax_grad(laid_out(dy, layout), laid_out(y, layout), **given))
            for place in range(2):
                both = [laid_out(dy, layout), laid_out(y, layout)]
                assert opgrad.softmax_grad(*both, out=both[place], **given) is both[place]
                assert bits(both[place]) == expected, f"{shape}, {layout.__name__}, {place}"


def test_repeated_elements(rng):
    for shape, axis in AXES:
        y = saved(rng, "softmax_grad", shape, axis, "float32")
        for dy in (numbers(rng, shape[-1:], "float32", 1.0), np.float32(1.0)):
            check_gradient("softmax_grad", np.broadcast_to(dy, shape), y, axis, **usual(rng, shape))


@names
def test_empty_arrays(name):
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0), (2, 3, 0)]:
        for axis in [*range(len(shape)), tuple(range(len(shape)))]:
            x = np.zeros(shape, np.float32)
            check_gradient(name, x, x, axis, out_dtype="bfloat16", place=Placed)
            operand = np.ones((*shape[:-1], 1), np.float32)
            chain = [post_ops.mul(operand), post_ops.add(1.5)]
            _, first, second = opgrad.__dict__[name](x, x, axis, post_ops=chain, post_op_grads=True)
            assert (first.shape, second.shape) == (operand.shape, ())
            assert (first == 0).all()
            assert second == 0


@names
def test_where_is_where_the_gradient_is_0(name, rng):
    """Also where y is what the forward operator gives there."""
    x, given = rng.normal(size=(6, 40)).astype("float32"), usual(rng, (6, 40))
    where = given["where"]
    y, _ = getattr(opgrad, name.removesuffix("_grad"))(x, where=where, logit_scale=0.5, stats=True)
    dx = check_gradient(name, rng.normal(size=x.shape).astype("float32"), y, **given)[0]
    assert (dx[~where] == 0).all()
    assert np.isfinite(dx).all()
