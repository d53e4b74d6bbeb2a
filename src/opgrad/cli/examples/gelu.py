"""Example arguments for the operators of opgrad.ops.gelu."""

from collections.abc import Sequence

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import Array

LARGE = (4096, 1024)  # what a layer of a transformer gives: 16 MiB of float32
SMALL = ((), (1,), (0, 3), (37,), (3, 65), (2, 3, 4, 5), (2, 1, 3, 2, 33))
ROWS = ((1,), (0, 3), (3, 0), (37,), (5, 65), (2, 3, 4, 5), (2, 1, 3, 2, 33), (70, 1))
FAR = 6.0  # the standard deviation of small inputs: some lie where only the tail is left
USUAL = 2.0  # that of large ones, as activations have it


def _values(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [LARGE] if large else SMALL
    return [Example({"x": _numbers(rng, shape, USUAL if large else FAR)}) for shape in shapes]


def _gradients(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [LARGE] if large else SMALL
    far = USUAL if large else FAR
    return [Example({"dy": _numbers(rng, shape, 1.0), "x": _numbers(rng, shape, far)}) for shape in shapes]


def _bias_gradients(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [LARGE] if large else ROWS
    return [
        Example(
            {"dy": _numbers(rng, shape, 1.0), "x": _numbers(rng, shape, FAR), "bias": _numbers(rng, shape[-1:], 1.0)}
        )
        for shape in shapes
    ]


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    return np.asarray(rng.normal(0.0, deviation, shape))


gelu = fast_gelu = _values
gelu_grad = fast_gelu_grad = _gradients
bias_gelu_grad_dx = bias_fast_gelu_grad_dx = _bias_gradients
