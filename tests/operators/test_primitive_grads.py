"""softmax_grad and log_softmax_grad in their general form: through scales, dropout, post-ops and the mask."""

import functools
import itertools

import numpy as np
import pytest
from primitive_cases import LAYOUTS, Placed, c_order, check_gradient, fortran, in_records, laid_out, numbers
from samples import bits, cast

import opgrad
from opgrad import post_ops
from opgrad.contract import DTYPES
from opgrad.ops import operators
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import GRADIENT_TYPES, OPERAND_TYPES

NAMES = ("softmax_grad", "log_softmax_grad")
names = pytest.mark.parametrize("name", NAMES)
AXES = [
    ((3, 40), -1), ((3, 70), 1), ((33, 5), 0), ((7, 3, 5), 0), ((4, 9, 6), 1), ((2, 5, 19), -2), ((2, 3, 4, 5), (1, 2)),
    ((3, 4, 30), (1, 2)), ((5, 7, 3), (0, 1)), ((6, 11), (0, 1)), ((50,), 0), ((2, 1, 9, 1, 4), 2), ((1, 130), -1),
]  # fmt: skip
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


def operand_of(rng, shape, dtype):
    array = rng.integers(-4, 5, shape) if dtype == "int32" else numbers(rng, shape, dtype)
    return np.asarray(array).astype(DTYPES[dtype])


def some_attributes(rng, shape):
    often = rng.choice([0.0, 0.3, 1.0])
    choices = {
        "where": lambda: rng.random(shape[int(rng.integers(2)) :]) < 0.7,
        "logit_scale": lambda: float(rng.uniform(-2, 2)),
        "result_scale": lambda: float(rng.choice([-3.5, 0.3, 20.0])),
        "dropout": lambda: Dropout(float(rng.uniform(0, 1)), int(rng.integers(2**62)), 5),
        "out_scale": lambda: float(rng.uniform(0.1, 2)),
        "post_ops": lambda: some_chain(rng, shape, int(rng.integers(1, 5))),
    }
    return {key: choose() for key, choose in choices.items() if rng.random() < often}


def some_chain(rng, shape, length):
    chain = []
    for _ in range(length):
        if rng.random() < 0.5:
            chain.append(ELTWISE[rng.integers(len(ELTWISE))])
        else:
            rank = int(rng.integers(0, len(shape) + 1))
            pattern = [size if rng.random() < 0.5 else 1 for size in shape[len(shape) - rank :]]
            dtype = str(rng.choice(OPERAND_TYPES))
            chain.append(made(BINARY[rng.integers(7)], operand_of(rng, pattern, dtype), rng))
    return chain


@names
@pytest.mark.parametrize("dtypes", list(itertools.product(GRADIENT_TYPES, repeat=3)), ids="-".join)
def test_dtypes_layouts_and_attributes(dtypes, name, rng):
    """Every mix of dy, y and dx; axis, layouts and attributes are drawn for each call."""
    for _ in range(3):
        shape, axis = AXES[rng.integers(len(AXES))]
        layouts = [LAYOUTS[rng.integers(len(LAYOUTS))] for _ in range(3)]
        dy = laid_out(numbers(rng, shape, dtypes[0], 1.0), layouts[0], 1)
        y = laid_out(saved(rng, name, shape, axis, dtypes[1]), layouts[1])
        dy.flags.writeable = y.flags.writeable = False
        attributes, place = some_attributes(rng, shape), functools.partial(Placed, layout=layouts[2])
        note = f"{shape}, axis {axis}, {[each.__name__ for each in layouts]}, {attributes}"
        check_gradient(name, dy, y, axis, out_dtype=dtypes[2], place=place, note=note, **attributes)


@names
def test_every_length(name, rng):
    for n in (*range(1, 131), 4095, 4096, 4097, 65535, 65537):
        for shape, axis in [((3, n), 1), ((n, 5), 0)]:
            dy, y = numbers(rng, shape, "bfloat16", 1.0), saved(rng, name, shape, axis, "float32")
            attributes = {"where": rng.random(shape) < 0.8, "logit_scale": 0.5, "dropout": Dropout(0.3, n)}
            check_gradient(name, dy, y, axis, out_dtype="float32", place=Placed, note=f"{shape}", **attributes)


@names
@pytest.mark.parametrize("dtype", GRADIENT_TYPES)
def test_attributes_alone(name, dtype, rng):
    shape = (5, 33)
    dy, y = numbers(rng, shape, dtype, 1.0), saved(rng, name, shape, -1, dtype)
    for attributes in (
        {"where": np.arange(33) % 3 > 0}, {"where": rng.random((5, 1)) < 0.5}, {"logit_scale": 0.3}, {"logit_scale": 0},
        {"result_scale": -2.5}, {"result_scale": 0.0}, {"out_scale": 0.125}, {"out_scale": -3},
        {"dropout": Dropout(0.4, 1, 2)}, {"dropout": Dropout(0, 1, 2)}, {"dropout": Dropout(1, 1, 2, mask=True)},
        {"dropout": Dropout(0.5, -1, 2**64 - 3)}, {"out_dtype": "float64"}, {"post_op_grads": True},
    ):  # fmt: skip
        results = check_gradient(name, dy, y, note=f"{attributes}", **attributes)
        if "post_op_grads" not in attributes:
            assert bits(check_gradient(name, dy, y, place=Placed, **attributes)[0]) == bits(results[0])


@names
def test_defaults_are_the_plain_form(name, rng):
    dy, y = numbers(rng, (5, 33), "float32"), saved(rng, name, (5, 33), -1, "float32")
    expected = bits(getattr(opgrad, name)(dy, y))
    defaults = {
        "out": None, "out_dtype": None, "where": None, "logit_scale": 1, "result_scale": 1.0, "dropout": None,
        "post_ops": (), "out_scale": np.float64(1), "post_op_grads": False,
    }  # fmt: skip
    assert bits(getattr(opgrad, name)(dy, y, **defaults)) == expected


# --- post-ops --------------------------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("op", ELTWISE, ids=lambda op: f"{op.name} {op.alpha} {op.beta}")
def test_eltwise(name, op, rng):
    for shape, axis in (((3, 67), 1), ((9, 5), 0)):
        for dtype, scale in itertools.product(("float32", "float64", "float16"), (1.0, -1.0, 20.0, -5.0)):
            dy, y = numbers(rng, shape, dtype, 1.0), saved(rng, name, shape, axis, dtype)
            given = {"result_scale": scale, "post_ops": [op], "note": f"{dtype}, {scale}"}
            check_gradient(name, dy, y, axis, **given)
            check_gradient(name, dy, y, axis, dropout=Dropout(0.5, 3), out_scale=2.0, **given)


@names
@pytest.mark.parametrize("op", BINARY)
def test_operands(name, op, rng):
    """Every broadcast pattern and dtype; the gradient has the operand's shape and dtype."""
    shape = (2, 3, 4, 9)
    patterns = [
        pattern for rank in range(5) for pattern in itertools.product(*((1, size) for size in shape[4 - rank :]))
    ]  # fmt: skip
    for number, pattern in enumerate(patterns):
        for axis, dtype in ((-1, OPERAND_TYPES[number % 9]), (1, "float32"), ((1, 2), "bfloat16")):
            dy, y = numbers(rng, shape, "float32", 1.0), saved(rng, name, shape, axis, "float32")
            chain = [made(op, operand_of(rng, pattern, dtype), rng)]
            given = {"post_ops": chain, "post_op_grads": True, "note": f"{pattern}, {dtype}, axis {axis}"}
            results = check_gradient(name, dy, y, axis, **given)
            assert len(results) == 1 + (dtype not in ("int8", "uint8", "int32"))


@names
@pytest.mark.parametrize("dtype", OPERAND_TYPES)
def test_every_operand_dtype(name, dtype, rng):
    for op, more in itertools.product(BINARY, ({}, {"out_dtype": "float64"}, {"dropout": Dropout(0.5, 2)})):
        dy, y = numbers(rng, (5, 33), "float32", 1.0), saved(rng, name, (5, 33), -1, "float32")
        chain = [post_ops.linear(2, 0.1), made(op, operand_of(rng, (33,), dtype), rng), post_ops.tanh()]
        check_gradient(name, dy, y, post_ops=chain, post_op_grads=True, note=f"{op}, {more}", **more)


@names
def test_gradients_of_several_operands(name, rng):
    """In the order of the post-ops, floating-point ones alone."""
    shape = (4, 5, 6)
    a, b, c = (rng.normal(size=each).astype("float32") for each in ((5, 1), (6,), shape))
    number, whole = 1.5, rng.integers(-3, 4, shape).astype("int32")
    chain = [
        post_ops.mul(a), post_ops.add(b), post_ops.tanh(), post_ops.mul(whole), post_ops.select(whole, c),
        post_ops.mul(number), post_ops.mul(a), post_ops.add(2),
    ]  # fmt: skip
    dy, y = numbers(rng, shape, "float64", 1.0), saved(rng, name, shape, 1, "float64")
    results = check_gradient(name, dy, y, 1, post_ops=chain, post_op_grads=True)
    assert [each.shape for each in results] == [shape, a.shape, b.shape, c.shape, (), a.shape]
    assert [each.dtype.name for each in results[1:]] == ["float32", "float32", "float32", "float64", "float32"]


@names
@pytest.mark.parametrize("length", [2, 5, 32])
def test_chains(name, length, rng):
    for shape, axis in [((5, 33), 1), ((4, 9, 6), 1), ((3, 5000), 1), ((5000, 3), 0)]:
        for dtype in ("float32", "float64"):
            chain = some_chain(rng, shape, length)
            dy, y = numbers(rng, shape, dtype, 1.0), saved(rng, name, shape, axis, dtype)
            note = f"{shape}, {dtype}, {[op.name for op in chain]}"
            given = {"post_ops": chain, "post_op_grads": True, "dropout": Dropout(0.2, 8), "result_scale": 2.0}
            check_gradient(name, dy, y, axis, note=note, **given)


# --- the references, by differences of the forward operators' in float64 ----------------------------------------------


def differences(function, point, upstream):
    """d sum(upstream * function(point)) / d point."""
    slope = np.empty(point.shape)
    for place in np.ndindex(point.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = point.copy()
            moved[place] += step
            ends.append(np.sum(upstream * function(moved)))
        slope[place] = (ends[0] - ends[1]) / 2e-6
    return slope


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
    """The references of dx and of the operands' gradients, and the operator itself."""
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
        check_gradient(name, dy, y, axis, post_op_grads=True, **given)


# --- ties, memory, special numbers -----------------------------------------------------------------------------------


@names
def test_a_tie_is_shared(name):
    """max and min give half of the gradient to each of two equal numbers."""
    y = np.array([[0.5, 0.25, 0.25]], np.float32)
    operand = np.array([0.5, 0.5, 0.125], np.float32)
    for op, shares in ((post_ops.max(operand), [0.5, 0.0, 1.0]), (post_ops.min(operand), [0.5, 1.0, 0.0])):
        given = {"post_ops": [op], "post_op_grads": True}
        _, gradient = check_gradient(name, np.ones((1, 3), np.float32), y, **given)
        np.testing.assert_array_equal(gradient, 1 - np.array(shares))


@names
def test_in_place(name, rng):
    for shape, axis in [*AXES, ((2, 9000), 1), ((9000, 3), 0)]:
        for dtype, layout in itertools.product(GRADIENT_TYPES, (c_order, fortran, in_records)):
            dy, y = numbers(rng, shape, dtype, 1.0), saved(rng, name, shape, axis, dtype)
            given = {"axis": axis, "logit_scale": 0.5, "dropout": Dropout(0.5, 1), "post_ops": [post_ops.square()]}
            expected = bits(getattr(opgrad, name)(laid_out(dy, layout), laid_out(y, layout), **given))
            for place in range(2):
                both = [laid_out(dy, layout), laid_out(y, layout)]
                assert getattr(opgrad, name)(*both, out=both[place], **given) is both[place]
                assert bits(both[place]) == expected, f"{shape}, {dtype}, {layout.__name__}, {place}"
    dy = numbers(rng, (5, 33), "float32")
    expected = bits(getattr(opgrad, name)(dy, dy.copy(), logit_scale=0.5))
    assert bits(getattr(opgrad, name)(dy, dy, logit_scale=0.5, out=dy)) == expected


@names
def test_repeated_elements(name, rng):
    for shape, axis in AXES:
        dy, y = numbers(rng, shape[-1:], "float32", 1.0), saved(rng, name, shape, axis, "float32")
        check_gradient(name, np.broadcast_to(dy, shape), y, axis, logit_scale=0.5)
        check_gradient(name, np.broadcast_to(np.float32(1.0), shape), y, axis, out_dtype="float64")


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
    x, where = rng.normal(size=(6, 40)).astype("float32"), rng.random((6, 40)) < 0.6
    forward = getattr(opgrad, name.removesuffix("_grad"))
    dy, y = rng.normal(size=x.shape).astype("float32"), forward(x, where=where)
    dx = check_gradient(name, dy, y, where=where)[0]
    assert (dx[~where] == 0).all()
    assert np.isfinite(dx).all()


@pytest.mark.usefixtures("threads")
@names
def test_threads_change_no_bit(name, rng):
    for shape, axis in [((3000, 37), 1), ((7, 40_000), 1), ((40, 33, 65), 1), ((500, 700), 0), ((20_000, 4), 1)]:
        dy, y = numbers(rng, shape, "float32", 1.0), saved(rng, name, shape, axis, "bfloat16")
        operand = numbers(rng, shape[1:], "float32")
        given = {"post_ops": [post_ops.mul(operand), post_ops.gelu_tanh()], "post_op_grads": True, "out_scale": 2.0}
        given |= {"dropout": Dropout(0.3, 9), "where": rng.random(shape) < 0.9}
        found = []
        for count in (1, 2, 4):
            opgrad.set_num_threads(count)
            found.append([bits(each) for each in getattr(opgrad, name)(dy, y, axis, **given)])
        assert found[0] == found[1] == found[2], shape
