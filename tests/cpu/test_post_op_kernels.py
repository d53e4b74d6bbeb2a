"""Post-ops' formulas on buffers: each formula against wider arithmetic, each gradient, each count and lane."""

import functools
import math

import numpy as np
import pytest
from guards import Placed
from tasks import run_task

from opgrad.cpu.compiler.decorators import kernel
from opgrad.cpu.compiler.parameters import Float, Pointer
from opgrad.cpu.kernels.fused import form
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.numerics.eltwise import FORMULAS
from opgrad.ops.reference import post_ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PRECISIONS = ["float32", "float64"]
WIDER = {"float32": np.float64, "float64": np.longdouble}
ULP = 4.0

# --- references in wider arithmetic ----------------------------------------------------------------------------------


def exact_erfc(x):
    """By a continued fraction on the right; on the left math.erfc, and its slope times what float64 leaves out of x."""
    near = np.minimum(x, 3).astype(np.float64)
    slope = -2 / np.sqrt(pi(x)) * np.exp(-(near.astype(x.dtype) ** 2))
    rest = np.where(np.isfinite(near), np.minimum(x, 3) - near, 0)
    left = np.vectorize(math.erfc, otypes=[np.float64])(near) + slope * rest
    right = np.maximum(x, 3)
    fraction = right
    for k in range(80, 0, -1):
        fraction = right + k / (2 * fraction)
    return np.where(x > 3, np.exp(-right * right) / (fraction * np.sqrt(pi(x))), left)


def pi(s):
    return s.dtype.type(2) * np.arccos(s.dtype.type(0))


def exact_gelu_tanh(s, a, b):
    cubic = s.dtype.type("0.044715") if s.dtype == np.longdouble else 0.044715
    return post_ops.VALUES["logistic"](2 * np.sqrt(2 / pi(s)) * (s + cubic * s**3), a, b) * s


# Where the references' constants are rounded to float64, and at infinities.
EXACT = post_ops.VALUES | {
    "gelu_erf": lambda s, a, b: s / 2 * exact_erfc(-s / np.sqrt(s.dtype.type(2))),
    "gelu_tanh": exact_gelu_tanh,
    "pow": lambda s, a, b: a * np.power(s, np.full_like(s, b)),
    "relu": lambda s, a, b: np.where(s > 0, s, a * s if a else np.where(np.isnan(s), s, 0)),
}
POWERS = [0.5, 2.0, 3.0, -1.0, -2.5, 1 / 3, 17.0, 0.1, -7.0, 1e-3, 100.5, 0.0]
CONSTANTS = {
    "clip": [(-0.3, 0.7), (0.0, 0.0)],
    "clip_v2": [(-0.3, 0.7)],
    "elu": [(1.0, 0.0), (0.3, 0.0), (-2.0, 0.0)],
    "hardsigmoid": [(1 / 6, 0.5), (-0.2, 0.1)],
    "hardswish": [(1 / 6, 0.5), (2.0, -0.3)],
    "linear": [(1.1, -0.7), (0.0, 3.0), (1.0, 0.0)],
    "pow": [*((1.0, b) for b in POWERS), (-0.7, 2.2), (1e-30, 5.5), (1e30, -4.0)],
    "relu": [(0.0, 0.0), (0.1, 0.0), (-1.0, 0.0)],
    "soft_relu": [(1.0, 0.0), (-0.1, 0.0), (20.0, 0.0), (1e-3, 0.0)],
    "swish": [(1.0, 0.0), (1.702, 0.0), (-0.1, 0.0), (0.0, 0.0), (1e-30, 0.0)],
}
ELTWISE = [(name, *constants) for name in FORMULAS for constants in CONSTANTS.get(name, [(0.0, 0.0)])]
SMOOTH = [case for case in ELTWISE if case[0] in form.POST_OP_GRADIENTS and case[0] not in ("clip", "clip_v2", "abs")]

# --- running kernels -------------------------------------------------------------------------------------------------


@functools.cache
def on_buffers(formula):
    """The kernel that applies a formula to contiguous buffers, of which it overwrites the first."""
    write = mapped(formula)

    @kernel
    def apply(values: Pointer, operand: Pointer, third: Pointer, count, alpha: Float, beta: Float):
        write(values, 0, count, 0, (values, operand, third), (alpha, beta))

    return apply


def run(formula, values, operand=None, third=None, alpha=0.0, beta=0.0, offset=0):
    """What a formula makes of arrays off their alignment by `offset` bytes, with nothing written around it."""
    dtype, n = values.dtype.name, values.size
    guarded = [Placed((n,), dtype, offset=offset) for _ in range(3)]
    for place, given in zip(guarded, (values, operand, third), strict=True):
        if given is not None:
            place.array[:] = given
    words = np.empty(6, np.int64)
    used = [values, operand, third]
    words[:3] = [0 if a is None else g.array.ctypes.data for a, g in zip(used, guarded, strict=True)]
    words[3] = n
    words[4:] = np.array([alpha, beta], np.float64).view(np.int64)
    task = on_buffers(formula).task([dtype] * 3)
    run_task(task, words)
    assert all(place.untouched() for place in guarded)
    for place, given in zip(guarded[1:], (operand, third), strict=True):
        assert given is None or place.array.tobytes() == given.tobytes()
    return guarded[0].array


def specials(dtype):
    info = np.finfo(dtype)
    tiny, least = float(info.smallest_normal), float(info.smallest_subnormal)
    special = [0.0, least, 5 * least, tiny, tiny / 2, 1e-5, 0.5, 1.0, 1.5, 2.5, 3.0, 100.0, float(info.max), np.inf]
    return np.array([sign * x for x in special for sign in (1, -1)] + [np.nan], dtype)


@functools.cache
def numbers(dtype):
    """Numbers all over the range, each special one in every lane."""
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    tiny, large = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max))
    highest = np.log(float(info.max)) * 1.2
    spread = np.exp2(rng.uniform(max(tiny, -1074), large - 1, 6000)) * rng.choice([-1, 1], 6000)
    near = [rng.uniform(-highest, highest, 6000), rng.uniform(-15, 15, 6000), rng.normal(0, 1, 6000)]
    around_one = 1 + np.exp2(rng.uniform(-30, -1, 1000)) * rng.choice([-1, 1], 1000)
    special = np.tile(specials(dtype), 64)  # of odd length
    return np.concatenate([special, spread, *near, around_one]).astype(dtype)


def compare(given, exact, ulp):
    """Given is within `ulp` units in the last place of the exact result; infinities and NaN are equal."""
    rounded = exact.astype(given.dtype)
    np.testing.assert_array_equal(np.isnan(given), np.isnan(rounded))
    number = ~np.isnan(rounded)
    given, exact, rounded = given[number], exact[number], rounded[number]
    largest = np.finfo(given.dtype).max
    unit = np.spacing(np.minimum(np.abs(rounded), largest))
    # An infinity counts as the number after the largest.
    ends = [np.clip(x.astype(exact.dtype), -largest, largest) for x in (given, exact)]
    errors = np.abs(ends[0] - ends[1]) / unit
    assert errors.max(initial=0) <= ulp, (errors.max(), exact[errors.argmax()], given[errors.argmax()])


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("name", "alpha", "beta"), ELTWISE)
@pytest.mark.one_in(2)
def test_eltwise_error_in_ulp(name, alpha, beta, dtype):
    if np.finfo(WIDER[dtype]).nmant <= np.finfo(dtype).nmant:
        pytest.skip("no wider floating dtype here to compare with")
    s = numbers(dtype)
    exact = EXACT[name](s.astype(WIDER[dtype]), alpha, beta)
    compare(run(form.POST_OPS[name], s, alpha=alpha, beta=beta), exact, ULP)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_powers_as_in_c(dtype):
    s = specials(dtype)
    exponents = [0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 0.5, -0.5, -3.0, -2.0, 1e300, 2.0**53 - 1, np.inf, -np.inf, np.nan]
    for exponent in exponents:
        given = run(form.POST_OPS["pow"], s, alpha=1.0, beta=exponent)
        with np.errstate(all="ignore"):
            exact = np.power(s.astype(np.float64), np.full(s.shape, exponent))
        compare(given, exact, ULP)
        number = ~np.isnan(given)
        np.testing.assert_array_equal(np.signbit(given)[number], np.signbit(exact)[number], f"exponent {exponent}")


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", [name for name in post_ops.BINARY if name != "select"])
def test_binary(name, dtype):
    special = specials(dtype)
    s, t = (a.ravel().copy() for a in np.meshgrid(special, special))
    exact = post_ops.BINARY_VALUES[name](s, t).astype(dtype)
    np.testing.assert_array_equal(run(form.POST_OPS[name], s, t), exact)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_select(dtype):
    s, other = np.arange(100, dtype=dtype), -np.arange(100, dtype=dtype)
    condition = np.resize(np.array([0, 1, -0.0, np.nan, 0.5], dtype), 100)
    expected = np.where(condition != 0, s, other)
    np.testing.assert_array_equal(run(form.POST_OPS["select"], s, condition, other), expected)


# --- gradients -------------------------------------------------------------------------------------------------------


def difference(f, s, a, b, h):
    """f's derivative at s, by differences over h and 2h on both sides."""
    h = s.dtype.type(h)
    near, far = (f(s + k * h, a, b) - f(s - k * h, a, b) for k in (1, 2))
    return (8 * near - far) / (12 * h)


def away_from_bends(name, alpha, beta, s, distance):
    """The numbers of s that are further from where the slope jumps."""
    if name in ("relu", "elu"):
        s = s[np.abs(s) > distance]
    if name in ("hardsigmoid", "hardswish"):
        s = s[(np.abs(alpha * s + beta) > distance) & (np.abs(alpha * s + beta - 1) > distance)]
    return s


@pytest.mark.parametrize(("name", "alpha", "beta"), SMOOTH)
@pytest.mark.one_in(2)
def test_gradient_is_the_slope(name, alpha, beta):
    s = np.random.default_rng(1).uniform(-6, 6, 500)
    if name in ("log", "sqrt", "pow"):
        s = np.abs(s) + 0.5
    if name == "pow":
        s = s.clip(0.5, 3)
    s = away_from_bends(name, alpha, beta, s, 0.02)
    g = np.random.default_rng(2).normal(size=s.size)
    wide = np.longdouble
    pace = {"pow": abs(beta), "soft_relu": abs(alpha), "swish": abs(alpha)}.get(name, 0.0)
    slope = difference(EXACT[name], s.astype(wide), alpha, beta, 2.0**-10 / max(1.0, pace)).astype(np.float64)
    given = run(form.POST_OP_GRADIENTS[name], g, s, alpha=alpha, beta=beta)
    scale = np.abs(g) * np.maximum(np.abs(slope), np.abs(slope).max() * 1e-3)
    assert (np.abs(given - g * slope) <= 1e-10 * scale).all()


@pytest.mark.parametrize(("name", "alpha", "beta"), SMOOTH)
@pytest.mark.one_in(2)
def test_gradient_in_float32(name, alpha, beta):
    """Against the float64 kernel; near a zero of the slope, against the parts that cancel there."""
    s = numbers("float32")
    s = away_from_bends(name, alpha, beta, s[np.abs(s) < 1e18], 1e-6)
    g = np.random.default_rng(3).normal(size=s.size).astype(np.float32)
    exact = run(form.POST_OP_GRADIENTS[name], g.astype(np.float64), s.astype(np.float64), alpha=alpha, beta=beta)
    given = run(form.POST_OP_GRADIENTS[name], g, s, alpha=alpha, beta=beta)
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
    number = np.isfinite(rounded)
    np.testing.assert_array_equal(np.isfinite(given), number)
    cancels = {"gelu_erf": 1.0, "gelu_tanh": 1.0, "mish": 1.0, "swish": 1.0, "hardswish": 4.0}.get(name, 0.0)
    near = np.abs(s[number] * (alpha if name == "swish" else 1)) < 3
    unit = np.spacing(np.abs(rounded[number])) + cancels * 2.0**-23 * np.abs(g[number]) * near
    errors = np.abs(given[number] - exact[number]) / unit
    assert errors.max(initial=0) <= 2 * ULP, (errors.max(), s[number][errors.argmax()])


# By operation: s, alpha and beta, and the gradient that comes of G.
G = [3, -2, 5, 7, 11]
BENDS = [
    ("abs", [-1, 0, 1, -2, np.inf], (0, 0), [-3, 0, 5, -7, 11]),
    ("clip", [-1, 2, 2.5, -1.5, 0], (-1, 2), [0, -2, 0, 0, 11]),
    ("clip_v2", [-1, 2, 2.5, -1.5, 0], (-1, 2), [0, 0, 0, 0, 11]),
    ("relu", [-1, 0, 1, -np.inf, np.inf], (0.5, 0), [1.5, -1, 5, 3.5, 11]),
    ("elu", [0, -np.inf, 1, 0, np.inf], (2, 0), [6, 0, 5, 14, 11]),
    ("hardsigmoid", [-1, 1, 0, 0.5, -0.5], (0.5, 0.5), [0, 0, 2.5, 3.5, 5.5]),
    ("hardswish", [-1, 1, 0, 3, -3], (0.5, 0.5), [0, -2, 2.5, 7, 0]),
    ("hardswish", [-3, 3, 0], (1 / 6, 0.5), [0, -2, 2.5]),
    ("pow", [0, 1, np.nan, -1, 2], (2, 0), [0, 0, 0, 0, 0]),
    ("mish", [-1e38, -1e4, 1e4, 1e38, -np.inf], (0, 0), [0, 0, 5, 7, np.nan]),
]


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("name", "s", "constants", "expected"), BENDS)
def test_gradients_at_bends(name, s, constants, expected, dtype):
    given = run(form.POST_OP_GRADIENTS[name], np.array(G[: len(s)], dtype), np.array(s, dtype), None, *constants)
    np.testing.assert_array_equal(given, np.array(expected, dtype))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", post_ops.BINARY_SLOPES)
def test_gradients_of_binary_operations(name, dtype):
    g = np.array([3, -2, 5, 7], dtype)
    s, t = (
        np.array([1, 2, -4, 0.5], dtype),
        np.array([0, 1, np.nan, -0.0] if name == "select" else [2, 2, -8, 4], dtype),
    )
    given = (s, t, t) if name == "select" else (s, t)  # t is the condition
    for kernels, slopes in (
        (form.POST_OP_GRADIENTS, post_ops.BINARY_SLOPES), (form.OPERAND_GRADIENTS, post_ops.OPERAND_SLOPES),
    ):  # fmt: skip
        np.testing.assert_array_equal(run(kernels[name], g, s, t), g * slopes[name](*given))


def test_every_operation_has_its_kernels():
    assert set(form.POST_OPS) == {*post_ops.VALUES, *post_ops.BINARY}
    assert set(form.POST_OP_GRADIENTS) == {*post_ops.SLOPES, *post_ops.BINARY_SLOPES}
    assert set(form.OPERAND_GRADIENTS) == {*post_ops.OPERAND_SLOPES}


# --- counts and lanes ------------------------------------------------------------------------------------------------

TABLES = {"value": form.POST_OPS, "grad": form.POST_OP_GRADIENTS, "operand_grad": form.OPERAND_GRADIENTS}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("table", "name"), [(table, name) for table, made in TABLES.items() for name in made])
def test_every_count(table, name, dtype):
    kernel = TABLES[table][name]
    rng = np.random.default_rng(4)
    arrays = [rng.permutation(numbers(dtype))[:2048] for _ in range(3)]
    alpha, beta = CONSTANTS.get(name, [(0.0, 0.0)])[0]
    whole = run(kernel, *arrays, alpha, beta)
    size = whole.itemsize
    for n in (*range(36), 47, 48, 63, 64, 65, 70):  # every tail, behind up to four registers
        given = run(kernel, *(a[:n] for a in arrays), alpha, beta, offset=n % 3 * size)
        np.testing.assert_array_equal(given, whole[:n], f"{n} elements")
    for start in (1, 7, 33):  # every number in other lanes
        given = run(kernel, *(a[start:] for a in arrays), alpha, beta)
        np.testing.assert_array_equal(given, whole[start:])
