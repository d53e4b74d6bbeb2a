"""Examples for the gradient of resizing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example

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
