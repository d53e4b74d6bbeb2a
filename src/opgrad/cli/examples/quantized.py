"""Example arguments for the operators of opgrad.ops.quantized."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example

LARGE = 512, 2048, 2048  # tokens, and the sizes of the weights


def quantized_matmul_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every number of bits, both orders of the weights, blocks of every kind, every kind of zero points."""
    if large:
        return [_example(rng, *LARGE)]
    return [
        _example(rng, 5, 70, 300),
        _example(rng, 130, 40, 64, bits=2, block=16, zeros="packed"),
        _example(rng, 3, 9, 170, bits=8, block=64, zeros="packed"),
        _example(rng, 7, 130, 96, block=16, zeros="packed"),
        _example(rng, 4, 33, 288, block=256, zeros="floats", groups=True),
        _example(rng, 4, 33, 96, bits=2, zeros="floats"),
        _example(rng, 2, 6, 34, block=0, row_block=0, signed=True),
        _example(rng, 6, 98, 130, transposed=False, block=0, zeros="floats"),
        _example(rng, 6, 130, 98, transposed=False, bits=8, block=1, row_block=0, zeros="floats", signed=True),
        _example(rng, 9, 66, 300, transposed=False, block=1, row_block=32, signed=True),
        _example(rng, 0, 4, 32),
        _example(rng, 3, 0, 32),
    ]


def _example(
    rng: np.random.Generator, rows: int, n: int, k: int, bits: int = 4, block: int = 32, row_block: int = 1,
    zeros: str = "", transposed: bool = True, signed: bool = False, groups: bool = False,
) -> Example:  # fmt: skip
    down, across = (n, k) if transposed else (k, n)
    blocks = -(-down // row_block) if row_block else min(down, 1), -(-across // block) if block else min(across, 1)
    whole = blocks[1] * block if block > 1 else across
    given: dict[str, Any] = {
        "dy": rng.normal(size=(2, rows, n)),
        "b": _bytes(rng, down, whole * bits // 8),
        "scales": rng.uniform(0.01, 0.1, blocks),
    }
    if zeros == "packed":
        given["zero_points"] = _bytes(rng, blocks[0], -(-blocks[1] * bits // 8))
    elif zeros:
        given["zero_points"] = rng.integers(0, 2**bits, blocks).astype(np.float64)
    if groups:
        given["g_idx"] = rng.integers(-blocks[1], blocks[1], k).astype(np.int32)
    given |= {"N": n, "K": k, "bits": bits, "row_block": row_block, "column_block": block, "transB": transposed}
    return Example({**given, "signed": signed, "zero_point": 0.0 if zeros or signed else 2.0 ** (bits - 1)}, n)


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)
