"""Example arguments for the operators of opgrad.ops.vocab_parallel."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example

LARGE = (2048, 16000)  # rows, and the classes of a shard
SHAPES = ((0, 5), (3, 0), (1, 1), (5, 67), (9, 130), (4, 33), (3, 300))
SCALES: tuple[dict[str, float], ...] = ({}, {"softcap": 3.0, "temperature": 0.7}, {"temperature": 2.0})


def _cases(rng: np.random.Generator, large: bool) -> Iterator[dict[str, Any]]:
    """The arguments that both operators have: labels of the shard and of others, with weights and without."""
    for place, (samples, n) in enumerate((LARGE,) if large else SHAPES):
        labels = rng.integers(0, n + 20, samples, dtype=np.int32 if place % 2 else np.int64)
        weight = {} if large or place % 2 else {"weight": rng.random(n) + 0.5}
        scale = {} if large else SCALES[place % 3]
        yield {"logits": 3 * rng.normal(size=(samples, n)), "labels": labels, "first": 10, **weight, **scale}


def cross_entropy_shard(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({**given, "moment": bool(place % 2)}, max(given["logits"].shape[1], 1))
        for place, given in enumerate(_cases(rng, large))
    ]


def cross_entropy_shard_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for given in _cases(rng, large):
        samples = len(given["labels"])
        factors = np.concatenate([3 + rng.random((2, samples)), rng.normal(size=(4, samples))])
        factors[2:, 1::3] = 0  # rows without a gradient
        found.append(Example({**given, "factors": factors}))
    return found
