"""Example arguments for the operators of opgrad.ops.sink."""

from collections.abc import Sequence

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import reference

LARGE = (4, 16, 256, 256)  # samples, heads, queries, keys: 16 MiB of float32
SHAPES = ((1, 1, 1, 1), (2, 3, 4, 33), (1, 2, 5, 300), (0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (1, 2, 3, 0))


def sink_softmax(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({"x": rng.normal(0, 2, shape), "sink": rng.normal(size=shape[1])}, terms=max(shape[3], 1))
        for shape in ([LARGE] if large else SHAPES)
    ]


def sink_softmax_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for shape in [LARGE] if large else SHAPES:
        x, sink = rng.normal(0, 2, shape), rng.normal(size=shape[1])
        y, lse = reference("sink_softmax")(x, sink)
        arguments = {"dy": rng.normal(size=shape), "y": y, "lse": lse, "sink": sink}
        found.append(Example(arguments, terms=max(shape[0] * shape[2] + shape[3], 1)))
    return found
