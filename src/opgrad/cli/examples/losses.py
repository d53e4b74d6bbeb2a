"""Example arguments for operators of losses."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Example
from opgrad.contract import REDUCTIONS, Array

LARGE_LOGITS = (2048, 4096)  # samples and classes: 32 MiB of float32
LOGITS = ((7,), (0, 5), (3, 65), (40, 10), (2, 3, 4), (2, 1, 3, 1, 33))
Arguments = dict[str, Any]


def _cases(rng: np.random.Generator, large: bool) -> list[tuple[tuple[int, ...], str]]:
    if large:
        return [(LARGE_LOGITS, "mean")]
    return [(shape, REDUCTIONS[(place + 1) % 3]) for place, shape in enumerate((*LOGITS, *LOGITS[2:]))]


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


# --- of a linear layer -----------------------------------------------------------------------------------------------

LARGE_LAYER = 512, 512, 32000  # tokens, numbers of a token, classes


def linear_cross_entropy_loss(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Floats in both orders, integers of every width, weights of tokens, ignored labels, both reductions."""
    if large:
        return [_layer(rng, *LARGE_LAYER)]
    return [
        _layer(rng, 5, 30, 70),
        _layer(rng, 130, 64, 9, transposed=False, reduction="sum"),
        _layer(rng, 7, 33, 65, weighted=True),
        _layer(rng, 6, 64, 100, bits=4),
        _layer(rng, 4, 40, 33, bits=8, zeros="packed", weighted=True, reduction="sum"),
        _layer(rng, 4, 48, 130, bits=2, zeros="floats"),
        _layer(rng, 3, 64, 40, bits=4, transposed=False),
        _layer(rng, 0, 4, 8),
    ]


linear_cross_entropy_loss_and_grad = linear_cross_entropy_loss


def _layer(
    rng: np.random.Generator, tokens: int, size: int, classes: int, bits: int = 0, zeros: str = "",
    transposed: bool = True, weighted: bool = False, reduction: str = "mean", block: int = 16,
) -> Example:  # fmt: skip
    rows, columns = (classes, size) if transposed else (size, classes)
    blocks = -(-columns // block)
    labels = rng.integers(0, classes, (2, tokens))
    given: dict[str, Any] = {
        "x": rng.normal(size=(2, tokens, size)),
        "labels": np.where(rng.random(labels.shape) < 0.2, -100, labels),
    }
    if bits:
        given["b"] = _bytes(rng, rows, blocks * block * bits // 8)
        given["scales"] = rng.uniform(0.2, 1, (rows, blocks)) / 2**bits
    else:
        given["b"] = rng.normal(size=(rows, columns)) / np.sqrt(size)
    if zeros == "packed":
        given["zero_points"] = _bytes(rng, rows, -(-blocks * bits // 8))
    elif zeros:
        given["zero_points"] = rng.integers(0, 2**bits, (rows, blocks)).astype(np.float64)
    if weighted:
        given["weight"] = rng.uniform(0.5, 2, labels.shape)
    given |= {"N": classes, "K": size, "bits": bits, "column_block": block if bits else 0, "transB": transposed}
    given |= {"zero_point": 2.0 ** (bits - 1) if bits and not zeros else 0.0, "reduction": reduction}
    return Example(given, max(size, classes, tokens))


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


# --- of two layers ---------------------------------------------------------------------------------------------------

LARGE_PAIR = (1024, 8192)  # rows, classes: 32 MiB of float32
PAIRS = (
    ((3, 1), 0.5, 1.0, True),
    ((4, 33), 0.5, 2.0, False),
    ((5, 64), 0.0, 1.0, True),
    ((2, 1000), 1.0, 0.5, True),
    ((3, 70), 0.1, 4.0, True),
    ((2, 129), 0.0, 3.0, False),
    ((0, 5), 0.5, 1.0, False),
    ((3, 0), 0.5, 1.0, False),
)


def softmax_divergence_and_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for shape, beta, temperature, with_slope in [(LARGE_PAIR, 0.5, 1.0, False)] if large else PAIRS:
        arguments: dict[str, Any] = {"logits": rng.normal(0, 2, shape), "teacher_logits": rng.normal(0, 2, shape)}
        if with_slope:
            arguments["dloss"] = rng.normal(size=shape[0])
        arguments |= {"beta": beta, "temperature": temperature}
        found.append(Example(arguments, terms=max(shape[1], 1) + 16))
    return found


# --- of a part of the classes ----------------------------------------------------------------------------------------

LARGE_SHARD = (2048, 16000)  # rows, and the classes of a shard
SHARDS = ((0, 5), (3, 0), (1, 1), (5, 67), (9, 130), (4, 33), (3, 300))
SCALES: tuple[dict[str, float], ...] = ({}, {"softcap": 3.0, "temperature": 0.7}, {"temperature": 2.0})


def _shards(rng: np.random.Generator, large: bool) -> Iterator[dict[str, Any]]:
    """The arguments that both operators have: labels of the shard and of others, with weights and without."""
    for place, (samples, n) in enumerate((LARGE_SHARD,) if large else SHARDS):
        labels = rng.integers(0, n + 20, samples, dtype=np.int32 if place % 2 else np.int64)
        weight = {} if large or place % 2 else {"weight": rng.random(n) + 0.5}
        scale = {} if large else SCALES[place % 3]
        yield {"logits": 3 * rng.normal(size=(samples, n)), "labels": labels, "first": 10, **weight, **scale}


def cross_entropy_shard(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({**given, "moment": bool(place % 2)}, max(given["logits"].shape[1], 1))
        for place, given in enumerate(_shards(rng, large))
    ]


def cross_entropy_shard_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for given in _shards(rng, large):
        samples = len(given["labels"])
        factors = np.concatenate([3 + rng.random((2, samples)), rng.normal(size=(4, samples))])
        factors[2:, 1::3] = 0  # rows without a gradient
        found.append(Example({**given, "factors": factors}))
    return found
