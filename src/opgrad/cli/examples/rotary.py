"""Example arguments for the operators of opgrad.ops.rotary."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example

LARGE = (4, 32, 512, 128)  # sequences, heads, tokens, size of a head: 32 MiB of float32


def rotary_embedding(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return _examples(rng, large, "x")


def rotary_embedding_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return _examples(rng, large, "dy")


def _examples(rng: np.random.Generator, large: bool, name: str) -> list[Example]:
    """Both kinds of pairs, parts of a head, every layout, tables by token and by position."""
    if large:
        return [_example(rng, name, LARGE, (LARGE[2],), LARGE[3])]
    return [
        _example(rng, name, (2, 3, 5, 64), (5,), 64),
        _example(rng, name, (2, 3, 5, 38), (9,), 38, interleaved=True),
        _example(rng, name, (2, 3, 5, 40), (2, 5), 24, rotary_embedding_dim=24),
        _example(rng, name, (2, 5, 3, 18), (1, 5), 6, rotary_embedding_dim=6, interleaved=True, layout="BLHD"),
        _example(rng, name, (3, 4, 2 * 10), (7,), 10, _positions(rng, 7, 3, 4), num_heads=2),
        _example(rng, name, (2, 1, 4, 8), (6,), 8, _positions(rng, 6, 2, 4), layout="BHLD", num_heads=1),
        _example(rng, name, (2, 4, 5, 130), (4,), 130, _positions(rng, 4, 2, 4).astype("i4"), layout="BLHD"),
        _example(rng, name, (0, 2, 3, 4), (3,), 4),
    ]


def _positions(rng: np.random.Generator, rows: int, *shape: int) -> np.ndarray:
    return rng.integers(-rows, rows, shape)


def _example(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], rows: tuple[int, ...], turned: int,
    positions: np.ndarray | None = None, **attributes: Any,
) -> Example:  # fmt: skip
    angles = rng.uniform(0, 7, (*rows, turned // 2))
    arrays = {name: rng.normal(size=shape), "cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    found = {} if positions is None else {"position_ids": positions}
    return Example({**arrays, **found, **attributes}, terms=2)
