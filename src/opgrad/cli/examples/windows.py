"""Example arguments for operators of windows of images: gradients of convolution, pooling and resizing."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Example
from opgrad.contract import Array
from opgrad.ops.reference.windows import axes, transposed_axes

# --- convolution -----------------------------------------------------------------------------------------------------


def conv_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes; channels and filters around the sizes of tiles."""
    if large:
        return [
            _convolution(rng, (32, 64, 28, 28), 64, (3, 3), pads=(1, 1, 1, 1)),
            _convolution(rng, (2, 20, 96, 100), 200, (96, 3)),
            _convolution(rng, (4, 64, 32, 32), 64, (16, 16)),
            _convolution(rng, (64, 16, 16, 16), 64, (16, 16)),
        ]
    return [
        _convolution(rng, (2, 3, 40), 5, (4,)),
        _convolution(rng, (3, 4, 20, 30), 14, (20, 3), strides=(1, 2), pads=(0, 1, 0, 0), group=2),
        _convolution(rng, (9, 2, 6, 5), 3, (6, 5)),
        _convolution(rng, (3, 4, 17), 4, (3,), strides=(2,), pads=(2, 1), dilations=(3,)),
        _convolution(rng, (2, 1, 9, 8), 4, (3, 3), auto_pad="SAME_UPPER"),
        _convolution(rng, (2, 6, 9, 8), 9, (3, 2), group=3, strides=(1, 2), auto_pad="SAME_LOWER"),
        _convolution(rng, (2, 5, 7, 6), 5, (3, 3), group=5, pads=(1, 0, 1, 2)),
        _convolution(rng, (2, 3, 7, 6), 6, (2, 2), group=3, strides=(3, 2), auto_pad="VALID"),
        _convolution(rng, (1, 7, 10, 9), 8, (1, 1), kernel_shape=(1, 1)),
        _convolution(rng, (2, 2, 9, 9), 3, (1, 1), strides=(3, 3)),
        _convolution(rng, (1, 2, 4, 5, 6), 3, (2, 3, 2), strides=(1, 2, 1), pads=(1, 1, 0, 0, 1, 1)),
        _convolution(rng, (1, 2, 5, 4, 7), 2, (2, 1, 3), group=2, dilations=(2, 1, 2)),
        _convolution(rng, (0, 3, 6), 2, (3,)),
        _convolution(rng, (2, 3, 2), 2, (3,)),
    ]


def _convolution(
    rng: np.random.Generator, shape: tuple[int, ...], filters: int, window: tuple[int, ...], **given: Any
) -> Example:
    names = ("strides", "pads", "dilations", "kernel_shape")
    attributes: dict[str, Any] = {"group": 1, **dict.fromkeys(names, ()), "auto_pad": "NOTSET", **given}
    strides, dilations, pads, group = (attributes[name] for name in ("strides", "dilations", "pads", "group"))
    along = axes("conv_grad", shape[2:], window, strides, dilations, pads, attributes["auto_pad"])
    arrays: dict[str, Array] = {
        "dy": rng.normal(size=(shape[0], filters, *(axis.count for axis in along))),
        "x": rng.normal(size=shape),
        "w": rng.normal(size=(filters, shape[1] // group, *window)),
    }
    windows = shape[0] * math.prod(axis.count for axis in along)
    return Example(arrays | attributes, terms=max(windows, filters // group * math.prod(window)))


def conv_transpose_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes; channels around the sizes of tiles."""
    if large:
        return [_transposed(rng, (32, 64, 14, 14), 32, (2, 2), strides=(2, 2))]
    return [
        _transposed(rng, (2, 5, 20), 3, (4,)),
        _transposed(rng, (3, 4, 9), 2, (3,), strides=(2,), pads=(2, 1), dilations=(3,), output_padding=(1,)),
        _transposed(rng, (2, 4, 7, 6), 1, (2, 2), strides=(2, 2)),
        _transposed(rng, (2, 1, 7, 6), 5, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1)),
        _transposed(rng, (2, 6, 5, 4), 3, (3, 2), group=3, strides=(1, 2), auto_pad="SAME_UPPER"),
        _transposed(rng, (2, 3, 5, 4), 6, (3, 4), strides=(2, 3), auto_pad="SAME_LOWER"),
        _transposed(rng, (2, 3, 4, 4), 2, (1, 2), strides=(3, 2), auto_pad="VALID"),
        _transposed(rng, (2, 3, 4, 5), 2, (3, 3), strides=(2, 2), output_shape=(8, 12)),
        _transposed(rng, (2, 3, 4, 5), 2, (3, 3), strides=(2, 2), output_shape=(2, 2, 11, 9), kernel_shape=(3, 3)),
        _transposed(rng, (1, 3, 3, 4), 2, (2, 2), dilations=(3, 1), output_padding=(2, 0)),
        _transposed(rng, (1, 3, 4, 5, 3), 2, (2, 3, 2), strides=(1, 2, 1), pads=(1, 1, 0, 0, 1, 1)),
        _transposed(rng, (1, 4, 3, 2, 4), 2, (2, 1, 3), group=2, strides=(2, 3, 1), dilations=(2, 1, 2)),
        _transposed(rng, (0, 3, 6), 2, (3,)),
        _transposed(rng, (2, 0, 6), 2, (3,)),
    ]


def _transposed(
    rng: np.random.Generator, shape: tuple[int, ...], channels: int, window: tuple[int, ...], **given: Any
) -> Example:
    """channels: of dy, of each group."""
    w, group = (shape[1], channels, *window), given.get("group", 1)
    names = ("strides", "pads", "dilations", "kernel_shape", "output_padding", "output_shape")
    attributes: dict[str, Any] = {**dict.fromkeys(names, ()), "auto_pad": "NOTSET", **given}
    sizes = [axis.size for axis in transposed_axes({"x": shape, "w": w}, attributes)]
    arrays = {name: rng.normal(size=each) for name, each in (("x", shape), ("w", w))}
    dy = rng.normal(size=(shape[0], group * channels, *sizes))
    windows = shape[0] * math.prod(sizes)  # as many as db adds up
    return Example({"dy": dy, **arrays, **attributes}, terms=max(windows, channels * math.prod(window)))


# --- pooling ---------------------------------------------------------------------------------------------------------

LARGE_IMAGES = (32, 64, 56, 56)  # images, channels, and the axes along which windows lie


def max_pool_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Windows side by side and overlapping, whose maxima stand anywhere in their plane."""
    if large:
        # The maxima of pooling of 2 x 2 elements: each in a window of its own.
        windows = (8, 64, 56, 56)
        shape = (*windows[:2], *(2 * count for count in windows[2:]))
        places = [
            2 * place + rng.integers(0, 2, windows) if axis > 1 else place
            for axis, place in enumerate(np.indices(windows))
        ]
        indices = np.ravel_multi_index(tuple(places), shape)
        return [Example({"dy": rng.normal(size=windows), "indices": indices, "shape": shape})]
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


def _maxima(rng: np.random.Generator, shape: tuple[int, ...], windows: tuple[int, ...], **order: int) -> Example:
    plane = math.prod(shape[2:])
    first = np.arange(math.prod(shape[:2])).reshape(*shape[:2], *(1 for _ in windows)) * plane
    indices = first + rng.integers(0, plane, (*shape[:2], *windows))
    arguments = {"dy": rng.normal(size=indices.shape), "indices": indices, "shape": shape, **order}
    return Example(arguments, terms=8)


def average_pool_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes."""
    if large:
        return [_averages(rng, LARGE_IMAGES, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))]
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


def _averages(rng: np.random.Generator, shape: tuple[int, ...], kernel_shape: tuple[int, ...], **given: Any) -> Example:
    names = ("strides", "dilations", "pads")
    attributes: dict[str, Any] = {"kernel_shape": kernel_shape, **dict.fromkeys(names, ()), "auto_pad": "NOTSET"}
    attributes |= {"ceil_mode": False, "count_include_pad": False, **given}
    windows = (attributes[name] for name in ("kernel_shape", *names, "auto_pad", "ceil_mode"))
    along = axes("average_pool_grad", shape[2:], *windows)
    dy: Array = rng.normal(size=(*shape[:2], *(axis.count for axis in along)))
    return Example({"dy": dy, "shape": shape, **attributes}, terms=math.prod(kernel_shape))


# --- resizing --------------------------------------------------------------------------------------------------------

CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}


def resize_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, larger and smaller, along one to four axes; rows that stay."""
    if large:
        return [_resized(rng, (32, 64, 28, 28), (32, 64, 56, 56), mode="linear", scales=(1.0, 1.0, 2.0, 2.0))]
    region = (0.0, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.3)
    return [
        _resized(rng, (3, 2, 40), (3, 2, 75)),
        _resized(rng, (2, 3, 5, 7), (2, 3, 10, 14), mode="linear", scales=(1.0, 1.0, 2.0, 2.0)),
        _resized(rng, (2, 3, 9, 7), (2, 3, 4, 20), mode="linear", coordinate_transformation_mode="align_corners"),
        _resized(rng, (2, 2, 6, 5), (2, 2, 9, 3), mode="cubic", cubic_coeff_a=-0.5, exclude_outside=True),
        _resized(rng, (1, 2, 90, 70), (1, 2, 1, 30), mode="cubic", antialias=True),
        _resized(rng, (2, 40, 6), (2, 13, 6), mode="linear", antialias=True, exclude_outside=True),
        _resized(rng, (2, 5, 4, 3), (2, 11, 7, 3), mode="linear", scales=(2.2, 1.8), axes=(1, -2)),
        _resized(rng, (1, 2, 3, 4, 5), (1, 2, 5, 3, 9), mode="linear", coordinate_transformation_mode="asymmetric"),
        _resized(rng, (2, 3, 2, 4, 3), (4, 3, 3, 4, 7), nearest_mode="ceil"),
        _resized(rng, (1, 2, 6, 8), (1, 2, 5, 9), mode="linear", roi=region, **CROP),
        _resized(rng, (1, 2, 4, 4), (1, 2, 4, 4)),
        _resized(rng, (0, 2, 3), (0, 2, 6)),
    ]


def _resized(rng: np.random.Generator, x: tuple[int, ...], y: tuple[int, ...], **attributes: Any) -> Example:
    terms = [max(4, 4 * -(-after // before)) for before, after in zip(x, y, strict=True) if before not in (0, after)]
    return Example({"dy": rng.normal(size=y), "x": rng.normal(size=x), **attributes}, terms=int(np.prod(terms)))
