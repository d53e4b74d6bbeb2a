"""Example arguments for the operators of opgrad.ops.gated."""

from collections.abc import Sequence

import numpy as np

from opgrad.cli.examples import Example

LARGE = (2048, 2816)  # tokens, and what a gated layer has inside: 22 MiB of float32
SHAPES = ((), (1,), (0, 3), (37,), (3, 65), (2, 3, 4, 5))
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_linear_unit(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return _examples(rng, large, ("gate", "up"))


def gated_linear_unit_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return _examples(rng, large, ("dy", "gate", "up"))


def _examples(rng: np.random.Generator, large: bool, names: Sequence[str]) -> Sequence[Example]:
    pairs = [(LARGE, "silu")] if large else [(shape, each) for shape in SHAPES for each in ACTIVATIONS]
    return [
        Example({**{name: np.asarray(rng.normal(0, 2, shape)) for name in names}, "activation": activation})
        for shape, activation in pairs
    ]
