"""Resizing along axes: the elements of x and their weights for each element of y, from ONNX's Resize attributes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrad.contract.attributes import Array

MODES = ("nearest", "linear", "cubic")
CROP = "tf_crop_and_resize"
COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_half_pixel_for_nn", CROP),
)
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
POLICIES = ("stretch", "not_larger", "not_smaller")
# The attributes of ONNX's Resize with their defaults.
ATTRIBUTES: Mapping[str, Any] = {
    "mode": "nearest",
    "coordinate_transformation_mode": "half_pixel",
    "nearest_mode": "round_prefer_floor",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "antialias": 0,
    "axes": (),
    "keep_aspect_ratio_policy": "stretch",
}
HALF, ONE = np.float32(0.5), np.float32(1)


@dataclass(frozen=True)
class Resized:
    """An axis: y[o] = the sum of weights[o, j] * x[places[o, j]]."""

    size: int
    places: Array
    weights: Array

    @property
    def count(self) -> int:
        """The elements of y."""
        return len(self.places)

    def matrix(self) -> Array:
        """The weights as a matrix: y = matrix @ x along the axis."""
        found = np.zeros((self.count, self.size))
        np.add.at(found, (np.arange(self.count)[:, None], self.places), self.weights)
        return found


def resized_axes(
    operator: str, x: tuple[int, ...], y: tuple[int, ...], attributes: Mapping[str, Any]
) -> dict[int, Resized]:
    """The axes along which y is not x; the operator's ValueError for shapes and attributes that do not go together."""
    axes = _axes(operator, len(x), attributes["axes"])
    scales, roi = (_numbers(operator, name, attributes[name], len(axes)) for name in ("scales", "roi"))
    _check(operator, attributes, bool(scales), bool(roi))
    for axis, (size, count) in enumerate(zip(x, y, strict=True)):
        scale = scales[axes.index(axis)] if scales and axis in axes else None
        if (axis not in axes and size != count) or (scale is not None and abs(size * scale - count) > 1):
            expected = f"{size} * {scale:.6g} elements" if scale else f"{size} elements, as axes leaves it out"
            raise ValueError(f"{operator}: dy has {count} elements along axis {axis}, expected {expected}")
    found = {}
    for place, axis in enumerate(axes):
        size, count = x[axis], y[axis]
        factor = np.float32(scales[place]) if scales else np.float32(count) / np.float32(max(size, 1))
        region = (roi[place], roi[place + len(axes)]) if roi else (0.0, 1.0)
        if size and count and (factor != 1 or size != count):
            found[axis] = _resized(size, count, factor, region, attributes)
    return found


def _axes(operator: str, rank: int, axes: tuple[int, ...]) -> list[int]:
    """The axes that scales and the region of interest are about."""
    found = [axis % rank for axis in axes if -rank <= axis < rank]
    if len(set(found)) < len(axes):
        raise ValueError(f"{operator}: axes is {axes}, expected different ones from {-rank} to {rank - 1}")
    return found or list(range(rank))


def _numbers(operator: str, name: str, values: tuple[float, ...], axes: int) -> tuple[float, ...]:
    wanted = axes if name == "scales" else 2 * axes
    if values and len(values) != wanted:
        raise ValueError(f"{operator}: {name} has {len(values)} numbers, expected {wanted}")
    if not all(math.isfinite(each) and (each > 0 or name == "roi") for each in values):
        expected = "finite ones above 0" if name == "scales" else "finite ones"
        raise ValueError(f"{operator}: {name} is {values}, expected {expected}")
    return values


def _check(operator: str, attributes: Mapping[str, Any], scales: bool, roi: bool) -> None:
    """Raise ValueError for attributes that contradict each other."""
    if attributes["coordinate_transformation_mode"] == CROP and not roi:
        raise ValueError(f"{operator}: roi is empty, expected the region that {CROP} takes")
    if attributes["antialias"] and attributes["mode"] == "nearest":
        raise ValueError(f"{operator}: antialias is True, expected mode linear or cubic with it, not nearest")
    if attributes["keep_aspect_ratio_policy"] != "stretch" and not scales:
        policy = attributes["keep_aspect_ratio_policy"]
        raise ValueError(f"{operator}: keep_aspect_ratio_policy is {policy}, expected scales with it: sizes lack them")


def _resized(
    size: int, count: int, scale: np.float32, region: tuple[float, float], attributes: Mapping[str, Any]
) -> Resized:
    at = _coordinates(size, count, scale, region, attributes["coordinate_transformation_mode"])
    mode = attributes["mode"]
    outside = (at < 0) | (at > size - 1)
    if mode == "nearest":
        places, weights = _nearest(at, attributes["nearest_mode"])[:, None], np.ones((count, 1))
    else:
        if mode == "linear":
            at = np.clip(at, 0, size - 1)
        spread = max(1.0, 1.0 / float(scale)) if attributes["antialias"] else 1.0
        places, weights = _around(at, spread, mode, attributes["cubic_coeff_a"])
    if attributes["exclude_outside"]:
        weights = np.where((places < 0) | (places >= size), 0.0, weights)
    weights = weights / weights.sum(1, keepdims=True)
    if attributes["coordinate_transformation_mode"] == CROP:
        weights[outside] = 0.0
    return Resized(size, np.clip(places, 0, size - 1), weights)


def _coordinates(size: int, count: int, scale: np.float32, region: tuple[float, float], mode: str) -> Array:
    """The coordinates on x of y's elements, in float32 as in onnxruntime, so that both round to the same neighbours."""
    o, n = np.arange(count, dtype=np.float32), np.float32(size)
    if mode in ("align_corners", CROP) and count == 1:
        middle = HALF * np.float32(sum(region)) * (n - ONE) if mode == CROP else np.float32(0)
        return np.full(1, middle)
    if mode == "align_corners":
        return o * (n - ONE) / np.float32(count - 1)
    if mode == CROP:
        first, last = map(np.float32, region)
        return first * (n - ONE) + o * (last - first) * (n - ONE) / np.float32(count - 1)
    if mode == "asymmetric":
        return o / scale
    if mode == "tf_half_pixel_for_nn":
        return (o + HALF) / scale
    if mode == "pytorch_half_pixel" and count == 1:
        return np.zeros(1, np.float32)
    offset = np.float32(0)
    if mode == "half_pixel_symmetric":
        offset = n / np.float32(2) * (ONE - np.float32(count) / (scale * n))
    return offset + (o + HALF) / scale - HALF


def _nearest(at: Array, mode: str) -> Array:
    """The nearest elements, by the rounding `mode`."""
    if mode == "floor":
        found = np.floor(at)
    elif mode == "ceil":
        found = np.ceil(at)
    else:  # halves go to one side, whatever their sign
        found = np.floor(at + HALF) if mode == "round_prefer_ceil" else np.ceil(at - HALF)
    return found.astype(np.int64)


def _around(at: Array, spread: float, mode: str, a: float) -> tuple[Array, Array]:
    """The neighbours within reach, and how much each counts: by distance, in units of `spread`."""
    reach = math.ceil((2 if mode == "cubic" else 1) * spread)
    at = at.astype(np.float64)
    places = np.floor(at).astype(np.int64)[:, None] + np.arange(1 - reach, 1 + reach)
    d = np.abs(places - at[:, None]) / spread
    if mode == "linear":
        return places, np.maximum(1.0 - d, 0.0)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return places, np.where(d <= 1, near, np.where(d < 2, far, 0.0))
