"""Softmax and its gradients with attributes: the range in which each result must lie, and memory of any layout.

The float64 reference is taken through the same operations as a range: what the arithmetic (float32, or float64 where x
or y is) may err by is added at each step, and each step is applied to both ends. Its ends, rounded to the result's
dtype, are what a result may be: so an integer is off by one only where the exact value is that close to a boundary.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from accuracy import relative_tolerance
from samples import cast, several

import opgrad
from opgrad.contract import BYTES, DTYPES
from opgrad.ops import operators
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import keep_mask
from opgrad.post_ops import PostOp

STEP = 16  # roundings in a post-op: a function of 2 ulp and a handful of operations


class Range(NamedTuple):
    """A result's exact value, what it may be, and whether it may be NaN."""

    low: Any
    value: Any
    high: Any
    nan: Any


def exactly(value):
    value = np.asarray(value, np.float64)
    return Range(value, value, value, np.isnan(value))


def spread(found, error, arithmetic):
    """The range with this absolute error more, in numbers of the arithmetic."""
    error = np.where(np.isfinite(found.value) & ~np.isnan(error), np.abs(error), 0.0)
    low, high = (cast(end, arithmetic).astype(np.float64) for end in (found.low - error, found.high + error))
    return Range(low, found.value, high, found.nan | np.isinf(error))


def through(function, *ranges):
    """A function of ranges: of their low ends, values and high ends, in every combination."""
    ends = [function(*combination) for combination in _combinations(ranges)]
    value = function(*(each.value for each in ranges))
    nan = np.any(np.isnan(ends), axis=0) | np.isnan(value)
    for each in ranges:
        nan = nan | each.nan
    return Range(np.fmin.reduce(ends), value, np.fmax.reduce(ends), nan)


def _combinations(ranges):
    if not ranges:
        return [()]
    rest = _combinations(ranges[1:])
    return [(end, *others) for end in ranges[0][:3] for others in rest]


def scaled(found, by, arithmetic):
    result = through(lambda v: v * by, found)
    return spread(result, 3 * _eps(arithmetic) * np.abs(result.value), arithmetic)


def _eps(arithmetic):
    return float(np.finfo(arithmetic).eps)


def _tiny(arithmetic):
    return float(np.finfo(arithmetic).smallest_subnormal)


# --- forward ---------------------------------------------------------------------------------------------------------


def probabilities(name, x, axis, arithmetic, where=None, logit_scale=1.0, inf_as_zero=False):
    """(Log-)probabilities and the logarithm of each row's sum of exponentials."""
    flag = {"inf_as_zero": inf_as_zero} if name == "softmax" else {}
    values, lse = operators()[name].reference(
        np.float64(x), axis, where=where, logit_scale=logit_scale, stats=True, **flag
    )
    z = np.float64(x) * logit_scale
    counts = np.isfinite(z) if where is None else np.isfinite(z) & where
    largest = np.max(np.abs(np.where(counts, z, 0.0)), axis, keepdims=True, initial=0.0)
    terms = x.size // max(lse.size, 1)
    relative = relative_tolerance(arithmetic, terms)
    shift = 2 * _eps(arithmetic) * largest if logit_scale != 1.0 else 0.0
    tiny = 2 * _tiny(arithmetic)
    exact = np.isneginf(z) if where is None else np.isneginf(z) | ~np.asarray(where)
    if name == "softmax":
        error = values * (relative * (1 + np.abs(np.log(np.where(values > 0, values, 1)))) + 2 * shift) + tiny
        found = spread(exactly(values), np.where(exact, 0.0, error), arithmetic)
        found = found._replace(low=np.maximum(found.low, 0.0))
    else:
        size = np.abs(np.where(np.isfinite(values), values, 0.0))
        row = np.minimum(size.max(axis, keepdims=True, initial=0.0), 1.0)
        found = spread(exactly(values), relative * (size + row) + 2 * shift, arithmetic)
    error = relative * (np.abs(lse) + math.log(max(terms, 1))) + shift
    return found, spread(exactly(lse), error, arithmetic)


def dropped(found, dropout, arithmetic):
    """After dropout; and which elements it keeps."""
    kept = keep_mask(found.value.shape, dropout.probability, dropout.seed, dropout.offset)
    if not dropout.probability:
        return found, kept
    rest = scaled(found, 1 / (1 - dropout.probability) if dropout.probability < 1 else 0.0, arithmetic)
    return Range(*(np.where(kept, end, 0.0) for end in rest[:3]), rest.nan & kept), kept


# The size of terms that may cancel, besides the value itself: of (s, operand, alpha, beta).
TERMS = {
    "add": lambda s, t, a, b: np.maximum(np.abs(s), np.abs(t)),
    "sub": lambda s, t, a, b: np.maximum(np.abs(s), np.abs(t)),
    "elu": lambda s, t, a, b: abs(a) * np.minimum(np.abs(s), 1.0),
    "gelu_erf": lambda s, t, a, b: np.abs(s),
    "gelu_tanh": lambda s, t, a, b: np.abs(s),
    "hardsigmoid": lambda s, t, a, b: np.abs(a * s) + abs(b),
    "hardswish": lambda s, t, a, b: np.abs(s) * (np.abs(a * s) + abs(b)),
    "linear": lambda s, t, a, b: np.abs(a * s) + abs(b),
}


def rounded_operands(each, arithmetic):
    """The operation with its operands and constants as the arithmetic sees them, in float64."""
    *condition, operand = each.operands or (None,)
    operands = [np.not_equal(np.asarray(one), 0) for one in condition]
    if operand is not None:
        operands.append(cast(operand, arithmetic).astype(np.float64))
    alpha, beta = (float(cast(number, arithmetic)) for number in (each.alpha, each.beta))
    return PostOp(each.name, alpha, beta, tuple(operands))


def applied(found, each, arithmetic):
    """After one post-op."""
    op = rounded_operands(each, arithmetic)
    if op.name == "select":
        chosen, other = op.operands
        ends = (np.where(chosen, end, other) for end in found[:3])
        return Range(*ends, np.where(chosen, found.nan, np.isnan(other)))
    result = through(lambda s: post_ops.apply(op, s), found)
    size = np.abs(result.value)
    if op.name in TERMS:
        size = size + TERMS[op.name](found.value, op.operands[-1] if op.operands else 0.0, op.alpha, op.beta)
    if op.name == "pow":
        size = size * (1 + np.abs(op.beta))
    exact = ("max", "min", "ge", "gt", "le", "lt", "eq", "ne", "abs", "clip", "clip_v2", "round")
    error = 0.0 if op.name in exact else STEP * _eps(arithmetic) * size + _tiny(arithmetic) * (1 + np.abs(found.value))
    return spread(result, error, arithmetic)


def forward_ranges(name, x, axis=-1, *, result_scale=1.0, dropout=None, post_ops=(), out_scale=1.0, **attributes):
    """The ranges of y, stats, saved and mask, by name; `arithmetic` is among the attributes."""
    arithmetic = attributes["arithmetic"]
    with np.errstate(all="ignore"):
        found, lse = probabilities(name, x, axis, **attributes)
        results = {"stats": lse, "saved": found}
        if result_scale != 1.0:
            found = scaled(found, result_scale, arithmetic)
        if dropout is not None:
            found, results["mask"] = dropped(found, dropout, arithmetic)
        for each in post_ops:
            found = applied(found, each, arithmetic)
        if out_scale != 1.0:
            found = scaled(found, 1 / out_scale, arithmetic)
    return results | {"y": found}


def check_forward(name, x, axis=-1, *, note="", place=None, **attributes):
    """Call softmax or log_softmax and hold every result against its range; returns them as a tuple.

    place: makes the memory of a result of this shape and dtype, which is checked for what must not be written.
    """
    before = x.copy()
    attributes = {key: value for key, value in attributes.items() if value is not None}
    wanted = {"y": True, "stats": attributes.get("stats"), "saved": attributes.get("save")}
    wanted["mask"] = "dropout" in attributes and attributes["dropout"].mask
    names = [key for key, value in wanted.items() if value]
    own = DTYPES["float32"] if x.dtype.name in BYTES else x.dtype
    dtype = DTYPES[str(attributes.get("out_dtype", own))]
    dtypes = {"y": dtype, "stats": np.dtype(np.float32), "saved": own, "mask": np.dtype(bool)}
    given, placed = dict(attributes), []
    if place is not None:
        shapes = {each: _row_shape(x.shape, axis) if each == "stats" else x.shape for each in names}
        placed = [place(shapes[each], dtypes[each]) for each in names]
        given["out"] = tuple(each.array for each in placed) if len(placed) > 1 else placed[0].array
    results = several(getattr(opgrad, name)(x, axis, **given))
    assert len(results) == len(names), note
    for each in placed:
        assert each.untouched(), f"{name} wrote past its results, {note}"
    np.testing.assert_array_equal(bytes_of(x), bytes_of(before), f"x changed, {note}")
    hold(name, x, axis, dict(zip(names, results, strict=True)), dtypes, note, **attributes)
    return results


def hold(name, x, axis, results, dtypes, note, **attributes):
    """Hold the results, by name, of a call against their ranges."""
    arithmetic = "float64" if "float64" in (x.dtype.name, dtypes["y"].name) else "float32"
    rest = {k: v for k, v in attributes.items() if k not in ("out_dtype", "stats", "save", "accumulation")}
    found = forward_ranges(name, x, axis, arithmetic=arithmetic, **rest)
    with np.errstate(all="ignore"):
        reference = operators()[name].reference(np.float64(x), axis, **rest)
    y = np.asarray(reference[0] if isinstance(reference, tuple) else reference)
    found["y"] = including(found["y"], y)
    for each, result in results.items():
        assert result.dtype == dtypes[each], f"{name}: {each}, {note}"
        if each == "mask":
            np.testing.assert_array_equal(result, found["mask"], f"{name}: mask, {note}")
        else:
            assert_within(result, found[each], f"{name}: {each}, {note}")


def _row_shape(shape, axis):
    axes = {each % len(shape) for each in (axis if isinstance(axis, tuple) else (axis,))}
    return tuple(1 if place in axes else size for place, size in enumerate(shape))


# --- gradients -------------------------------------------------------------------------------------------------------

# The size of terms that may cancel in a slope, besides the slope itself, over 1: of s, alpha and beta.
SLOPE_TERMS = {
    "gelu_erf": lambda s, a, b: np.minimum(1 + np.abs(s), 8.0),
    "gelu_tanh": lambda s, a, b: np.minimum(1 + np.abs(s), 8.0),
    "hardswish": lambda s, a, b: np.abs(2 * a * s) + abs(b),
    "mish": lambda s, a, b: np.minimum(1 + np.abs(s), 8.0),
    "swish": lambda s, a, b: np.minimum(1 + np.abs(a * s), 8.0),
    "tanh": lambda s, a, b: np.ones_like(s),
}


def times_slope(g, s, slope, each, arithmetic):
    """g * slope(s), as a range."""
    rise = through(slope, s)
    terms = SLOPE_TERMS[each.name](s.value, each.alpha, each.beta) if each.name in SLOPE_TERMS else 0.0
    if each.name == "pow":
        terms = np.abs(rise.value * each.beta)
    error = STEP * _eps(arithmetic) * (np.abs(rise.value) + terms) + _tiny(arithmetic) * (1 + np.abs(s.value))
    rise = spread(rise, error, arithmetic)
    # Where a slope is 0 an infinite gradient may be masked, as by select, or multiplied.
    masked = through(lambda a, b: np.where(b == 0, 0.0, a * b), g, rise)
    result = masked._replace(nan=masked.nan | np.isnan(g.value * rise.value))
    return spread(result, 2 * _eps(arithmetic) * np.abs(result.value) + _tiny(arithmetic), arithmetic)


def gradient_ranges(
    name, dy, y, axis=-1, *, arithmetic, where=None, logit_scale=1.0, result_scale=1.0, dropout=None, post_ops=(),
    out_scale=1.0,
):  # fmt: skip
    """The ranges of dx and, before they are summed, of the gradients of the post-ops' operands."""
    dy, y = np.float64(dy), np.float64(y)
    with np.errstate(all="ignore"):
        s, kept = scaled(exactly(y), result_scale, arithmetic), None
        if dropout is not None:
            s, kept = dropped(s, dropout, arithmetic)
        inputs, g, operands = [], scaled(exactly(dy), 1 / out_scale, arithmetic), []
        for each in post_ops:
            inputs.append(s)
            s = applied(s, each, arithmetic)
        for each, at in zip(reversed(post_ops), reversed(inputs), strict=True):
            op = rounded_operands(each, arithmetic)
            if each.operands and np.asarray(each.operands[-1]).dtype.kind not in "iub":
                slope = functools.partial(_operand_slope, op)
                operands.append(times_slope(g, at, slope, op, arithmetic))
            g = times_slope(g, at, functools.partial(_slope, op), op, arithmetic)
        if dropout is not None:
            rate = 1 / (1 - dropout.probability) if dropout.probability < 1 else 0.0
            g = scaled(g, np.where(kept, rate, 0.0), arithmetic)
            g = Range(*(np.where(kept, end, 0.0) for end in g[:3]), g.nan & kept)
        g = scaled(g, result_scale, arithmetic)
        if where is not None:
            g = Range(*(np.where(where, end, 0.0) for end in g[:3]), g.nan & where)
        return _back_through(name, g, y, axis, logit_scale, arithmetic), operands[::-1]


def _slope(op, s):
    return np.broadcast_arrays(post_ops.slope(op, s), s)[0]


def _operand_slope(op, s):
    return np.broadcast_arrays(post_ops.OPERAND_SLOPES[op.name](s, *op.operands), s)[0]


def _back_through(name, g, y, axis, logit_scale, arithmetic):
    """dx from the gradient g of the (log-)probabilities y."""
    radius = np.fmax(g.high - g.value, g.value - g.low)
    terms = y.size // max(math.prod(_row_shape(y.shape, axis)), 1)
    relative, tiny = relative_tolerance(arithmetic, terms), _tiny(arithmetic)
    weights, factor = (y, y) if name == "softmax_grad" else (np.ones_like(y), np.exp(y))

    def total(values):
        return values.sum(axis, keepdims=True)

    sums = total(np.abs(weights * g.value))
    lost = total(np.abs(weights) * (radius + tiny)) + relative * sums
    if name == "softmax_grad":
        value = y * (g.value - total(y * g.value))
        error = np.abs(y) * (radius + lost + relative * (np.abs(g.value) + sums))
    else:
        value = g.value - factor * total(g.value)
        error = radius + factor * (lost + relative * sums * (1 + np.abs(y))) + relative * np.abs(g.value)
    value = value * logit_scale
    error = np.abs(logit_scale) * error + 4 * _eps(arithmetic) * np.abs(value) + (1 + np.abs(logit_scale)) * 4 * tiny
    row = np.broadcast_to(np.any(g.nan, axis=axis, keepdims=True), y.shape)
    return spread(Range(value, value, value, np.isnan(value) | row), error, arithmetic)


def summed_to(found, shape):
    """The range of the sum over what an operand of this shape was broadcast along."""
    lead = found.value.ndim - len(shape)
    axes = tuple(a for a in range(found.value.ndim) if a < lead or (shape[a - lead] == 1 and found.value.shape[a] != 1))
    ends = [end.sum(axes).reshape(shape) for end in found[:3]]
    slack = 1e-15 * np.abs(found.value).sum(axes).reshape(shape) * max(found.value.size, 1) ** 0.5
    return Range(ends[0] - slack, ends[1], ends[2] + slack, found.nan.any(axes).reshape(shape))


def check_gradient(name, dy, y, axis=-1, *, note="", place=None, **attributes):
    """Call a gradient and hold every result against its range; returns them as a tuple."""
    before = dy.copy(), y.copy()
    attributes = {key: value for key, value in attributes.items() if value is not None}
    given, dtype = dict(attributes), DTYPES[str(attributes.pop("out_dtype", dy.dtype))]
    placed = place(dy.shape, dtype) if place is not None else None
    if placed is not None:
        given["out"] = placed.array
    results = several(getattr(opgrad, name)(dy, y, axis, **given))
    assert placed is None or placed.untouched(), f"{name} wrote past its result, {note}"
    for array, copy in zip((dy, y), before, strict=True):
        np.testing.assert_array_equal(bytes_of(array), bytes_of(copy), f"an argument changed, {note}")
    wanted = attributes.pop("post_op_grads", False)
    arithmetic = "float64" if "float64" in (dy.dtype.name, y.dtype.name, dtype.name) else "float32"
    dx, operands = gradient_ranges(name, dy, y, axis, arithmetic=arithmetic, **attributes)
    with np.errstate(all="ignore"):
        exact, *exact_operands = operators()[name].reference(
            np.float64(dy), np.float64(y), axis, post_op_grads=True, **attributes
        )
    assert results[0].dtype == dtype, note
    assert_within(results[0], including(dx, exact), f"{name}: dx, {note}")
    assert len(results) == 1 + wanted * len(operands), note
    arrays = [each.operands[-1] for each in attributes.get("post_ops", ()) if each.operands]
    arrays = [np.asarray(each) for each in arrays if np.asarray(each).dtype.kind not in "iub"]
    for number, result in enumerate(results[1:]):
        assert result.dtype == arrays[number].dtype, f"{name}: operand {number}, {note}"
        found = including(summed_to(operands[number], arrays[number].shape), exact_operands[number])
        assert_within(result, found, f"{name}: gradient of operand {number}, {note}")
    return results


def including(found, value):
    """The range with the reference's own value."""
    value = np.asarray(value)
    return Range(np.fmin(found.low, value), value, np.fmax(found.high, value), found.nan | np.isnan(value))


# --- results ---------------------------------------------------------------------------------------------------------


def stored(values, dtype):
    """float64 numbers as a dtype holds them, in float64: integers are rounded to even and saturate, NaN is 0."""
    if dtype.name in BYTES:
        info = np.iinfo(dtype)
        return np.clip(np.rint(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)), info.min, info.max)
    return cast(values, dtype.name).astype(np.float64)


def assert_within(result, found, note):
    """Each element is one that its range allows."""
    assert result.shape == found.value.shape, f"{note}: shape {result.shape}, expected {found.value.shape}"
    given = result.astype(np.float64)
    low, value, high = (stored(end, result.dtype) for end in found[:3])
    may = np.broadcast_to(found.nan, given.shape)
    is_nan, wanted = np.isnan(given), np.isnan(value)
    # An end beyond a float8's numbers is stored as NaN, too.
    may = may | np.isnan(low) | np.isnan(high)
    least, most = (
        np.where(np.isnan(rounded) & ~np.isnan(end), np.copysign(np.inf, end), rounded)
        for rounded, end in ((low, found.low), (high, found.high))
    )
    right = np.where(is_nan, may | wanted, (given >= least) & (given <= most))
    if result.dtype.name in BYTES:
        right |= np.broadcast_to(found.nan, given.shape) & (given == 0)
    if not right.all():
        place = tuple(int(i) for i in np.argwhere(~right)[0])
        expected = f"{value[place]!r} ({low[place]!r} to {high[place]!r})"
        raise AssertionError(f"{note}: {given[place]!r} at {place}, expected {expected}; {(~right).sum()} wrong")


# --- memory ----------------------------------------------------------------------------------------------------------


def bytes_of(array):
    """The bytes of the elements, in C order."""
    return np.ascontiguousarray(array).view(np.uint8) if array.ndim else np.frombuffer(array.tobytes(), np.uint8)


def numbers(rng, shape, dtype, size=3.0):
    """Numbers of any of the eight dtypes."""
    dtype = DTYPES[str(dtype)]
    if dtype.name in BYTES:
        return rng.integers(-5 if dtype.name == "int8" else 0, 6, shape).astype(dtype)
    return cast(rng.normal(0, size, shape), dtype.name)


def step_of(dtype):
    """An out_scale that lets a dtype's numbers tell probabilities apart."""
    return 1 / 120 if DTYPES[str(dtype)].name in BYTES else 1.0
