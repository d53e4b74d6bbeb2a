"""Example arguments for operators of arrays, lists of arrays, packed weights, and windows of images."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Cases, Example, random_bytes
from opgrad.contract import Array, Shape
from opgrad.ops.reference.windows import axes, transposed_axes

# Shape, axes and attributes: rows, columns, groups of axes, long sums, nothing to sum, empty arrays.
SUMS = [
    ((7,), (0,), {}),
    ((3, 40), (1,), {"keepdims": False}),
    ((70, 33), (0,), {}),
    ((3, 1500, 5), (-2,), {"keepdims": False}),
    ((4, 5, 6, 7, 3), (0, 2, -1), {}),
    ((2, 130, 150), (1,), {}),
    ((40000,), (), {"keepdims": False}),
    ((3, 4), (), {"noop_with_empty_axes": True}),
    ((3, 4), (), {}),
    ((2, 1, 3), (1, 1), {"keepdims": False}),
    ((), (), {}),
    ((0, 3), (0,), {}),
    ((3, 0), (0,), {}),
]
# Shapes of a and b: alike, numbers, rows, columns, both broadcast, several groups of axes, empty ones.
QUOTIENTS = [
    ((7,), (7,)),
    ((3, 40), ()),
    ((), (3, 40)),
    ((40, 65), (65,)),
    ((40, 65), (40, 1)),
    ((40, 1), (1, 65)),
    ((5,), (3, 4, 5)),
    ((2, 3, 1, 5, 6), (3, 4, 1, 6)),
    ((1,), (1, 1)),
    ((0, 3), (3,)),
    ((1, 3), (0, 1)),
]


def reduce_sum_training(rng: np.random.Generator, cases: Cases = SUMS) -> Iterator[Example]:
    for shape, summed, more in cases:
        yield Example({"x": rng.normal(1, 1, shape), "axes": summed, **more}, 40000)
    whole = rng.integers(-1000, 1000, (30, 4, 50))
    for dtype, summed in itertools.product(("int32", "int64"), ((0, 2), (1,), ())):
        yield Example({"x": whole.astype(dtype), "axes": summed})


def div_grad(rng: np.random.Generator, cases: Cases = QUOTIENTS) -> Iterator[Example]:
    for a, b in cases:
        shape = np.broadcast_shapes(a, b)
        # Of one sign, so that a sum that is a single number does not cancel to much less than its terms.
        dy, dividend, divisor = (rng.uniform(0.5, 2, each) for each in (shape, a, b))
        yield Example({"dy": dy, "a": dividend, "b": divisor}, max(dy.size, 1))


BROADCAST = (
    ((2, 3, 4), (3, 1)), ((), (5,)), ((1, 5), (5,)), ((2, 1, 4, 1), (3, 1, 5)), ((0, 1), (1, 3)), ((3,), (3,)),
)  # fmt: skip


def broadcast_gradient_args(rng: np.random.Generator, cases: Cases = BROADCAST) -> Sequence[Example]:
    return [Example({"a_shape": a, "b_shape": b}) for a, b in cases]


def zero_gradient(
    rng: np.random.Generator, cases: Cases = ((), (5,), (70, 33), (2, 3, 4, 5, 6), (0, 3))
) -> Sequence[Example]:
    signals = [np.ones(1, bool), np.arange(3), np.zeros((), np.uint8)]
    return [Example({"x": rng.normal(size=s), "unused": signals[i % 3]}) for i, s in enumerate(cases)]


def accumulate(rng: np.random.Generator, cases: Cases = ((), (0,), (7,), (3, 33), (70001,))) -> Iterator[Example]:
    for shape in cases:
        arrays = {name: np.asarray(rng.normal(size=shape)) for name in ("buffer", "value")}
        yield Example(arrays)
    yield Example({**arrays, "update": False})


LENGTHS = (0, 1, 7, 16, 17, 63, 64, 65, 1000, 4097)
# The shapes of the arrays of each list.
LISTS: tuple[tuple[Shape, ...], ...] = (
    tuple((size,) for size in LENGTHS),
    ((3, 5), (), (2, 0, 4), (2, 3, 4)),
    ((70001,),),
    ((0,),),
)


def _arrays(rng: np.random.Generator, shapes: Sequence[Shape]) -> list[Array]:
    return [np.asarray(rng.normal(size=shape)) for shape in shapes]


JOINED: tuple[tuple[tuple[Shape, ...], int], ...] = (
    (tuple((3, size, 5) for size in LENGTHS), 1),
    (((2, 3), (0, 3), (40000, 3)), 0),
    (((4, 3, 1), (4, 3, 2)), -1),
    (((0, 3),), 1),
)


def concat_training(rng: np.random.Generator, cases: Cases = JOINED) -> Iterator[Example]:
    for shapes, axis in cases:
        yield Example({"arrays": _arrays(rng, shapes), "axis": axis})
    yield Example({"arrays": [rng.integers(0, 9, size) for size in (2, 5)]})


PIECES = (((3, sum(LENGTHS), 2), LENGTHS, 1), ((40002, 3), (2, 40000), 0), ((4, 3), (1, 0, 2), -1), ((0, 3), (1, 2), 1))


def split_training(rng: np.random.Generator, cases: Cases = PIECES) -> Iterator[Example]:
    for shape, split, axis in cases:
        yield Example({"x": rng.normal(size=shape), "split": split, "axis": axis})
    yield Example({"x": rng.normal(size=(4, 3)) > 0, "split": (4,)})


def pass_through(rng: np.random.Generator, cases: Cases = LISTS) -> Sequence[Example]:
    return [Example({"arrays": _arrays(rng, shapes)}) for shapes in cases]


def is_all_finite(rng: np.random.Generator, cases: Cases = LISTS) -> Iterator[Example]:
    for shapes in cases:
        yield Example({"arrays": _arrays(rng, shapes)})
    for special in (np.inf, -np.inf, np.nan):
        arrays = [rng.normal(size=40), rng.normal(size=40000)]
        arrays[1][39_999] = special
        for only in ({}, {"isinf_only": True}, {"isnan_only": True}):
            yield Example({"arrays": arrays, **only})


def mixed_precision_scale(rng: np.random.Generator, cases: Cases = LISTS) -> Iterator[Example]:
    scale = np.float32(1.5)
    for shapes in cases:
        yield Example({"scale": np.asarray(scale), "arrays": _arrays(rng, shapes)})
    for fused in (False, True):
        arrays = _arrays(rng, ((5, 7), (33,), (0,)))
        for out_dtype in ("float16", "bfloat16", "float32"):
            arguments = {"scale": np.full(1, scale), "arrays": arrays, "fuse_outputs": fused, "out_dtype": out_dtype}
            yield Example(arguments)


def reduce_all_l2(rng: np.random.Generator, cases: Cases = LISTS) -> Sequence[Example]:
    return [Example({"arrays": _arrays(rng, shapes)}, sum(map(math.prod, shapes))) for shapes in cases]


WEIGHTS = ((0,), (), (7,), (16, 3), (1000,), (3, 0), (33, 65))
# The shapes of the weights, with the learning rate and what else the optimizer is told.
STEPS: tuple[tuple[tuple[Shape, ...], Any], ...] = ((WEIGHTS, 0.1), (((70001,),), [3.0]))
ADAMW: tuple[tuple[tuple[Shape, ...], float, dict[str, Any]], ...] = (
    (WEIGHTS, 1e-3, {"step": 1}),
    (((70001,),), 0.5, {"step": 7, "alpha": 0.8, "beta": 0.99, "epsilon": 1e-4, "weight_decay": 0.1}),
    (WEIGHTS, 0.1, {"step": 1000, "adam_mode": 1}),
    (((5,),), 0.1, {"step": 2, "adam_mode": 1, "correct_bias": False}),
)
CLIPPED: tuple[tuple[tuple[Shape, ...], dict[str, float]], ...] = (
    (WEIGHTS, {}), (((70001,),), {"max_norm": 0.5}), (((3,),), {"max_norm": 100.0}), (((0,),), {}),
)  # fmt: skip


def sgd_optimizer(rng: np.random.Generator, cases: Cases = STEPS) -> Iterator[Example]:
    for shapes, rate in cases:
        lists = {name: _arrays(rng, shapes) for name in ("weights", "gradients")}
        yield Example({"lr": np.array(rate, np.float32), **lists})


def adamw_optimizer(rng: np.random.Generator, cases: Cases = ADAMW) -> Iterator[Example]:
    for shapes, rate, rest in cases:
        lists = {name: _arrays(rng, shapes) for name in ("weights", "gradients")}
        lists["momentums_1"] = [np.asarray(0.1 * each) for each in _arrays(rng, shapes)]
        lists["momentums_2"] = [np.asarray(each * each) for each in _arrays(rng, shapes)]
        yield Example({"lr": np.array(rate, np.float32), **lists, **rest, "step": np.array(rest["step"])})


def clip_grad_norm(rng: np.random.Generator, cases: Cases = CLIPPED) -> Iterator[Example]:
    for shapes, rest in cases:
        yield Example({"gradients": _arrays(rng, shapes), **rest}, sum(map(math.prod, shapes)))


def _indices(rng: np.random.Generator, size: int, shape: Shape) -> Array:
    """Indices for an axis of this size, negative ones too."""
    return rng.integers(-size, size, shape) if size else np.zeros(shape, np.int64)


# x's shape, indices' shape, axis: short and long rows, many indices for one element, smaller indices, nothing at all.
ALONG: Sequence[tuple[Shape, Shape, int]] = (
    ((7,), (300,), 0),
    ((5000,), (3,), -1),
    ((4, 50), (4, 1), 1),
    ((9, 33), (9, 200), 1),
    ((3, 1000), (3, 40), 1),
    ((6, 37), (11, 37), 0),
    ((2, 5, 70), (2, 90, 70), 1),
    ((3, 4, 2, 5, 3), (2, 4, 7, 3, 2), 2),
    ((4, 0), (4, 0), 1),
    ((0, 3), (0, 5), 1),
    ((4, 3), (4, 0), 1),
)


def _elements(rng: np.random.Generator, cases: Cases = ALONG, *, backward: bool) -> Iterator[Example]:
    for shape, named, axis in cases:
        indices = _indices(rng, shape[axis], named)
        x = {"dy": rng.normal(size=named), "shape": shape} if backward else {"x": rng.normal(size=shape)}
        yield Example({**x, "indices": indices, "axis": axis}, max(1, named[axis]) if backward else 1)


gather_elements, gather_elements_grad = partial(_elements, backward=False), partial(_elements, backward=True)

# x's shape, indices' shape, batch_dims: single elements and slices, far fewer and far more indices than places.
TUPLES: Sequence[tuple[Shape, Shape, int]] = (
    ((5, 4, 35), (12, 2), 0),
    ((5, 4, 35), (3,), 0),
    ((60, 90), (30, 2), 0),
    ((3, 2), (400, 2), 0),
    ((4, 6, 3, 2), (4, 7, 2, 1), 1),
    ((2, 3, 300, 4), (2, 3, 5, 2), 2),
    ((70000,), (2, 40, 1), 0),
    ((0, 3), (0, 1), 0),
    ((3, 0, 2), (4, 1), 0),
)


def _slices(rng: np.random.Generator, cases: Cases = TUPLES, *, backward: bool) -> Iterator[Example]:
    for shape, named, batch in cases:
        sizes = shape[batch : batch + named[-1]]
        indices = np.stack([_indices(rng, size, named[:-1]) for size in sizes], -1)
        slices = named[:-1] + shape[batch + named[-1] :]
        x = {"dy": rng.normal(size=slices), "shape": shape} if backward else {"x": rng.normal(size=shape)}
        yield Example({**x, "indices": indices, "batch_dims": batch}, max(1, indices.size) if backward else 1)


gather_nd, gather_nd_grad = partial(_slices, backward=False), partial(_slices, backward=True)


# What is sliced, with all that says which part of it is taken.
RANGES: tuple[dict[str, Any], ...] = (
    {"shape": (100,), "starts": (3,), "ends": (95,)},
    {"shape": (70001,), "starts": (-2,), "ends": (-(1 << 63),), "steps": (-2,)},
    {"shape": (7, 130), "starts": (1, 65), "ends": (-1, 1 << 62)},
    {"shape": (4, 5), "starts": (0, 4), "ends": (4, -100), "axes": (0, 1), "steps": (2, -3)},
    {"shape": (3, 4, 5, 6), "starts": (1,), "ends": (3,), "axes": (-3,), "steps": (1,)},
    {"shape": (3, 4, 5, 6), "starts": (3, 1), "ends": (0, 5), "axes": (1, -1), "steps": (-2, 1)},
    {"shape": (2, 3, 2, 3, 9), "starts": (0, 2), "ends": (1, 0), "axes": (0, 3), "steps": (1, -1)},
    {"shape": (4, 5), "starts": (), "ends": ()},
    {"shape": (4, 5), "starts": (3,), "ends": (1,)},
    {"shape": (0, 5), "starts": (1,), "ends": (3,), "axes": (1,)},
    {"shape": (), "starts": (), "ends": ()},
)


def slice_grad(rng: np.random.Generator, cases: Cases = RANGES) -> Sequence[Example]:
    return [Example({"dy": rng.normal(size=_sliced(**case)), **case}) for case in cases]


def _sliced(shape: Shape, starts: Shape, ends: Shape, axes: Shape | None = None, steps: Shape | None = None) -> Shape:
    sizes = list(shape)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i] if axes else i
        sizes[axis] = len(range(shape[axis])[start : end : steps[i] if steps else 1])
    return tuple(sizes)


# Rows, the sizes of the weights, and options: every number of bits, both orders of the weights, blocks of every kind,
# every kind of zero points.
PRODUCTS: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (5, 70, 300, {}),
    (130, 40, 64, {"bits": 2, "block": 16, "zeros": "packed"}),
    (3, 9, 170, {"bits": 8, "block": 64, "zeros": "packed"}),
    (7, 130, 96, {"block": 16, "zeros": "packed"}),
    (4, 33, 288, {"block": 256, "zeros": "floats", "groups": True}),
    (4, 33, 96, {"bits": 2, "zeros": "floats"}),
    (2, 6, 34, {"block": 0, "row_block": 0, "signed": True}),
    (6, 98, 130, {"transposed": False, "block": 0, "zeros": "floats"}),
    (6, 130, 98, {"transposed": False, "bits": 8, "block": 1, "row_block": 0, "zeros": "floats", "signed": True}),
    (9, 66, 300, {"transposed": False, "block": 1, "row_block": 32, "signed": True}),
    (0, 4, 32, {}),
    (3, 0, 32, {}),
)


def quantized_matmul_grad(rng: np.random.Generator, cases: Cases = PRODUCTS) -> Sequence[Example]:
    return [_product(rng, *sizes, **options) for *sizes, options in cases]


def _product(
    rng: np.random.Generator, rows: int, n: int, k: int, bits: int = 4, block: int = 32, row_block: int = 1,
    zeros: str = "", transposed: bool = True, signed: bool = False, groups: bool = False,
) -> Example:  # fmt: skip
    down, across = (n, k) if transposed else (k, n)
    blocks = -(-down // row_block) if row_block else min(down, 1), -(-across // block) if block else min(across, 1)
    whole = blocks[1] * block if block > 1 else across
    given: dict[str, Any] = {
        "dy": rng.normal(size=(2, rows, n)),
        "b": random_bytes(rng, down, whole * bits // 8),
        "scales": rng.uniform(0.01, 0.1, blocks),
    }
    if zeros == "packed":
        given["zero_points"] = random_bytes(rng, blocks[0], -(-blocks[1] * bits // 8))
    elif zeros:
        given["zero_points"] = rng.integers(0, 2**bits, blocks).astype(np.float64)
    if groups:
        given["g_idx"] = rng.integers(-blocks[1], blocks[1], k).astype(np.int32)
    given |= {"N": n, "K": k, "bits": bits, "row_block": row_block, "column_block": block, "transB": transposed}
    return Example({**given, "signed": signed, "zero_point": 0.0 if zeros or signed else 2.0 ** (bits - 1)}, n)


# x, filters, windows, and attributes, along one to three axes; channels and filters around the sizes of tiles.
CONVOLUTIONS: tuple[tuple[Shape, int, Shape, dict[str, Any]], ...] = (
    ((2, 3, 40), 5, (4,), {}),
    ((3, 4, 20, 30), 14, (20, 3), {"strides": (1, 2), "pads": (0, 1, 0, 0), "group": 2}),
    ((9, 2, 6, 5), 3, (6, 5), {}),
    ((3, 4, 17), 4, (3,), {"strides": (2,), "pads": (2, 1), "dilations": (3,)}),
    ((2, 1, 9, 8), 4, (3, 3), {"auto_pad": "SAME_UPPER"}),
    ((2, 6, 9, 8), 9, (3, 2), {"group": 3, "strides": (1, 2), "auto_pad": "SAME_LOWER"}),
    ((2, 5, 7, 6), 5, (3, 3), {"group": 5, "pads": (1, 0, 1, 2)}),
    ((2, 3, 7, 6), 6, (2, 2), {"group": 3, "strides": (3, 2), "auto_pad": "VALID"}),
    ((1, 7, 10, 9), 8, (1, 1), {"kernel_shape": (1, 1)}),
    ((2, 2, 9, 9), 3, (1, 1), {"strides": (3, 3)}),
    ((1, 2, 4, 5, 6), 3, (2, 3, 2), {"strides": (1, 2, 1), "pads": (1, 1, 0, 0, 1, 1)}),
    ((1, 2, 5, 4, 7), 2, (2, 1, 3), {"group": 2, "dilations": (2, 1, 2)}),
    ((0, 3, 6), 2, (3,), {}),
    ((2, 3, 2), 2, (3,), {}),
)


def conv_grad(rng: np.random.Generator, cases: Cases = CONVOLUTIONS) -> Sequence[Example]:
    return [convolved(rng, *sizes, **given) for *sizes, given in cases]


def convolved(
    rng: np.random.Generator, shape: tuple[int, ...], filters: int, window: tuple[int, ...], **given: Any
) -> Example:
    names = ("strides", "pads", "dilations", "kernel_shape")
    attributes: dict[str, Any] = {"group": 1, **dict.fromkeys(names, ()), "auto_pad": "NOTSET", **given}
    strides, dilations, pads, group = (attributes[name] for name in ("strides", "dilations", "pads", "group"))
    along = axes("conv_grad", shape[2:], window, strides, dilations, pads, attributes["auto_pad"])
    arrays: dict[str, Array] = {
        "dy": rng.normal(size=(shape[0], filters, *(axis.count for axis in along))),
        "x": rng.normal(size=shape),
        "w": rng.normal(size=(filters, shape[1] // group, *window)),
    }
    windows = shape[0] * math.prod(axis.count for axis in along)
    return Example(arrays | attributes, terms=max(windows, filters // group * math.prod(window)))


# x, channels of dy in each group, windows, and attributes; channels around the sizes of tiles.
TRANSPOSED: tuple[tuple[Shape, int, Shape, dict[str, Any]], ...] = (
    ((2, 5, 20), 3, (4,), {}),
    ((3, 4, 9), 2, (3,), {"strides": (2,), "pads": (2, 1), "dilations": (3,), "output_padding": (1,)}),
    ((2, 4, 7, 6), 1, (2, 2), {"strides": (2, 2)}),
    ((2, 1, 7, 6), 5, (3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
    ((2, 6, 5, 4), 3, (3, 2), {"group": 3, "strides": (1, 2), "auto_pad": "SAME_UPPER"}),
    ((2, 3, 5, 4), 6, (3, 4), {"strides": (2, 3), "auto_pad": "SAME_LOWER"}),
    ((2, 3, 4, 4), 2, (1, 2), {"strides": (3, 2), "auto_pad": "VALID"}),
    ((2, 3, 4, 5), 2, (3, 3), {"strides": (2, 2), "output_shape": (8, 12)}),
    ((2, 3, 4, 5), 2, (3, 3), {"strides": (2, 2), "output_shape": (2, 2, 11, 9), "kernel_shape": (3, 3)}),
    ((1, 3, 3, 4), 2, (2, 2), {"dilations": (3, 1), "output_padding": (2, 0)}),
    ((1, 3, 4, 5, 3), 2, (2, 3, 2), {"strides": (1, 2, 1), "pads": (1, 1, 0, 0, 1, 1)}),
    ((1, 4, 3, 2, 4), 2, (2, 1, 3), {"group": 2, "strides": (2, 3, 1), "dilations": (2, 1, 2)}),
    ((0, 3, 6), 2, (3,), {}),
    ((2, 0, 6), 2, (3,), {}),
)


def conv_transpose_grad(rng: np.random.Generator, cases: Cases = TRANSPOSED) -> Sequence[Example]:
    return [transposed(rng, *sizes, **given) for *sizes, given in cases]


def transposed(
    rng: np.random.Generator, shape: tuple[int, ...], channels: int, window: tuple[int, ...], **given: Any
) -> Example:
    """channels: of dy, of each group."""
    w, group = (shape[1], channels, *window), given.get("group", 1)
    names = ("strides", "pads", "dilations", "kernel_shape", "output_padding", "output_shape")
    attributes: dict[str, Any] = {**dict.fromkeys(names, ()), "auto_pad": "NOTSET", **given}
    sizes = [axis.size for axis in transposed_axes({"x": shape, "w": w}, attributes)]
    arrays = {name: rng.normal(size=each) for name, each in (("x", shape), ("w", w))}
    dy = rng.normal(size=(shape[0], group * channels, *sizes))
    windows = shape[0] * math.prod(sizes)  # as many as db adds up
    return Example({"dy": dy, **arrays, **attributes}, terms=max(windows, channels * math.prod(window)))


# The shape, the number of windows along each axis, storage_order, and whether each window has elements of its own.
MAXIMA: tuple[tuple[Shape, Shape, int, bool], ...] = (
    ((2, 3, 70), (35,), 0, False),
    ((2, 5, 9, 7), (4, 3), 0, False),
    ((1, 2, 33, 40), (40, 33), 0, False),
    ((1, 3, 4, 5, 6), (2, 3, 3), 0, False),
    ((2, 0, 4), (2,), 0, False),
    ((2, 3, 4), (0,), 0, False),
    ((2, 3, 70), (35,), 1, False),
    ((2, 5, 9, 7), (4, 3), 1, False),
    ((1, 2, 33, 40), (40, 33), 1, False),
    ((1, 3, 4, 5, 6), (2, 3, 3), 1, False),
    ((2, 3, 8, 6), (4, 2), 0, True),
)


def max_pool_grad(rng: np.random.Generator, cases: Cases = MAXIMA) -> Iterator[Example]:
    for shape, counts, order, apart in cases:
        windows = (*shape[:2], *counts)
        places = list(np.indices(windows))
        for axis in range(2, len(shape)):
            size = shape[axis] // counts[axis - 2] if apart else shape[axis]
            places[axis] = places[axis] * (size if apart else 0) + rng.integers(0, size, windows)
        indices = np.ravel_multi_index(tuple(places), shape)
        arguments = {"dy": rng.normal(size=windows), "indices": indices, "shape": shape, "storage_order": order}
        yield Example(arguments, terms=8)


# The shape, the window, and attributes, along one to three axes.
AVERAGES: tuple[tuple[Shape, Shape, dict[str, Any]], ...] = (
    ((2, 3, 70), (2,), {"strides": (2,)}),
    ((2, 3, 37), (5,), {"pads": (2, 4)}),
    ((2, 2, 70), (3,), {"strides": (5,), "dilations": (2,)}),
    ((2, 3, 9, 8), (3, 2), {"strides": (2, 1), "pads": (1, 1, 1, 0)}),
    ((1, 2, 9, 40), (4, 3), {"strides": (3, 3), "ceil_mode": True}),
    ((1, 2, 9, 40), (3, 4), {"strides": (2, 3), "pads": (1, 0, 0, 2), "ceil_mode": True, "count_include_pad": True}),
    ((2, 2, 8, 9), (3, 4), {"strides": (2, 3), "auto_pad": "SAME_UPPER"}),
    ((2, 2, 8, 9), (3, 4), {"strides": (2, 3), "auto_pad": "SAME_LOWER", "count_include_pad": True}),
    ((1, 3, 7, 7), (7, 7), {"auto_pad": "VALID"}),
    ((1, 2, 5, 6, 7), (2, 3, 2), {"strides": (1, 2, 1), "pads": (1, 0, 1, 0, 1, 0)}),
    ((1, 2, 5, 6, 7), (2, 2, 2), {"dilations": (2, 1, 3), "count_include_pad": True}),
    ((0, 3, 4, 4), (2, 2), {}),
)


def average_pool_grad(rng: np.random.Generator, cases: Cases = AVERAGES) -> Iterator[Example]:
    names = ("strides", "dilations", "pads")
    for shape, kernel_shape, given in cases:
        attributes: dict[str, Any] = {"kernel_shape": kernel_shape, **dict.fromkeys(names, ()), "auto_pad": "NOTSET"}
        attributes |= {"ceil_mode": False, "count_include_pad": False, **given}
        windows = (attributes[name] for name in ("kernel_shape", *names, "auto_pad", "ceil_mode"))
        along = axes("average_pool_grad", shape[2:], *windows)
        dy: Array = rng.normal(size=(*shape[:2], *(axis.count for axis in along)))
        yield Example({"dy": dy, "shape": shape, **attributes}, terms=math.prod(kernel_shape))


CROP = {"coordinate_transformation_mode": "tf_crop_and_resize", "roi": (0.0, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.3)}
# The shapes of x and y, and attributes: larger and smaller, along one to four axes; rows that stay.
RESIZED: tuple[tuple[Shape, Shape, dict[str, Any]], ...] = (
    ((3, 2, 40), (3, 2, 75), {}),
    ((2, 3, 5, 7), (2, 3, 10, 14), {"mode": "linear", "scales": (1.0, 1.0, 2.0, 2.0)}),
    ((2, 3, 9, 7), (2, 3, 4, 20), {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ((2, 2, 6, 5), (2, 2, 9, 3), {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": True}),
    ((1, 2, 90, 70), (1, 2, 1, 30), {"mode": "cubic", "antialias": True}),
    ((2, 40, 6), (2, 13, 6), {"mode": "linear", "antialias": True, "exclude_outside": True}),
    ((2, 5, 4, 3), (2, 11, 7, 3), {"mode": "linear", "scales": (2.2, 1.8), "axes": (1, -2)}),
    ((1, 2, 3, 4, 5), (1, 2, 5, 3, 9), {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}),
    ((2, 3, 2, 4, 3), (4, 3, 3, 4, 7), {"nearest_mode": "ceil"}),
    ((1, 2, 6, 8), (1, 2, 5, 9), {"mode": "linear", **CROP}),
    ((1, 2, 4, 4), (1, 2, 4, 4), {}),
    ((0, 2, 3), (0, 2, 6), {}),
)


def resize_grad(rng: np.random.Generator, cases: Cases = RESIZED) -> Iterator[Example]:
    for x, y, attributes in cases:
        pairs = [(before, after) for before, after in zip(x, y, strict=True) if before not in (0, after)]
        terms = math.prod(max(4, 4 * -(-after // before)) for before, after in pairs)
        yield Example({"dy": rng.normal(size=y), "x": rng.normal(size=x), **attributes}, terms)
