"""Examples for the gradient of convolution."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.contract import Array
from opgrad.contract.windows import axes
from opgrad.testing.examples import Example


def conv_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes; channels and filters around the sizes of tiles."""
    if large:
        return [_convolution(rng, (32, 64, 28, 28), 64, (3, 3), pads=(1, 1, 1, 1))]
    return [
        _convolution(rng, (2, 3, 40), 5, (4,)),
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
