"""Examples for the gradients of convolution and of transposed convolution."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import Array
from opgrad.ops.reference.windows import axes, transposed_axes


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
    rng: np.random.Generator,
    shape: tuple[int, ...],
    filters: int,
    window: tuple[int, ...],
    *,
    group: int = 1,
    strides: tuple[int, ...] = (),
    pads: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (),
    auto_pad: str = "NOTSET",
    kernel_shape: tuple[int, ...] = (),
) -> Example:
    along = axes("conv_grad", shape[2:], window, strides, dilations, pads, auto_pad)
    arrays: dict[str, Array] = {
        "dy": rng.normal(size=(shape[0], filters, *(axis.count for axis in along))),
        "x": rng.normal(size=shape),
        "w": rng.normal(size=(filters, shape[1] // group, *window)),
    }
    given: dict[str, Any] = {"group": group, "strides": strides, "pads": pads, "dilations": dilations}
    given |= {"auto_pad": auto_pad, "kernel_shape": kernel_shape}
    windows = shape[0] * math.prod(axis.count for axis in along)
    return Example(arrays | given, terms=max(windows, filters // group * math.prod(window)))


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
