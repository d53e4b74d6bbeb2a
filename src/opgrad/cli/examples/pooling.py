"""Examples for the gradients of pooling."""

import math
from collections.abc import Sequence

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import Array
from opgrad.ops.reference.windows import axes

LARGE = (32, 64, 56, 56)  # images, channels, and the axes along which windows lie


def max_pool_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Windows side by side and overlapping, whose maxima stand anywhere in their plane."""
    if large:
        return [_largest_of_pairs(rng, (8, 64, 56, 56))]
    cases = [
        ((2, 3, 70), (35,)),
        ((2, 5, 9, 7), (4, 3)),
        ((1, 2, 33, 40), (40, 33)),
        ((1, 3, 4, 5, 6), (2, 3, 3)),
        ((2, 0, 4), (2,)),
        ((2, 3, 4), (0,)),
    ]
    found = [_maxima(rng, *case) for case in cases]
    return [*found, *(_maxima(rng, *case, storage_order=1) for case in cases[:4])]


def _largest_of_pairs(rng: np.random.Generator, windows: tuple[int, ...]) -> Example:
    """What pooling of 2 x 2 elements leaves: each maximum in a window of its own."""
    shape = (*windows[:2], *(2 * count for count in windows[2:]))
    places = [
        2 * place + rng.integers(0, 2, windows) if axis > 1 else place for axis, place in enumerate(np.indices(windows))
    ]
    indices = np.ravel_multi_index(tuple(places), shape)
    return Example({"dy": rng.normal(size=windows), "indices": indices, "shape": shape})


def _maxima(rng: np.random.Generator, shape: tuple[int, ...], windows: tuple[int, ...], **order: int) -> Example:
    plane = math.prod(shape[2:])
    first = np.arange(math.prod(shape[:2])).reshape(*shape[:2], *(1 for _ in windows)) * plane
    indices = first + rng.integers(0, plane, (*shape[:2], *windows))
    arguments = {"dy": rng.normal(size=indices.shape), "indices": indices, "shape": shape, **order}
    return Example(arguments, terms=8)


def average_pool_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes."""
    if large:
        return [_averages(rng, LARGE, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))]
    return [
        _averages(rng, (2, 3, 70), (2,), strides=(2,)),
        _averages(rng, (2, 3, 37), (5,), pads=(2, 4)),
        _averages(rng, (2, 2, 70), (3,), strides=(5,), dilations=(2,)),
        _averages(rng, (2, 3, 9, 8), (3, 2), strides=(2, 1), pads=(1, 1, 1, 0)),
        _averages(rng, (1, 2, 9, 40), (4, 3), strides=(3, 3), ceil_mode=True),
        _averages(
            rng, (1, 2, 9, 40), (3, 4), strides=(2, 3), pads=(1, 0, 0, 2), ceil_mode=True, count_include_pad=True
        ),
        _averages(rng, (2, 2, 8, 9), (3, 4), strides=(2, 3), auto_pad="SAME_UPPER"),
        _averages(rng, (2, 2, 8, 9), (3, 4), strides=(2, 3), auto_pad="SAME_LOWER", count_include_pad=True),
        _averages(rng, (1, 3, 7, 7), (7, 7), auto_pad="VALID"),
        _averages(rng, (1, 2, 5, 6, 7), (2, 3, 2), strides=(1, 2, 1), pads=(1, 0, 1, 0, 1, 0)),
        _averages(rng, (1, 2, 5, 6, 7), (2, 2, 2), dilations=(2, 1, 3), count_include_pad=True),
        _averages(rng, (0, 3, 4, 4), (2, 2)),
    ]


def _averages(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    kernel_shape: tuple[int, ...],
    *,
    strides: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (),
    pads: tuple[int, ...] = (),
    auto_pad: str = "NOTSET",
    ceil_mode: bool = False,
    count_include_pad: bool = False,
) -> Example:
    along = axes("average_pool_grad", shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    dy: Array = rng.normal(size=(*shape[:2], *(axis.count for axis in along)))
    arguments = {"dy": dy, "shape": shape, "kernel_shape": kernel_shape, "strides": strides, "dilations": dilations}
    flags = {"pads": pads, "auto_pad": auto_pad, "ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    return Example(arguments | flags, terms=math.prod(kernel_shape))
