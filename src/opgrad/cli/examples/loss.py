"""Example arguments for the operators of opgrad.ops.loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import REDUCTIONS, Array

LARGE = (2048, 4096)  # samples and classes: 32 MiB of float32
SHAPES = ((7,), (0, 5), (3, 65), (40, 10), (2, 3, 4), (2, 1, 3, 1, 33))
Arguments = dict[str, Any]


def _cases(rng: np.random.Generator, large: bool) -> list[tuple[tuple[int, ...], str]]:
    if large:
        return [(LARGE, "mean")]
    return [(shape, REDUCTIONS[(place + 1) % 3]) for place, shape in enumerate((*SHAPES, *SHAPES[2:]))]


def _log_prob(logits: Array) -> Array:
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng.normal(size=shape))


def _dense(rng: np.random.Generator, shape: tuple[int, ...]) -> Arguments:
    return {"labels": np.exp(_log_prob(_normal(rng, shape)))}


def _sparse(rng: np.random.Generator, shape: tuple[int, ...], place: int) -> Arguments:
    dtype = np.int32 if place % 2 else np.int64
    labels = np.asarray(rng.integers(0, shape[-1], shape[:-1]), dtype)
    weight = {"weight": np.asarray(rng.random(shape[:-1]))} if place % 4 < 2 else {}
    return {"labels": labels, **weight}


def softmax_cross_entropy(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({"logits": _normal(rng, shape), **_dense(rng, shape), "reduction": reduction}, shape[-1])
        for shape, reduction in _cases(rng, large)
    ]


def sparse_softmax_cross_entropy(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({"logits": _normal(rng, shape), **_sparse(rng, shape, place), "reduction": reduction}, shape[-1])
        for place, (shape, reduction) in enumerate(_cases(rng, large))
    ]


def _before(rng: np.random.Generator, shape: tuple[int, ...], reduction: str) -> Arguments:
    dy = _normal(rng, shape[:-1] if reduction == "none" else ())
    return {"dy": dy, "log_prob": _log_prob(_normal(rng, shape))}


def softmax_cross_entropy_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({**_before(rng, shape, reduction), **_dense(rng, shape), "reduction": reduction})
        for shape, reduction in _cases(rng, large)
    ]


def sparse_softmax_cross_entropy_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({**_before(rng, shape, reduction), **_sparse(rng, shape, place), "reduction": reduction})
        for place, (shape, reduction) in enumerate(_cases(rng, large))
    ]
