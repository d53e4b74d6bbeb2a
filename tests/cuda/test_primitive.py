"""Softmax in its general form on CUDA, and its gradients: dtypes, layouts, attributes, post-ops, special numbers.

Results are held against the ranges of `primitive_cases`, as the CPU's are.
"""

import functools
import inspect
import itertools

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl
from accuracy import ulp
from cuda_backend import (
    EVERYTHING,
    FROM_PTX,
    NAMES,
    ON_GPU,
    WAYS,
    call_kernels,
    gradients,
    limits,
    names,
    program,
    some,
)
from guards import Placed, c_order, fortran, laid_out, permuted
from post_op_cases import ELTWISE, PATTERNS, SHAPE, before, made, operand_of, some_chain
from primitive_attributes import AXES, flag, forms, some_attributes, some_where, specials
from primitive_cases import check_forward, check_gradient, numbers, step_of
from samples import bits, cast

import opgrad
from opgrad import post_ops
from opgrad.call.arrays import expanded
from opgrad.contract import DTYPES
from opgrad.ops import operators
from opgrad.ops.reference import post_ops as reference_post_ops
from opgrad.ops.reference.dropout import Dropout, keep_mask
from opgrad.ops.reference.primitive import CONDITION_TYPES, GRADIENT_TYPES, OPERAND_TYPES, TYPES

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    call_kernels(monkeypatch)


@pytest.fixture
def lowered():
    """Rows of more than 128 elements are long, of fewer in gradients."""
    with limits(row=256, tile=32, step=512):
        yield


# --- dtypes, attributes, layouts -------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("source", TYPES)
def test_dtypes_and_attributes(source, name, inf_as_zero, rng):
    """Every pair of dtypes; axis, layouts and attributes are drawn for each call."""
    for target in some(TYPES, f"{name}{inf_as_zero}", 4, TYPES.index(source)):
        shape, axis = AXES[rng.integers(len(AXES))]
        first, second = (WAYS[rng.integers(len(WAYS))] for _ in range(2))
        x = laid_out(numbers(rng, shape, source), first)
        attributes = some_attributes(rng, shape, target) | flag(inf_as_zero)
        place = functools.partial(Placed, layout=second)
        note = f"{shape}, axis {axis}, {first.__name__} to {second.__name__}, {attributes}"
        check_forward(name, x, axis, out_dtype=target, place=place, note=note, **attributes)


@pytest.mark.parametrize("layout", WAYS, ids=lambda each: each.__name__)
@names
def test_layouts(layout, name, rng):
    """Of every operand, and of all results, with nothing written between their elements or around them."""
    shape, place = (4, 9, 6), functools.partial(Placed, layout=layout)
    x, operand, where = numbers(rng, shape, "float16"), numbers(rng, shape, "bfloat16"), rng.random(shape) < 0.8
    given = {"stats": True, "save": True, "dropout": Dropout(0.3, 4, mask=True), "out_dtype": "int8", "out_scale": 0.01}
    for axis in some((0, 1, 2, (0, 1)), name + layout.__name__, 4):
        note = f"axis {axis}"
        same = {**given, "where": where, "post_ops": [post_ops.add(operand)]}
        expected = check_forward(name, x, axis, note=note, **same)
        other = {**given, "where": laid_out(where, layout), "post_ops": [post_ops.add(laid_out(operand, layout))]}
        for again in (
            check_forward(name, x, axis, note=note, place=place, **other),
            check_forward(name, laid_out(x, layout), axis, note=note, place=place, **same),
        ):
            assert bits(again[-1]) == bits(expected[-1]), note


def test_repeated_elements(rng):
    for shape, axis in some(AXES[:7], "repeated", 2):
        for repeated in range(len(shape)):
            one = numbers(rng, [1 if each == repeated else size for each, size in enumerate(shape)], "bfloat16")
            x = np.broadcast_to(one, shape)
            check_forward("softmax", x, axis, out_dtype="float64", note=f"{shape}, {repeated}")


def test_many_dimensions(rng):
    shape = (1, 3, 2, 1, 2, 1, 3, 1, 2, 1, 2, 2)
    where, operand = rng.random(shape[3:]) < 0.8, numbers(rng, [1, 1, 2, *shape[3:6], 1, 1, 1, 1, 2, 1], "float32")
    cases = itertools.product((1, 6, (3, 4, 5, 6)), (c_order, fortran, permuted))
    for axis, layout in some(cases, "many dimensions", 4):
        x = laid_out(numbers(rng, shape, "float32"), layout)
        given = {"where": where, "post_ops": [post_ops.add(operand)], "dropout": Dropout(0.5, 1, mask=True)}
        check_forward("softmax", x, axis, note=f"axis {axis}, {layout.__name__}", **given)


@pytest.mark.skipif(ON_GPU, reason="copies 2 GiB; test_gpu has tensors of this size")
def test_offsets_of_more_than_31_bits():
    """The elements of a row lie 2^31 bytes apart."""
    memory = np.zeros((1 << 31) + 4, np.int8)
    x = np.lib.stride_tricks.as_strided(memory, (3, 2), (1, 1 << 31))
    x[...] = np.arange(6).reshape(3, 2)
    check_forward("softmax", x, stats=True, dropout=Dropout(0.5, 3, mask=True))


@forms
def test_empty_arrays(name, inf_as_zero):
    given = {"stats": True, "save": True, "dropout": Dropout(0.5, mask=True), "where": np.True_}
    for shape, axis in [((0,), 0), ((0, 3), 1), ((3, 0), 1), ((0, 3), 0), ((2, 0, 4), 1), ((2, 0, 4), 2)]:
        x = np.zeros(shape, np.float16)
        check_forward(name, x, axis, out_dtype="int8", place=Placed, **given, **flag(inf_as_zero))


@forms
def test_in_place(name, inf_as_zero, rng):
    cases = itertools.product([((5, 33), 1), ((4, 9, 6), 1), ((2, 300), 1)], WAYS)
    for (shape, axis), layout in some(cases, f"{name}{inf_as_zero}", 3):
        for dtype in ("float32", "float8_e5m2"):
            x = laid_out(numbers(rng, shape, dtype), layout)
            given = {"axis": axis, "out_dtype": dtype, "out_scale": step_of(dtype), **flag(inf_as_zero)}
            apart = getattr(opgrad, name)(x, out=Placed(shape, dtype, layout).array, **given)
            assert getattr(opgrad, name)(x, out=x, **given) is x
            assert bits(x) == bits(apart), f"{shape}, {dtype}, {layout.__name__}"


# --- lengths ---------------------------------------------------------------------------------------------------------


@forms
def test_lengths(name, inf_as_zero, rng):
    for n in some((1, 2, 3, 8, 15, 16, 17, 64, 65, 257), f"{name}{inf_as_zero}", 2):
        for shape, axis in (((3, n), 1), ((n, 5), 0)):
            target = TYPES[rng.integers(8)]
            attributes = {"out_scale": step_of(target), "dropout": Dropout(0.2, n, mask=True)} | flag(inf_as_zero)
            check_forward(name, numbers(rng, shape, "float32"), axis, out_dtype=target, note=f"{shape}", **attributes)


@forms
def test_long_rows(name, inf_as_zero, rng, lowered):
    """Rows that are gone over twice: along memory, across it, all -inf, in place."""
    cases = itertools.product([((2, 515), 1), ((2, 512), 1), ((150, 2), 0)], ("float32", "int8"))
    for (shape, axis), source in some(cases, f"{name}{inf_as_zero}", 3):
        x, operand = numbers(rng, shape, source), numbers(rng, shape[1:], "float32")
        given = {"stats": True, "save": True, "dropout": Dropout(0.3, 5, 7, mask=True), "where": some_where(rng, shape)}
        given |= {"post_ops": [post_ops.mul(operand), post_ops.tanh()]} | flag(inf_as_zero)
        check_forward(name, x, axis, out_dtype="float16", place=Placed, note=f"{shape}", **given)
        given["where"] = np.arange(shape[1 - axis]).reshape((-1, 1) if axis else (1, -1)) > 1
        check_forward(name, x, axis, out_dtype="float32", place=Placed, note=f"{shape}", **given)
    x = numbers(rng, (1, 515), "float32")
    expected = bits(getattr(opgrad, name)(x, logit_scale=0.5))
    assert bits(getattr(opgrad, name)(x, logit_scale=0.5, out=x)) == expected


# --- conversions -----------------------------------------------------------------------------------------------------


def stored_as(values, dtype):
    """The numbers after a conversion by the kernel that stores them: 0 times a probability, plus them."""
    ones = np.zeros((values.size, 1), values.dtype)
    given = {"out_dtype": dtype, "result_scale": 0.0, "post_ops": [post_ops.add(values.reshape(-1, 1))]}
    return opgrad.softmax(ones, **given).ravel()


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", ["float8_e5m2", "float8_e4m3fn"])
def test_float8_is_rounded_as_ml_dtypes_does(source, target, rng):
    """All numbers of the type, what lies between them and beside that, and what is too large."""
    every = np.arange(128, dtype=np.uint8).view(DTYPES[target]).astype(np.float64)
    every = every[np.isfinite(every)]
    between = np.append((every[1:] + every[:-1]) / 2, every[-1] + (every[-1] - every[-2]) / 2)
    step = 2.0**-21 if source == "float32" else 2.0**-50
    values = np.concatenate([every, between, between * (1 + step), between * (1 - step), [1e-30, 1e9, np.inf, np.nan]])
    values = np.concatenate([values, -values, np.exp2(rng.uniform(-20, 18, 500))]).astype(source)
    given, expected = stored_as(values, target), cast(values, target)
    np.testing.assert_array_equal(given.astype("f4"), expected.astype("f4"))
    assert (np.signbit(given.astype("f4")) == np.signbit(values))[np.isfinite(values) & (values != 0)].all()


@pytest.mark.parametrize("source", ["float32", "float64"])
def test_integers_are_rounded_to_even_and_saturate(source, rng):
    values = np.concatenate([np.arange(-520, 521) / 2, rng.uniform(-300, 300, 500), [1e30, -1e30, np.inf, -np.inf]])
    values = cast(np.concatenate([values, np.nextafter(values, 0)]), source)
    for target in ("int8", "uint8"):
        info = np.iinfo(target)
        np.testing.assert_array_equal(stored_as(values, target), np.clip(np.rint(values), info.min, info.max))
    assert stored_as(np.array([np.nan], source), "int8") == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_is_read(dtype, rng):
    """Of narrow types all, NaN and infinities among them."""
    stored = bytes(range(256)) if DTYPES[dtype].itemsize == 1 else rng.bytes(4000)
    values = np.frombuffer(stored, DTYPES[dtype])
    wide = cast(values, "float64")
    ones = np.zeros((values.size, 1), np.float64)
    given = opgrad.softmax(ones, result_scale=0.0, post_ops=[post_ops.add(values.reshape(-1, 1))]).ravel()
    np.testing.assert_array_equal(given, wide)


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_decides_by_the_place_in_c_order(rng):
    """Whether or not four neighbours are decided at a time, in rows that lie anywhere."""
    for shape, axes in [
        ((6, 7, 8), (0, 1, 2, (0, 1), (1, 2))),
        ((5, 64), (0, 1)),
        ((3, 36), (1,)),
        ((2, 3, 4, 5), (2,)),
    ]:
        x = numbers(rng, shape, "float32")
        cases = itertools.product(axes, WAYS, (False, True))
        for axis, layout, repeated in some(cases, f"{shape}", 6):
            dropout = Dropout(0.5, int(rng.integers(-(2**63), 2**63)), int(rng.integers(-(2**63), 2**63)), mask=True)
            given = np.broadcast_to(x[:1], shape) if repeated else laid_out(x, layout)
            y, mask = opgrad.softmax(given, axis, dropout=dropout)
            expected = keep_mask(shape, dropout.probability, dropout.seed, dropout.offset)
            np.testing.assert_array_equal(mask, expected, f"{shape}, axis {axis}, {layout.__name__}")
            assert ((y == 0) == ~mask).all()


def test_seeds_are_no_part_of_a_plan(rng):
    x = numbers(rng, (4, 40), "float32")
    masks = [
        opgrad.softmax(x, dropout=Dropout(0.5, seed, offset, mask=True))[1] for seed in (1, 2) for offset in (1, 2)
    ]
    assert len({bits(mask) for mask in masks}) == 4


# --- special numbers -------------------------------------------------------------------------------------------------


@forms
@specials
def test_special_numbers(bad, name, inf_as_zero, rng):
    """One in every other row, each in another place."""
    cases = itertools.product((("float32", "float32"), ("bfloat16", "int8")), (0, 1))
    for (source, target), axis in some(cases, f"{name}{inf_as_zero}", 2):
        x = numbers(rng, (19, 19), source)
        each = np.arange(0, 19, 2)
        x[(each, (each + 1) % 19) if axis else ((each + 1) % 19, each)] = bad
        attributes = {"out_scale": step_of(target), "where": np.True_, "stats": True} | flag(inf_as_zero)
        check_forward(name, x, axis, out_dtype=target, note=f"axis {axis}", **attributes)


@forms
def test_rows_of_minus_infinity(name, inf_as_zero, rng):
    """All -inf, all left out by where, -inf and one NaN."""
    for source, axis in some(itertools.product(("float32", "float64", "float8_e5m2"), (0, 1)), name, 2, inf_as_zero):
        x = numbers(rng, (12, 12), source)
        kept, rows = np.ones((12, 12), bool), x if axis else x.T
        rows[::3] = -np.inf
        rows[3, 7] = np.nan
        (kept if axis else kept.T)[1] = False
        for target in ("float32", "int8"):
            attributes = {"out_scale": step_of(target), "where": kept, "stats": True, "save": True}
            check_forward(name, x, axis, out_dtype=target, **attributes, **flag(inf_as_zero))


def outputs(rng, name, shape, axis, dtype):
    """What the forward operator leaves."""
    return cast(operators()[name.removesuffix("_grad")].reference(rng.normal(size=shape), axis), dtype)


@gradients
def test_gradients_of_every_dtype(name, rng):
    for dtype, of_y in some(itertools.product(GRADIENT_TYPES, GRADIENT_TYPES), name, 2):
        shape, axis = AXES[rng.integers(len(AXES))]
        given = {"out_dtype": GRADIENT_TYPES[rng.integers(6)], "note": f"{dtype}, {of_y}, {shape}"}
        check_gradient(name, numbers(rng, shape, dtype), outputs(rng, name, shape, axis, of_y), axis, **given)


@gradients
@pytest.mark.parametrize("layout", WAYS, ids=lambda each: each.__name__)
def test_gradients_with_attributes_and_layouts(layout, name, rng):
    for shape, axis in some(AXES, name + layout.__name__, 4):
        other = WAYS[rng.integers(len(WAYS))]
        dy = laid_out(numbers(rng, shape, "float32"), layout)
        y = laid_out(outputs(rng, name, shape, axis, "bfloat16"), other)
        attributes = some_attributes(rng, shape, "float32")
        attributes = {key: value for key, value in attributes.items() if key in operators()[name].general.keywords}
        results = check_gradient(name, dy, y, axis, note=f"{shape}, axis {axis}, {attributes}", **attributes)
        out = check_gradient(name, dy, y, axis, place=functools.partial(Placed, layout=other), **attributes)[0]
        in_place = getattr(opgrad, name)(dy, y, axis, out=dy, **attributes)
        assert in_place is dy
        if not (ON_GPU or FROM_PTX):  # compiled for another layout, a kernel may add in another order
            assert bits(out) == bits(dy) == bits(results[0])


# Where a slope is not defined at 0, or jumps, y is kept clear of it by result_scale.
SLOPED = [op for op in ELTWISE if reference_post_ops.has_gradient(op.name)]


@pytest.mark.parametrize("op", SLOPED, ids=lambda op: f"{op.name} {op.alpha} {op.beta}")
def test_slopes(op, rng):
    for dtype, scale in some(itertools.product(("float32", "float64"), (1.0, -1.0, 7.0, -7.0)), f"{op.alpha}", 4):
        if scale > 0 or (op.name not in ("log", "sqrt") and (op.name != "pow" or op.beta == round(op.beta))):
            y, dy = outputs(rng, "softmax_grad", (3, 19), -1, dtype), numbers(rng, (3, 19), dtype)
            check_gradient("softmax_grad", dy, y, post_ops=[op], result_scale=scale, note=f"{dtype}, {scale}")


def test_gelu_far_from_0():
    """The slopes are 0 and 1 there, where squares and cubes overflow."""
    dy, y = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    far = np.array([[-1e30, 1e30], [-50, 50]], np.float32)
    for op in (post_ops.gelu_tanh(), post_ops.gelu_erf()):
        given = {"post_ops": [post_ops.add(far), op], "post_op_grads": True}
        np.testing.assert_array_equal(opgrad.log_softmax_grad(dy, y, **given)[1], [[0, 1], [0, 1]])


@gradients
@pytest.mark.parametrize("op", reference_post_ops.BINARY_SLOPES)
def test_gradients_of_operands(op, name, rng):
    """Of every shape that broadcasts, summed to it; of floating-point operands alone."""
    shape = (2, 3, 9)
    patterns = [shape, (1, 3, 9), (2, 1, 9), (2, 3, 1), (3, 9), (9,), (1,), ()]
    for number, pattern in some(enumerate(patterns), name + op, 3):
        dtype = ("float32", "bfloat16", "float64", "float8_e5m2")[number % 4]
        y, dy = outputs(rng, name, shape, -1, "float32"), numbers(rng, shape, "float32")
        chain = [made(op, operand_of(rng, pattern, dtype), rng), post_ops.add(np.ones(9, np.int8)), post_ops.tanh()]
        results = check_gradient(name, dy, y, post_ops=chain, post_op_grads=True, note=f"{pattern}, {dtype}")
        assert [(each.shape, each.dtype.name) for each in results[1:]] == [(pattern, dtype)]


@gradients
def test_gradients_of_long_rows(name, rng, lowered):
    cases = itertools.product([((2, 67), 1), ((2, 64), 1), ((20, 3), 0)], ("float32", "float64"))
    for (shape, axis), dtype in some(cases, name, 3):
        y, dy = outputs(rng, name, shape, axis, dtype), numbers(rng, shape, dtype)
        chain = [
            post_ops.mul(numbers(rng, shape[1:], "float32")),
            post_ops.swish(),
            post_ops.add(numbers(rng, shape, "float32")),
        ]
        given = {"post_ops": chain, "post_op_grads": True, "dropout": Dropout(0.3, 5), "where": some_where(rng, shape)}
        check_gradient(name, dy, y, axis, note=f"{shape}", **given)


@gradients
def test_gradients_through_long_chains(name, rng):
    for _ in range(3 if EVERYTHING else 1):
        ops = [SLOPED[i] for i in rng.permutation(len(SLOPED)) if SLOPED[i].name not in ("log", "sqrt", "pow", "exp")]
        chain = [each for op in ops[:10] for each in (op, post_ops.mul(numbers(rng, (33,), "float32", 1.0)))]
        y, dy = outputs(rng, name, (3, 33), -1, "float64"), numbers(rng, (3, 33), "float64")
        check_gradient(name, dy, y, post_ops=chain, post_op_grads=True, note=f"{[op.name for op in ops[:10]]}")


@gradients
def test_gradients_of_special_numbers(name, rng):
    """A NaN or an infinity in dy makes NaN of its row alone; y of what was left out counts for nothing."""
    y, dy = outputs(rng, name, (9, 9), -1, "float32"), numbers(rng, (9, 9), "float32")
    dy[2, 3], dy[4, 4] = np.nan, np.inf
    results = getattr(opgrad, name)(dy, y, logit_scale=0.5)
    with np.errstate(all="ignore"):
        exact = operators()[name].reference(dy.astype("f8"), y.astype("f8"), logit_scale=0.5)
    np.testing.assert_allclose(results, exact, 1e-5, 1e-6)
    y[5, 5] = 0.0 if name == "softmax_grad" else -np.inf
    assert np.isfinite(getattr(opgrad, name)(np.nan_to_num(dy, posinf=0), y, where=np.arange(9) != 5)).all()


@gradients
def test_gradients_of_empty_arrays(name):
    for shape in [(0, 3), (3, 0), (2, 0, 4)]:
        x = np.zeros(shape, np.float32)
        assert getattr(opgrad, name)(x, x, logit_scale=0.5, dropout=Dropout(0.5)).shape == shape


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
        exact = reference_post_ops.apply(op, wide)
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


@pytest.mark.parametrize("op", reference_post_ops.BINARY)
def test_every_broadcast_pattern(op, rng):
    for number, pattern in some(enumerate(PATTERNS), op, 8):
        dtype = OPERAND_TYPES[number % len(OPERAND_TYPES)]
        chain = [*before(op), made(op, operand_of(rng, pattern, dtype), rng)]
        name, axis = NAMES[number % 2], (-1, 1, 0)[number % 3]
        x = numbers(rng, SHAPE, "float32")
        check_forward(name, x, axis, post_ops=chain, note=f"{pattern}, {dtype}, axis {axis}", place=Placed)


@pytest.mark.parametrize("op", reference_post_ops.BINARY)
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
