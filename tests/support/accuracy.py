"""How close a result must come to the float64 reference."""

import math

import ml_dtypes
import numpy as np
from samples import bits, call, cast, elements, is_float, reference

from opgrad.cli.examples.arguments import roundings
from opgrad.contract import DTYPES


def relative_tolerance(dtype, terms, samples=0):
    """The relative error allowed: eps * roundings(terms) + samples * eps64 / 2.

    eps is that of the arithmetic: float64's for float64, float32's for everything else. The losses and weights of
    samples are added one by one in float64, and equal weights are rounded the same way each time.
    """
    eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    return float(eps) * roundings(terms) + samples * float(np.finfo(np.float64).eps) / 2


def check(op, arguments, note="", **more):
    """Call the operator, hold its results against the reference, and make sure that no argument was changed."""
    before = {name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray)}
    results = call(op, arguments, **more)
    for name, array in before.items():
        assert bits(array) == bits(arguments[name]), f"{name} changed"
    assert_close(op, arguments, results, note)
    return results


def assert_close(op, arguments, results, note=""):
    """Every result has the reference's shape and, within the tolerance, its values; how much of that is used."""
    used = 0.0
    for name, exact, result in zip(op.results, reference(op, arguments), results, strict=True):
        where = f"{op.name}: {name} {note}"
        exact = np.asarray(exact)
        assert result.shape == exact.shape, where
        rounded = cast(exact, result.dtype.name).astype(np.float64)
        given = result.astype(np.float64)
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(given[~finite], rounded[~finite], where)
        given, rounded, places = given[finite], rounded[finite], np.argwhere(finite)
        allowed = np.broadcast_to(_allowed(op, name, arguments, exact, result.dtype), exact.shape)[finite]
        share = np.nan_to_num(np.abs(given - rounded) / allowed, nan=np.inf)
        if (share > 1).any():
            worst = int(np.argmax(share))
            pair = f"{given[worst]!r} for {rounded[worst]!r} at {places[worst].tolist()}"
            raise AssertionError(f"{where}: {pair}, {share[worst]:.3g} times the tolerance; {sum(share > 1)} wrong")
        used = max(used, float(share.max(initial=0.0)))
    return used


def _allowed(op, name, arguments, exact, dtype):
    """The absolute error allowed: relative to the result and to the terms that may cancel, plus a last digit.

    exp turns an error of its argument into a relative one, so the relative part grows with |log(result)|. A
    denormal factor on the way has lost digits: the smallest number times the largest other factor.
    """
    dtypes = {value.dtype.name for value in arguments.values() if is_float(value)} | {dtype.name}
    arithmetic = "float64" if dtypes == {"float64"} else "float32"
    relative = relative_tolerance(
        arithmetic, _terms(op, arguments), arguments["labels"].size if "labels" in arguments else 0
    )
    lost = float(np.finfo(arithmetic).smallest_subnormal) * max(
        (_finite(arguments[each]).max(initial=0.0) for each in elements(op, arguments)), default=0.0
    )
    with np.errstate(all="ignore"):
        size = np.nan_to_num(np.abs(exact), posinf=0)
        grown = size * (1 + np.abs(np.log(np.where(size > 0, size, 1))))
    return relative * (grown + _cancelling(op, name, arguments, exact)) + lost + ulp(exact, dtype)


def check_slopes(function, arrays, found, rng, step=1e-5):
    """Hold gradients of a number, by the names of arrays, against differences of function(**arrays): along random
    directions of each array, and of all at once."""
    for name in (*arrays, None):
        moves = {each: rng.normal(size=np.shape(arrays[each])) for each in arrays if name in (each, None)}
        ends = [
            function(**arrays | {each: arrays[each] + sign * step * move for each, move in moves.items()})
            for sign in (1, -1)
        ]
        slope = sum((found[each] * move).sum() for each, move in moves.items())
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-7, err_msg=str(name))


def ulp(exact, dtype):
    """The distance of neighbouring numbers of this dtype at these values."""
    info = ml_dtypes.finfo(DTYPES[dtype.name])
    with np.errstate(all="ignore"):
        size = np.clip(np.nan_to_num(np.abs(exact)), float(info.smallest_normal), float(info.max))
        return float(info.eps) * np.exp2(np.floor(np.log2(size)))


def _terms(op, arguments):
    """The length of the longest sum in the arithmetic's own precision."""
    if op.kind == "rows":
        shape = arguments[op.arrays[0]].shape
        return math.prod(shape[axis] for axis in axes(op, arguments))
    if op.kind == "classes":
        return arguments[elements(op, arguments)[0]].shape[1]
    return arguments["indices"].size if op.kind == "slices" else 1


def axes(op, arguments):
    axis = arguments.get("axis", op.attributes["axis"])
    return axis if isinstance(axis, tuple) else (axis,)


def _cancelling(op, name, arguments, exact):
    """How large the terms are that may cancel to a small result."""
    arrays = [_finite(arguments[each]) for each in elements(op, arguments)]
    if op.kind == "elements":
        return np.maximum(*arrays) if len(arrays) == 2 else 0.0
    if op.kind == "classes":
        return _finite(exact).max(initial=0.0) + (op.results[name].role == "sample")
    if op.kind == "slices":
        return reference(op, arguments | {"dy": np.abs(arguments["dy"])})[0] if "dy" in arguments else 0.0
    largest = [array.max(axes(op, arguments), keepdims=True, initial=0.0) for array in arrays]
    if len(largest) == 2:
        return largest[0] * largest[1]
    return 0.0 if (exact >= 0).all() else _finite(exact).max(axes(op, arguments), keepdims=True, initial=0.0)


def _finite(array):
    return np.nan_to_num(np.abs(array.astype(np.float64)), posinf=0.0)
