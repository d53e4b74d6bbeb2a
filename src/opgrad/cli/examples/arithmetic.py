"""Example arguments for the operators of opgrad.ops.arithmetic."""

from collections.abc import Sequence

import numpy as np

from opgrad.cli.examples import Example

# Shape, axes and attributes: rows, columns, groups of axes, long sums, nothing to sum, empty arrays.
SUMS = [
    ((7,), (0,), {}),
    ((3, 40), (1,), {"keepdims": False}),
    ((70, 33), (0,), {}),
    ((3, 1500, 5), (-2,), {"keepdims": False}),
    ((4, 5, 6, 7, 3), (0, 2, -1), {}),
    ((2, 130, 150), (1,), {}),
    ((40000,), (), {"keepdims": False}),
    ((3, 4), (), {"noop_with_empty_axes": True}),
    ((3, 4), (), {}),
    ((2, 1, 3), (1, 1), {"keepdims": False}),
    ((), (), {}),
    ((0, 3), (0,), {}),
    ((3, 0), (0,), {}),
]
# Shapes of a and b: alike, numbers, rows, columns, both broadcast, several groups of axes, empty ones.
QUOTIENTS = [
    ((7,), (7,)),
    ((3, 40), ()),
    ((), (3, 40)),
    ((40, 65), (65,)),
    ((40, 65), (40, 1)),
    ((40, 1), (1, 65)),
    ((5,), (3, 4, 5)),
    ((2, 3, 1, 5, 6), (3, 4, 1, 6)),
    ((1,), (1, 1)),
    ((0, 3), (3,)),
    ((1, 3), (0, 1)),
]


def reduce_sum_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"x": rng.normal(size=(8192, 1024)), "axes": (0,)}, 8192)]
    found = [Example({"x": rng.normal(1, 1, shape), "axes": axes, **more}, 40000) for shape, axes, more in SUMS]
    whole = rng.integers(-1000, 1000, (30, 4, 50))
    for dtype in ("int32", "int64"):
        found += [Example({"x": whole.astype(dtype), "axes": axes}) for axes in ((0, 2), (1,), ())]
    return found


def div_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for a, b in [((8192, 1024), (1024,))] if large else QUOTIENTS:
        shape = np.broadcast_shapes(a, b)
        # Of one sign, so that a sum that is a single number does not cancel to much less than its terms.
        dy, dividend, divisor = (rng.uniform(0.5, 2, each) for each in (shape, a, b))
        found.append(Example({"dy": dy, "a": dividend, "b": divisor}, max(dy.size, 1)))
    return found


def broadcast_gradient_args(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"a_shape": (32, 128, 768), "b_shape": (768,)})]
    pairs = [((2, 3, 4), (3, 1)), ((), (5,)), ((1, 5), (5,)), ((2, 1, 4, 1), (3, 1, 5)), ((0, 1), (1, 3)), ((3,), (3,))]
    return [Example({"a_shape": a, "b_shape": b}) for a, b in pairs]


def zero_gradient(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [(1 << 23,)] if large else [(), (5,), (70, 33), (2, 3, 4, 5, 6), (0, 3)]
    signals = [np.ones(1, bool), np.arange(3), np.zeros((), np.uint8)]
    return [Example({"x": rng.normal(size=s), "unused": signals[i % 3]}) for i, s in enumerate(shapes)]


def accumulate(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [(1 << 22,)] if large else [(), (0,), (7,), (3, 33), (70001,)]
    arrays = [{"buffer": np.asarray(rng.normal(size=s)), "value": np.asarray(rng.normal(size=s))} for s in shapes]
    left = [] if large else [Example({**arrays[-1], "update": False})]
    return [*map(Example, arrays), *left]
