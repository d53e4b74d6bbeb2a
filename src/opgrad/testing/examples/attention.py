"""Example arguments for the operators of opgrad.ops.attention."""

from collections.abc import Sequence

import numpy as np

from opgrad.testing.examples import Example

LARGE = (4, 16, 256, 256)  # samples, heads, queries, keys: 16 MiB of float32
# The shapes of scores and bias, the axis, and is_inner_broadcast.
BIASES = (
    ((37,), (37,), 0, False),
    ((0, 3), (3,), -1, False),
    ((3, 0), (3, 0), -1, True),
    ((6, 5), (5,), -1, False),
    ((6, 65), (2, 65), 1, True),
    ((6, 65), (2, 65), 1, False),
    ((2, 3, 4, 33), (2, 1, 1, 33), 3, True),
    ((2, 3, 4, 33), (1, 1, 4, 33), 3, False),
    ((2, 3, 4, 33), (4, 33), 2, False),
    ((2, 3, 1, 2, 40), (2, 1, 1, 1, 40), -1, True),
)
SHAPES = (((37,), 0), ((0, 3), -1), ((6, 1), -1), ((6, 65), 1), ((2, 3, 4, 33), 3), ((2, 3, 4, 33), 1))


def bias_softmax(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    cases = [(LARGE, (LARGE[0], 1, 1, LARGE[3]), 3, True)] if large else BIASES
    return [
        Example(
            {
                "x": rng.normal(0, 2, shape),
                "bias": rng.normal(size=bias),
                "axis": axis,
                "is_inner_broadcast": inner,
            },
            terms=np.prod(shape[axis:], dtype=int),
        )
        for shape, bias, axis, inner in cases
    ]


def softmax_dropout_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    cases = [(LARGE, 3)] if large else SHAPES
    found = []
    for place, (shape, axis) in enumerate(cases):
        e = np.exp(rng.normal(size=shape))
        axes = tuple(range(axis % len(shape), len(shape)))
        arguments = {
            "dy": rng.normal(size=shape),
            "mask": rng.random(shape) > 0.1,
            "y": e / e.sum(axes, keepdims=True),
            "ratio": (0.1, 0.0, 0.5, 1.0)[place % 4],
            "axis": axis,
        }
        found.append(Example(arguments, terms=np.prod(shape[axis:], dtype=int)))
    return found
