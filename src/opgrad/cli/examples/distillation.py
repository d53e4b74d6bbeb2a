"""Example arguments for the operators of opgrad.ops.distillation."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example

LARGE = (1024, 8192)  # rows, classes: 32 MiB of float32
SIZES = (
    ((3, 1), 0.5, 1.0, True),
    ((4, 33), 0.5, 2.0, False),
    ((5, 64), 0.0, 1.0, True),
    ((2, 1000), 1.0, 0.5, True),
    ((3, 70), 0.1, 4.0, True),
    ((2, 129), 0.0, 3.0, False),
    ((0, 5), 0.5, 1.0, False),
    ((3, 0), 0.5, 1.0, False),
)


def softmax_divergence_and_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for shape, beta, temperature, with_slope in [(LARGE, 0.5, 1.0, False)] if large else SIZES:
        arguments: dict[str, Any] = {"logits": rng.normal(0, 2, shape), "teacher_logits": rng.normal(0, 2, shape)}
        if with_slope:
            arguments["dloss"] = rng.normal(size=shape[0])
        arguments |= {"beta": beta, "temperature": temperature}
        found.append(Example(arguments, terms=max(shape[1], 1) + 16))
    return found
