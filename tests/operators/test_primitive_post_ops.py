"""Post-ops through softmax: each of the 34, every broadcast pattern and dtype of an operand, chains and their order."""

import functools
import itertools

import numpy as np
import pytest
from post_op_cases import ELTWISE, PATTERNS, SHAPE, before, made, operand_of, some_chain
from primitive_cases import LAYOUTS, Placed, check_forward, laid_out, numbers, step_of
from samples import bits, cast

import opgrad
from opgrad.contract import DTYPES
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import CONDITION_TYPES, OPERAND_TYPES, TYPES

names = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


def test_all_are_here():
    assert {op.name for op in ELTWISE} | set(post_ops.BINARY) == {*post_ops.VALUES, *post_ops.BINARY_VALUES}
    assert len(post_ops.VALUES) + len(post_ops.BINARY_VALUES) == 34


@names
@pytest.mark.parametrize("op", ELTWISE, ids=lambda op: f"{op.name} {op.alpha} {op.beta}")
def test_eltwise(name, op, rng):
    """Of numbers of either sign, near 0 and large, in both precisions."""
    for source, target in (("float32", "float32"), ("float64", "float64"), ("bfloat16", "float16"), ("int8", "int8")):
        for shape, axis in (((3, 67), 1), ((5, 4, 7), 1), ((9, 5), 1)):
            for scale in (1.0, -1.0, 30.0, -30.0, 1e-3):
                attributes = {"result_scale": scale, "out_dtype": target, "out_scale": step_of(target)}
                x = numbers(rng, shape, source)
                check_forward(name, x, axis, post_ops=[op], note=f"{source}, {shape}, {scale}", **attributes)


@names
@pytest.mark.parametrize("op", post_ops.BINARY)
def test_every_broadcast_pattern(name, op, rng):
    for number, pattern in enumerate(PATTERNS):
        dtype = OPERAND_TYPES[number % len(OPERAND_TYPES)]
        chain = [*before(op), made(op, operand_of(rng, pattern, dtype), rng)]
        x = numbers(rng, SHAPE, "float32")
        for axis in (-1, 1):
            check_forward(name, x, axis, post_ops=chain, note=f"{pattern}, {dtype}, axis {axis}", place=Placed)


@pytest.mark.parametrize("op", post_ops.BINARY)
def test_every_operand_dtype(op, rng):
    for dtype, target in itertools.product(OPERAND_TYPES, ("float32", "float64", "int8")):
        for shape in ((5, 33), (33,), (5, 1), ()):
            chain = [*before(op), made(op, operand_of(rng, shape, dtype), rng)]
            attributes = {"out_dtype": target, "out_scale": step_of(target)}
            check_forward("softmax", numbers(rng, (5, 33), "float32"), post_ops=chain, note=dtype, **attributes)


@pytest.mark.parametrize("dtype", CONDITION_TYPES)
def test_conditions(dtype, rng):
    """Whatever is not 0 is true: NaN, the smallest numbers, negative ones."""
    for shape in ((5, 33), (33,), (5, 1), ()):
        condition = (rng.random(shape) < 0.5).astype(DTYPES[dtype])
        if dtype not in ("bool", "uint8"):
            condition *= operand_of(rng, shape, dtype)
        check_forward("softmax", numbers(rng, (5, 33), "float32"), post_ops=[post_ops.select(condition, -1.5)])
    if dtype.startswith(("float", "bfloat")):
        tiny = np.finfo(np.float32).smallest_subnormal if dtype in ("float32", "float64") else 2.0**-9
        special = cast([np.nan, np.inf, -np.inf, tiny, -tiny, 0.0, -0.0], dtype)
        if dtype == "float8_e4m3fn":
            special[1:3] = 1.0
        y = opgrad.softmax(np.zeros((1, 7), np.float32), post_ops=[post_ops.select(special, -1.0)])
        assert (y[0] > 0).tolist() == [True] * 5 + [False] * 2


@names
def test_numbers_and_lists_as_operands(name, rng):
    x = numbers(rng, (5, 7), "float32")
    for op in post_ops.BINARY:
        for operand in (2, 0.5, -1.25, np.float64(0.3), np.float32(0.3), np.int8(2), [0.5] * 7, [[0.5]] * 5):
            array = np.asarray(operand, np.float64)
            chain, same = ([made(op, each, np.random.default_rng(3))] for each in (operand, array))
            assert bits(check_forward(name, x, post_ops=chain)[0]) == bits(getattr(opgrad, name)(x, post_ops=same))


@names
def test_operands_of_any_layout(name, rng):
    for shape, axis in (((5, 33), 1), ((4, 9, 6), 1), ((3, 5, 40), (0, 1))):
        x = numbers(rng, shape, "float32")
        for layout, dtype in itertools.product(LAYOUTS, ("float32", "bfloat16", "int8")):
            operand = numbers(rng, shape, dtype)
            given = functools.partial(check_forward, name, axis=axis, note=f"{shape}, {layout.__name__}, {dtype}")
            expected = given(x, post_ops=[post_ops.mul(operand)])
            relaid = laid_out(operand, layout, 1)
            assert bits(given(x, post_ops=[post_ops.mul(relaid)])[0]) == bits(expected[0])
            given(laid_out(x, LAYOUTS[1]), post_ops=[post_ops.mul(operand)], place=Placed)
            given(x, post_ops=[post_ops.add(np.broadcast_to(operand[:1], shape)), post_ops.mul(relaid)])


@names
def test_one_array_may_be_operand_several_times(name, rng):
    x = numbers(rng, (5, 33), "float32")
    chain = [post_ops.add(x), post_ops.mul(x), post_ops.select(x, x)]
    check_forward(name, x, post_ops=chain)
    assert bits(getattr(opgrad, name)(x, post_ops=chain)) == bits(getattr(opgrad, name)(x, post_ops=tuple(chain)))


def test_an_operation_may_change_between_calls(rng):
    """Its constants are part of the call, and operands are read anew."""
    x, operand = numbers(rng, (5, 33), "float32"), np.ones(33, np.float32)
    op, scale = post_ops.add(operand), post_ops.linear(1.0, 0.5)
    first = opgrad.softmax(x, post_ops=[op, scale])
    operand += 1
    scale.alpha = 2.0
    second = opgrad.softmax(x, post_ops=[op, scale])
    np.testing.assert_allclose(second, 2 * (first + 0.5) + 0.5, rtol=1e-6)


# --- chains ----------------------------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 32])
def test_chains(name, length, rng):
    for shape, axis in [((5, 33), 1), ((4, 9, 6), 1), ((2, 3, 4, 9), (1, 2)), ((3, 5000), 1), ((5000, 3), 0)]:
        for source, target in (("float32", "float32"), ("float64", "float64"), ("float16", "uint8")):
            chain = some_chain(rng, shape, length)
            dropout = Dropout(0.3, 5, length)
            attributes = {"out_dtype": target, "out_scale": step_of(target), "dropout": dropout, "result_scale": 3.0}
            note = f"{shape}, {source} to {target}, {[op.name for op in chain]}"
            check_forward(name, numbers(rng, shape, source), axis, post_ops=chain, note=note, **attributes)


def test_thirty_two_operands(rng):
    """More arrays than native code takes one by one."""
    x = numbers(rng, (3, 40), "float32")
    operands = [rng.normal(size=shape).astype("float32") for shape in ((3, 40), (40,), (3, 1), ()) for _ in range(8)]
    check_forward("softmax", x, post_ops=[post_ops.add(each) for each in operands], place=Placed)
    chosen = [post_ops.select(each > 0, each) for each in operands]
    check_forward("softmax", x, post_ops=chosen, stats=True, save=True, dropout=Dropout(0.5, mask=True), place=Placed)
    check_forward("softmax", x, post_ops=chosen, out_dtype="int8")


def test_order():
    """result_scale, dropout, the operations one after the other, out_scale."""
    x = np.zeros((1, 1), np.float32)
    double, squared = post_ops.linear(2.0, 1.0), post_ops.square()
    for chain, dropout, expected in [
        ([double, squared], None, 49 / 7), ([squared, double], None, 19 / 7), ([double, squared], Dropout(1.0), 1 / 7),
        ([squared, double, double], Dropout(1.0), 3 / 7), ([], None, 3 / 7),
    ]:  # fmt: skip
        given = {"result_scale": 3.0, "out_scale": 7.0, "dropout": dropout, "post_ops": chain}
        np.testing.assert_allclose(opgrad.softmax(x, **given), expected, rtol=1e-6)
    y, saved = opgrad.softmax(x, result_scale=3.0, post_ops=[double], save=True)
    assert (y.item(), saved.item()) == (7.0, 1.0)


@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit(rng):
    for shape, axis in (((3000, 37), 1), ((500, 700), 0)):
        x, operand = numbers(rng, shape, "float32"), numbers(rng, shape[1:], "bfloat16")
        chain = [post_ops.mul(operand), post_ops.gelu_erf(), post_ops.add(x)]
        found = []
        for count in (1, 2, 4):
            opgrad.set_num_threads(count)
            found.append(bits(opgrad.softmax(x, axis, post_ops=chain, out_dtype="float16")))
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("target", TYPES)
def test_special_numbers_in_operands(target, rng):
    """NaN, infinities and zeros in every place of an operand."""
    for special in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40):
        operand = rng.normal(size=(37, 37)).astype("float32")
        operand[np.arange(37), np.arange(37)] = special
        for op in post_ops.BINARY:
            chain = [made(op, operand, rng)]
            attributes = {"out_dtype": target, "out_scale": step_of(target)}
            check_forward("softmax", numbers(rng, (37, 37), "float32"), post_ops=chain, note=f"{op}", **attributes)
