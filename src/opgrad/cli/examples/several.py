"""Example arguments for the operators of opgrad.ops.several."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from opgrad.cli.examples import Example
from opgrad.contract import Array

SIZES = (0, 1, 7, 16, 17, 63, 64, 65, 1000, 4097)
LARGE = 32  # arrays of 2**18 elements, for the benchmark


def _arrays(rng: Generator, large: bool) -> list[list[Array]]:
    """Lists of arrays of many sizes."""
    if large:
        return [[rng.normal(size=(1 << 18,)) for _ in range(LARGE)]]
    return [
        [rng.normal(size=size) for size in SIZES],
        [rng.normal(size=(3, 5)), rng.normal(size=()), rng.normal(size=(2, 0, 4)), rng.normal(size=(2, 3, 4))],
        [rng.normal(size=70001)],
        [rng.normal(size=0)],
    ]


def concat_training(rng: Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"arrays": [rng.normal(size=(4096, 512)) for _ in range(4)], "axis": 1})]
    found = [Example({"arrays": [rng.normal(size=(3, size, 5)) for size in SIZES], "axis": 1})]
    found += [Example({"arrays": [rng.normal(size=(size, 3)) for size in (2, 0, 40000)]})]
    found += [Example({"arrays": [rng.normal(size=(4, 3, size)) for size in (1, 2)], "axis": -1})]
    found += [Example({"arrays": [rng.integers(0, 9, size) for size in (2, 5)]})]
    return [*found, Example({"arrays": [rng.normal(size=(0, 3))], "axis": 1})]


def split_training(rng: Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"x": rng.normal(size=(4096, 2048)), "split": (512,) * 4, "axis": 1})]
    return [
        Example({"x": rng.normal(size=(3, sum(SIZES), 2)), "split": SIZES, "axis": 1}),
        Example({"x": rng.normal(size=(40002, 3)), "split": (2, 40000)}),
        Example({"x": rng.normal(size=(4, 3)), "split": (1, 0, 2), "axis": -1}),
        Example({"x": rng.normal(size=(4, 3)) > 0, "split": (4,)}),
        Example({"x": rng.normal(size=(0, 3)), "split": (1, 2), "axis": 1}),
    ]


def pass_through(rng: Generator, large: bool) -> Sequence[Example]:
    return [Example({"arrays": arrays}) for arrays in _arrays(rng, large)]


def is_all_finite(rng: Generator, large: bool) -> Sequence[Example]:
    found = [Example({"arrays": arrays}) for arrays in _arrays(rng, large)]
    if large:
        return found
    for special in (np.inf, -np.inf, np.nan):
        arrays = [rng.normal(size=40), rng.normal(size=40000)]
        arrays[1][39_999] = special
        for only in ({}, {"isinf_only": True}, {"isnan_only": True}):
            found.append(Example({"arrays": arrays, **only}))
    return found


def mixed_precision_scale(rng: Generator, large: bool) -> Sequence[Example]:
    scale = np.float32(1.5)
    found = [Example({"scale": np.asarray(scale), "arrays": arrays}) for arrays in _arrays(rng, large)]
    if large:
        return found
    for fused in (False, True):
        arrays = [rng.normal(size=(5, 7)), rng.normal(size=33), rng.normal(size=0)]
        for out_dtype in ("float16", "bfloat16", "float32"):
            arguments = {"scale": np.full(1, scale), "arrays": arrays, "fuse_outputs": fused, "out_dtype": out_dtype}
            found.append(Example(arguments))
    return found


def reduce_all_l2(rng: Generator, large: bool) -> Sequence[Example]:
    return [Example({"arrays": arrays}, sum(array.size for array in arrays)) for arrays in _arrays(rng, large)]
