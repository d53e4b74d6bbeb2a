"""Softmax with post-ops on CUDA: every function, dtype and shape of operands, and chains."""

import inspect
import itertools

import numpy as np
import pytest
from accuracy import ulp
from post_op_cases import ELTWISE, PATTERNS, SHAPE, before, made, operand_of, some_chain
from primitive_cases import (
    Placed,
    check_forward,
    numbers,
    step_of,
)
from samples import cast

pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl
from cuda_backend import NAMES, ON_GPU, call_kernels, names, program, some

import opgrad
from opgrad.call.arrays import expanded
from opgrad.contract import DTYPES
from opgrad.ops import operators
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import CONDITION_TYPES, OPERAND_TYPES

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    call_kernels(monkeypatch)


@pytest.mark.parametrize("op", ELTWISE, ids=lambda op: f"{op.name} {op.alpha} {op.beta}")
def test_eltwise(op, rng):
    """Of numbers of either sign, near 0 and large, in both precisions."""
    cases = itertools.product(NAMES, ("float32", "float64"), (1.0, -1.0, 30.0, -30.0, 1e-3))
    for name, dtype, scale in some(cases, f"{op.name} {op.alpha}", 7):
        x = numbers(rng, (3, 67), dtype)
        check_forward(name, x, post_ops=[op], result_scale=scale, note=f"{dtype}, {scale}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_err_by_few_units_in_the_last_place(dtype):
    """In the tails too, where most formulas cancel."""
    s = cast(np.concatenate([np.linspace(-12, 12, 400), -np.logspace(-6, 1, 50), np.logspace(-6, 1, 50)]), dtype)
    zeros, wide = np.zeros((s.size, 1), dtype), s.astype(np.float64)
    for name in ("elu", "gelu_erf", "logistic", "mish", "soft_relu", "swish", "tanh", "exp"):
        op = getattr(post_ops, name)()
        exact = post_ops.apply(op, wide)
        given = opgrad.softmax(zeros, result_scale=0.0, post_ops=[post_ops.add(s.reshape(-1, 1)), op]).ravel()
        if dtype == "float32":  # the reference has no more digits than float64, and cancels in places
            wrong = np.abs(given - exact) / ulp(exact, np.dtype(dtype))
            assert wrong.max() < 12, f"{name}: {wrong.max():.3g} ulp at {s[wrong.argmax()]}"
        else:
            np.testing.assert_allclose(given, exact, 1e-13, 1e-15, err_msg=name)


def test_no_kernel_is_compiled_for_the_value_of_a_constant():
    """In float64 all of its digits reach the kernel, whatever its size, among the numbers that it takes at run time."""
    x, kernels = np.zeros((1, 1)), set()
    for beta in (0.1, -1 / 3, 1.0, 0.0, 5e-324, -1.7e308, np.inf, np.nan):
        chain = [post_ops.mul(0.0), post_ops.linear(1.0, beta)]
        np.testing.assert_array_equal(opgrad.softmax(x, post_ops=chain), [[beta]])
        (launch,) = program(*expanded(operators()["softmax"], {"x": x, "post_ops": chain})).launches
        kinds = inspect.get_annotations(launch.kernel.fn)
        fixed = [value for name, value in launch.arguments.items() if kinds.get(name) is tl.constexpr]
        kernels.add(repr([fixed, list(map(type, launch.arguments["constants"]))]))
    assert len(kernels) == 1


def test_powers_follow_the_rules_of_c(rng):
    special = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, np.inf, -np.inf, np.nan]
    exponents = [0.0, 1.0, -1.0, 2.0, 3.0, -3.0, 0.5, -0.5, 1e30, np.inf, -np.inf, np.nan]
    s = np.array(special, np.float32).reshape(-1, 1)
    for b in exponents:
        chain = [post_ops.mul(0.0), post_ops.add(s), post_ops.pow(1.0, b)]
        given = opgrad.softmax(np.zeros(s.shape, np.float32), post_ops=chain)
        with np.errstate(all="ignore"):
            # With a single exponent of 0.5 NumPy takes the square root.
            expected = np.power(s + 0.0, np.full(s.shape, b, np.float32))
        np.testing.assert_allclose(given, expected, 1e-6, err_msg=f"{b}")


@pytest.mark.parametrize("op", post_ops.BINARY)
def test_every_broadcast_pattern(op, rng):
    for number, pattern in some(enumerate(PATTERNS), op, 8):
        dtype = OPERAND_TYPES[number % len(OPERAND_TYPES)]
        chain = [*before(op), made(op, operand_of(rng, pattern, dtype), rng)]
        name, axis = NAMES[number % 2], (-1, 1, 0)[number % 3]
        x = numbers(rng, SHAPE, "float32")
        check_forward(name, x, axis, post_ops=chain, note=f"{pattern}, {dtype}, axis {axis}", place=Placed)


@pytest.mark.parametrize("op", post_ops.BINARY)
def test_every_operand_dtype(op, rng):
    for dtype, target in some(itertools.product(OPERAND_TYPES, ("float32", "float64")), op, 4):
        chain = [*before(op), made(op, operand_of(rng, (5, 33), dtype), rng)]
        check_forward("softmax", numbers(rng, (5, 33), "float32"), post_ops=chain, note=dtype, out_dtype=target)


@pytest.mark.parametrize("dtype", CONDITION_TYPES)
def test_conditions(dtype, rng):
    condition = (rng.random((5, 33)) < 0.5).astype(DTYPES[dtype])
    check_forward("softmax", numbers(rng, (5, 33), "float32"), post_ops=[post_ops.select(condition, -1.5)])


@pytest.mark.parametrize("length", [2, 5, 32])
@names
def test_chains(name, length, rng):
    for shape, axis in some([((5, 33), 1), ((4, 9, 6), 1), ((2, 3, 4, 9), (1, 2))], name, 3, length):
        for source, target in (("float32", "float32"), ("float64", "float64"), ("float16", "uint8")):
            chain = some_chain(rng, shape, length)
            attributes = {"out_dtype": target, "out_scale": step_of(target), "dropout": Dropout(0.3, 5, length)}
            note = f"{shape}, {source} to {target}, {[op.name for op in chain]}"
            x = numbers(rng, shape, source)
            check_forward(name, x, axis, post_ops=chain, note=note, result_scale=3.0, **attributes)


def test_thirty_two_operands(rng):
    operands = [rng.normal(size=shape).astype("float32") for shape in ((3, 40), (40,), (3, 1), ()) for _ in range(8)]
    chosen = [post_ops.select(each > 0, each) for each in operands]
    x = numbers(rng, (3, 40), "float32")
    check_forward("softmax", x, post_ops=chosen, stats=True, save=True, dropout=Dropout(0.5, mask=True), place=Placed)
