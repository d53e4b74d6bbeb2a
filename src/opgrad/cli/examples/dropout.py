"""Example arguments for the operators of opgrad.ops.dropout."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import Array

LARGE = (4096, 1024)
SMALL = ((), (0, 3), (37,), (3, 65), (2, 3, 4, 5), (3, 1, 5, 2, 417))


def dropout(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"x": rng.normal(size=LARGE), "ratio": 0.1, "seed": np.array(7)})]
    given = [Example({"x": _normal(rng, shape), "seed": np.array(place - 2)}) for place, shape in enumerate(SMALL)]
    x = rng.normal(size=(5, 33))
    more: list[dict[str, Any]] = [{"ratio": ratio, "seed": 2**62 + 1} for ratio in (0.0, 0.1, 1.0)]
    more.append({"training_mode": False, "seed": np.array([3], np.int32)})
    return [*given, *(Example({"x": x, **each}) for each in more)]


def dropout_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"dy": rng.normal(size=LARGE), "mask": rng.random(LARGE) > 0.1, "ratio": 0.1})]
    given = [Example({"dy": _normal(rng, shape), "mask": np.asarray(_normal(rng, shape) > 0.0)}) for shape in SMALL]
    both = {"dy": rng.normal(size=(5, 33)), "mask": rng.random((5, 33)) > 0.1}
    more = [{"ratio": 0.0}, {"ratio": 0.1}, {"ratio": 1.0}, {"ratio": 0.1, "training_mode": False}]
    return [*given, *(Example({**both, **each}) for each in more)]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng.normal(size=shape))
