"""Arguments for the operators that pick elements and slices, and for their gradients."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import Array, Shape

Rng = np.random.Generator


def _indices(rng: Rng, size: int, shape: Shape) -> Array:
    """Indices for an axis of this size, negative ones too."""
    return rng.integers(-size, size, shape) if size else np.zeros(shape, np.int64)


# --- elements along an axis ----------------------------------------------------------------------------------------

# x's shape, indices' shape, axis: short and long rows, many indices for one element, smaller indices, nothing at all.
ALONG: Sequence[tuple[Shape, Shape, int]] = (
    ((7,), (300,), 0),
    ((5000,), (3,), -1),
    ((4, 50), (4, 1), 1),
    ((9, 33), (9, 200), 1),
    ((3, 1000), (3, 40), 1),
    ((6, 37), (11, 37), 0),
    ((2, 5, 70), (2, 90, 70), 1),
    ((3, 4, 2, 5, 3), (2, 4, 7, 3, 2), 2),
    ((4, 0), (4, 0), 1),
    ((0, 3), (0, 5), 1),
    ((4, 3), (4, 0), 1),
)


def _along(rng: Rng, large: bool) -> Iterator[tuple[Shape, Array, int]]:
    for shape, named, axis in [((2048, 4096), (2048, 1024), 1)] if large else ALONG:
        yield shape, _indices(rng, shape[axis], named), axis


def gather_elements(rng: Rng, large: bool) -> Sequence[Example]:
    return [
        Example({"x": rng.normal(size=shape), "indices": indices, "axis": axis})
        for shape, indices, axis in _along(rng, large)
    ]


def gather_elements_grad(rng: Rng, large: bool) -> Sequence[Example]:
    return [
        Example(
            {"dy": rng.normal(size=indices.shape), "shape": shape, "indices": indices, "axis": axis},
            max(1, indices.shape[axis]),
        )
        for shape, indices, axis in _along(rng, large)
    ]


# --- slices named by tuples of indices -----------------------------------------------------------------------------

# x's shape, indices' shape, batch_dims: single elements and slices, far fewer and far more indices than places.
TUPLES: Sequence[tuple[Shape, Shape, int]] = (
    ((5, 4, 35), (12, 2), 0),
    ((5, 4, 35), (3,), 0),
    ((60, 90), (30, 2), 0),
    ((3, 2), (400, 2), 0),
    ((4, 6, 3, 2), (4, 7, 2, 1), 1),
    ((2, 3, 300, 4), (2, 3, 5, 2), 2),
    ((70000,), (2, 40, 1), 0),
    ((0, 3), (0, 1), 0),
    ((3, 0, 2), (4, 1), 0),
)


def _tuples(rng: Rng, large: bool) -> Iterator[tuple[Shape, Array, int, Shape]]:
    for shape, named, batch in [((8192, 4, 256), (16384, 2), 0)] if large else TUPLES:
        sizes = shape[batch : batch + named[-1]]
        indices = np.stack([_indices(rng, size, named[:-1]) for size in sizes], -1)
        yield shape, indices, batch, named[:-1] + shape[batch + named[-1] :]


def gather_nd(rng: Rng, large: bool) -> Sequence[Example]:
    return [
        Example({"x": rng.normal(size=shape), "indices": indices, "batch_dims": batch})
        for shape, indices, batch, _ in _tuples(rng, large)
    ]


def gather_nd_grad(rng: Rng, large: bool) -> Sequence[Example]:
    return [
        Example(
            {"shape": shape, "indices": indices, "dy": rng.normal(size=slices), "batch_dims": batch},
            max(1, indices.size),
        )
        for shape, indices, batch, slices in _tuples(rng, large)
    ]


# --- slices named by ranges ----------------------------------------------------------------------------------------


def slice_grad(rng: Rng, large: bool) -> Sequence[Example]:
    cases: list[dict[str, Any]] = [
        {"shape": (100,), "starts": (3,), "ends": (95,)},
        {"shape": (70001,), "starts": (-2,), "ends": (-(1 << 63),), "steps": (-2,)},
        {"shape": (7, 130), "starts": (1, 65), "ends": (-1, 1 << 62)},
        {"shape": (4, 5), "starts": (0, 4), "ends": (4, -100), "axes": (0, 1), "steps": (2, -3)},
        {"shape": (3, 4, 5, 6), "starts": (1,), "ends": (3,), "axes": (-3,), "steps": (1,)},
        {"shape": (3, 4, 5, 6), "starts": (3, 1), "ends": (0, 5), "axes": (1, -1), "steps": (-2, 1)},
        {"shape": (2, 3, 2, 3, 9), "starts": (0, 2), "ends": (1, 0), "axes": (0, 3), "steps": (1, -1)},
        {"shape": (4, 5), "starts": (), "ends": ()},
        {"shape": (4, 5), "starts": (3,), "ends": (1,)},
        {"shape": (0, 5), "starts": (1,), "ends": (3,), "axes": (1,)},
        {"shape": (), "starts": (), "ends": ()},
    ]
    if large:
        cases = [{"shape": (2048, 4096), "starts": (0, 1024), "ends": (2048, 3072)}]
    return [Example({"dy": rng.normal(size=_sliced(**case)), **case}) for case in cases]


def _sliced(shape: Shape, starts: Shape, ends: Shape, axes: Shape | None = None, steps: Shape | None = None) -> Shape:
    sizes = list(shape)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i] if axes else i
        sizes[axis] = len(range(shape[axis])[start : end : steps[i] if steps else 1])
    return tuple(sizes)
