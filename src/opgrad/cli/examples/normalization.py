"""Example arguments for the operators of opgrad.ops.normalization."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import Array

# Shapes with the axis from which on they are normalized: single elements, tails around vectors, many rows, few long
# ones, empty ones.
ROWS = [
    ((1,), 0),
    ((7,), -1),
    ((5, 1), -1),
    ((3, 31), 1),
    ((2, 3, 4, 5, 6), -2),
    ((70, 33), -1),
    ((17, 64), 1),
    ((3, 2500), -1),
    ((20, 130), 1),
    ((0, 5), -1),
    ((4, 0), 1),
]
LARGE_ROWS = (8192, 768)
# Shapes (N, C, ..): one vector, planes shorter and longer than one, many samples, few channels, empty ones.
CHANNELS = [
    (1, 1),
    (5, 3),
    (130, 40),
    (3, 2, 4),
    (70, 5, 3),
    (3, 4, 9, 7),
    (2, 3, 1, 1, 65),
    (70, 9, 36),
    (1, 2, 20000),
    (0, 3, 2),
    (3, 0, 2),
    (2, 3, 0),
]
LARGE_CHANNELS = (32, 128, 28, 28)


def _rows(rng: np.random.Generator, large: bool, single: bool = True) -> list[tuple[dict[str, Any], int]]:
    """x, scale and axis, with the length of the longest sum; `single`: rows of one element are among them."""
    found = []
    for shape, axis in [(LARGE_ROWS, -1)] if large else ROWS:
        if math.prod(shape[axis:]) == 1 and not single:
            continue
        x, scale = rng.normal(1, 2, shape), rng.uniform(0.5, 2, shape[axis:])
        terms = max(math.prod(shape[axis:]), math.prod(shape[:axis]))
        found.append(({"x": x, "scale": scale, "axis": axis}, terms))
    return found


def _statistics(x: Array, axes: tuple[int, ...], centred: bool = True) -> tuple[Array, Array]:
    count = max(math.prod(x.shape[axis] for axis in axes), 1)
    mean = x.sum(axes, keepdims=True) / count if centred else np.zeros(())
    return mean, 1 / np.sqrt(np.square(x - mean).sum(axes, keepdims=True) / count + 1e-5)


def _row_statistics(given: dict[str, Any], centred: bool = True) -> tuple[Array, Array]:
    rank = given["x"].ndim
    return _statistics(given["x"], tuple(range(given["axis"] % rank, rank)), centred)


def layer_normalization(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for i, (given, terms) in enumerate(_rows(rng, large)):
        bias = {"bias": rng.normal(size=given["scale"].shape)} if large or i % 3 else {}
        found.append(Example({**given, **bias, "epsilon": 1e-3 if i % 2 else 1e-5}, terms))
    return found


def layer_normalization_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for given, terms in _rows(rng, large):
        mean, inv_std = _row_statistics(given)
        dy = rng.normal(size=given["x"].shape)
        found.append(Example({"dy": dy, **given, "mean": mean, "inv_std": inv_std}, terms))
    return found


def simplified_layer_normalization(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [Example(given, terms) for given, terms in _rows(rng, large)]


def simplified_layer_normalization_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    # A row of one element is normalized to 1 or -1, and its gradient is what rounding leaves of 0.
    for given, terms in _rows(rng, large, single=False):
        _, inv_std = _row_statistics(given, centred=False)
        found.append(Example({"dy": rng.normal(size=given["x"].shape), **given, "inv_std": inv_std}, terms))
    return found


def _channels(rng: np.random.Generator, large: bool) -> list[tuple[dict[str, Any], tuple[int, ...], int]]:
    """x and scale, the axes of the statistics, and the length of the longest sum."""
    found = []
    for shape in [LARGE_CHANNELS] if large else CHANNELS:
        axes = (0, *range(2, len(shape)))
        x, scale = rng.normal(1, 2, shape), rng.uniform(0.5, 2, shape[1])
        found.append(({"x": x, "scale": scale}, axes, math.prod(shape[axis] for axis in axes)))
    return found


def batch_norm_internal(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for i, (given, _, terms) in enumerate(_channels(rng, large)):
        channels = given["scale"].size
        bias, mean, var = rng.normal(size=channels), rng.normal(size=channels), rng.uniform(0.5, 2, channels)
        given |= {"bias": bias, "running_mean": mean, "running_var": var}
        # Numbers that float32, the type of ONNX attributes, has exactly.
        given |= {"epsilon": 2.0**-10, "momentum": 0.75 if i % 2 else 0.875}
        found.append(Example(given, terms))
        if not large:
            found.append(Example({**given, "training_mode": False}, terms))
    return found


def batch_normalization_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for given, axes, terms in _channels(rng, large):
        mean, inv_std = (statistic.ravel() for statistic in _statistics(given["x"], axes))
        dy = rng.normal(size=given["x"].shape)
        found.append(Example({"dy": dy, **given, "mean": mean, "inv_std": inv_std}, terms))
    return found
