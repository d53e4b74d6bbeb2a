"""Example arguments for the operators of opgrad.ops.linear_loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example

LARGE = 512, 512, 32000  # tokens, numbers of a token, classes


def linear_cross_entropy_loss(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Floats in both orders, integers of every width, weights of tokens, ignored labels, both reductions."""
    if large:
        return [_example(rng, *LARGE)]
    return [
        _example(rng, 5, 30, 70),
        _example(rng, 130, 64, 9, transposed=False, reduction="sum"),
        _example(rng, 7, 33, 65, weighted=True),
        _example(rng, 6, 64, 100, bits=4),
        _example(rng, 4, 40, 33, bits=8, zeros="packed", weighted=True, reduction="sum"),
        _example(rng, 4, 48, 130, bits=2, zeros="floats"),
        _example(rng, 3, 64, 40, bits=4, transposed=False),
        _example(rng, 0, 4, 8),
    ]


linear_cross_entropy_loss_and_grad = linear_cross_entropy_loss


def _example(
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
