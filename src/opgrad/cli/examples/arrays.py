"""Example arguments for operators of arrays, lists of arrays, packed weights, and windows of images."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Example, random_bytes
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


def reduce_sum_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"x": rng.normal(size=(8192, 1024)), "axes": (0,)}, 8192)]
    found = [Example({"x": rng.normal(1, 1, shape), "axes": axes, **more}, 40000) for shape, axes, more in SUMS]
    whole = rng.integers(-1000, 1000, (30, 4, 50))
    for dtype in ("int32", "int64"):
        found += [Example({"x": whole.astype(dtype), "axes": axes}) for axes in ((0, 2), (1,), ())]
    return found


def div_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for a, b in [((8192, 1024), (1024,))] if large else QUOTIENTS:
        shape = np.broadcast_shapes(a, b)
        # Of one sign, so that a sum that is a single number does not cancel to much less than its terms.
        dy, dividend, divisor = (rng.uniform(0.5, 2, each) for each in (shape, a, b))
        found.append(Example({"dy": dy, "a": dividend, "b": divisor}, max(dy.size, 1)))
    return found


def broadcast_gradient_args(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"a_shape": (32, 128, 768), "b_shape": (768,)})]
    pairs = [((2, 3, 4), (3, 1)), ((), (5,)), ((1, 5), (5,)), ((2, 1, 4, 1), (3, 1, 5)), ((0, 1), (1, 3)), ((3,), (3,))]
    return [Example({"a_shape": a, "b_shape": b}) for a, b in pairs]


def zero_gradient(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [(1 << 23,)] if large else [(), (5,), (70, 33), (2, 3, 4, 5, 6), (0, 3)]
    signals = [np.ones(1, bool), np.arange(3), np.zeros((), np.uint8)]
    return [Example({"x": rng.normal(size=s), "unused": signals[i % 3]}) for i, s in enumerate(shapes)]


def accumulate(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    shapes = [(1 << 22,)] if large else [(), (0,), (7,), (3, 33), (70001,)]
    arrays = [{"buffer": np.asarray(rng.normal(size=s)), "value": np.asarray(rng.normal(size=s))} for s in shapes]
    left = [] if large else [Example({**arrays[-1], "update": False})]
    return [*map(Example, arrays), *left]


LENGTHS = (0, 1, 7, 16, 17, 63, 64, 65, 1000, 4097)
MANY = 32  # arrays of 2**18 elements, for the benchmark


def _arrays(rng: np.random.Generator, large: bool) -> list[list[Array]]:
    if large:
        return [[rng.normal(size=(1 << 18,)) for _ in range(MANY)]]
    return [
        [rng.normal(size=size) for size in LENGTHS],
        [rng.normal(size=(3, 5)), rng.normal(size=()), rng.normal(size=(2, 0, 4)), rng.normal(size=(2, 3, 4))],
        [rng.normal(size=70001)],
        [rng.normal(size=0)],
    ]


def concat_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"arrays": [rng.normal(size=(4096, 512)) for _ in range(4)], "axis": 1})]
    found = [Example({"arrays": [rng.normal(size=(3, size, 5)) for size in LENGTHS], "axis": 1})]
    found += [Example({"arrays": [rng.normal(size=(size, 3)) for size in (2, 0, 40000)]})]
    found += [Example({"arrays": [rng.normal(size=(4, 3, size)) for size in (1, 2)], "axis": -1})]
    found += [Example({"arrays": [rng.integers(0, 9, size) for size in (2, 5)]})]
    return [*found, Example({"arrays": [rng.normal(size=(0, 3))], "axis": 1})]


def split_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"x": rng.normal(size=(4096, 2048)), "split": (512,) * 4, "axis": 1})]
    return [
        Example({"x": rng.normal(size=(3, sum(LENGTHS), 2)), "split": LENGTHS, "axis": 1}),
        Example({"x": rng.normal(size=(40002, 3)), "split": (2, 40000)}),
        Example({"x": rng.normal(size=(4, 3)), "split": (1, 0, 2), "axis": -1}),
        Example({"x": rng.normal(size=(4, 3)) > 0, "split": (4,)}),
        Example({"x": rng.normal(size=(0, 3)), "split": (1, 2), "axis": 1}),
    ]


def pass_through(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [Example({"arrays": arrays}) for arrays in _arrays(rng, large)]


def is_all_finite(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = [Example({"arrays": arrays}) for arrays in _arrays(rng, large)]
    if large:
        return found
    for special in (np.inf, -np.inf, np.nan):
        arrays = [rng.normal(size=40), rng.normal(size=40000)]
        arrays[1][39_999] = special
        for only in ({}, {"isinf_only": True}, {"isnan_only": True}):
            found.append(Example({"arrays": arrays, **only}))
    return found


def mixed_precision_scale(rng: np.random.Generator, large: bool) -> Sequence[Example]:
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


def reduce_all_l2(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [Example({"arrays": arrays}, sum(array.size for array in arrays)) for arrays in _arrays(rng, large)]


WEIGHTS = ((0,), (), (7,), (16, 3), (1000,), (3, 0), (33, 65))
LARGE_WEIGHTS = ((1 << 19,),) * 6


def _lists(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[Array]]:
    weights, gradients = ([np.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(2))
    return {"weights": weights, "gradients": gradients}


def _rate(rate: float) -> Array:
    return np.array(rate, np.float32)


def sgd_optimizer(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"lr": _rate(0.1), **_lists(rng, LARGE_WEIGHTS)})]
    return [
        Example({"lr": _rate(0.1), **_lists(rng, WEIGHTS)}),
        Example({"lr": _rate(3).reshape(1), **_lists(rng, [(70001,)])}),
    ]


def adamw_optimizer(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    def example(shapes: Sequence[tuple[int, ...]], rate: float, step: int, **rest: float) -> Example:
        arrays = _lists(rng, shapes)
        arrays["momentums_1"] = [np.asarray(0.1 * each) for each in _lists(rng, shapes)["weights"]]
        arrays["momentums_2"] = [np.asarray(each * each) for each in _lists(rng, shapes)["weights"]]
        return Example({"lr": _rate(rate), "step": np.array(step), **arrays, **rest})

    if large:
        return [example(LARGE_WEIGHTS, 1e-3, 10)]
    return [
        example(WEIGHTS, 1e-3, 1),
        example([(70001,)], 0.5, 7, alpha=0.8, beta=0.99, epsilon=1e-4, weight_decay=0.1),
        example(WEIGHTS, 0.1, 1000, adam_mode=1),
        example([(5,)], 0.1, 2, adam_mode=1, correct_bias=False),
    ]


def clip_grad_norm(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    def example(shapes: Sequence[tuple[int, ...]], **rest: float) -> Example:
        gradients = _lists(rng, shapes)["gradients"]
        return Example({"gradients": gradients, **rest}, sum(each.size for each in gradients))

    if large:
        return [example(LARGE_WEIGHTS)]
    return [example(WEIGHTS), example([(70001,)], max_norm=0.5), example([(3,)], max_norm=100.0), example([(0,)])]


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


def _along(rng: np.random.Generator, large: bool) -> Iterator[tuple[Shape, Array, int]]:
    for shape, named, axis in [((2048, 4096), (2048, 1024), 1)] if large else ALONG:
        yield shape, _indices(rng, shape[axis], named), axis


def _elements(rng: np.random.Generator, large: bool, backward: bool) -> Iterator[Example]:
    for shape, indices, axis in _along(rng, large):
        x = {"dy": rng.normal(size=indices.shape), "shape": shape} if backward else {"x": rng.normal(size=shape)}
        yield Example({**x, "indices": indices, "axis": axis}, max(1, indices.shape[axis]) if backward else 1)


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


def _tuples(rng: np.random.Generator, large: bool) -> Iterator[tuple[Shape, Array, int, Shape]]:
    for shape, named, batch in [((8192, 4, 256), (16384, 2), 0)] if large else TUPLES:
        sizes = shape[batch : batch + named[-1]]
        indices = np.stack([_indices(rng, size, named[:-1]) for size in sizes], -1)
        yield shape, indices, batch, named[:-1] + shape[batch + named[-1] :]


def _slices(rng: np.random.Generator, large: bool, backward: bool) -> Iterator[Example]:
    for shape, indices, batch, slices in _tuples(rng, large):
        x = {"dy": rng.normal(size=slices), "shape": shape} if backward else {"x": rng.normal(size=shape)}
        yield Example({**x, "indices": indices, "batch_dims": batch}, max(1, indices.size) if backward else 1)


gather_nd, gather_nd_grad = partial(_slices, backward=False), partial(_slices, backward=True)


def slice_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    cases: list[dict[str, Any]] = [
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
    ]
    if large:
        cases = [{"shape": (2048, 4096), "starts": (0, 1024), "ends": (2048, 3072)}]
    return [Example({"dy": rng.normal(size=_sliced(**case)), **case}) for case in cases]


def _sliced(shape: Shape, starts: Shape, ends: Shape, axes: Shape | None = None, steps: Shape | None = None) -> Shape:
    sizes = list(shape)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i] if axes else i
        sizes[axis] = len(range(shape[axis])[start : end : steps[i] if steps else 1])
    return tuple(sizes)


LARGE_PRODUCT = 512, 2048, 2048  # tokens, and the sizes of the weights


def quantized_matmul_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every number of bits, both orders of the weights, blocks of every kind, every kind of zero points."""
    if large:
        return [_product(rng, *LARGE_PRODUCT)]
    return [
        _product(rng, 5, 70, 300),
        _product(rng, 130, 40, 64, bits=2, block=16, zeros="packed"),
        _product(rng, 3, 9, 170, bits=8, block=64, zeros="packed"),
        _product(rng, 7, 130, 96, block=16, zeros="packed"),
        _product(rng, 4, 33, 288, block=256, zeros="floats", groups=True),
        _product(rng, 4, 33, 96, bits=2, zeros="floats"),
        _product(rng, 2, 6, 34, block=0, row_block=0, signed=True),
        _product(rng, 6, 98, 130, transposed=False, block=0, zeros="floats"),
        _product(rng, 6, 130, 98, transposed=False, bits=8, block=1, row_block=0, zeros="floats", signed=True),
        _product(rng, 9, 66, 300, transposed=False, block=1, row_block=32, signed=True),
        _product(rng, 0, 4, 32),
        _product(rng, 3, 0, 32),
    ]


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


def conv_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes; channels and filters around the sizes of tiles."""
    if large:
        return [
            _convolution(rng, (32, 64, 28, 28), 64, (3, 3), pads=(1, 1, 1, 1)),
            _convolution(rng, (2, 20, 96, 100), 200, (96, 3)),
            _convolution(rng, (4, 64, 32, 32), 64, (16, 16)),
            _convolution(rng, (64, 16, 16, 16), 64, (16, 16)),
        ]
    return [
        _convolution(rng, (2, 3, 40), 5, (4,)),
        _convolution(rng, (3, 4, 20, 30), 14, (20, 3), strides=(1, 2), pads=(0, 1, 0, 0), group=2),
        _convolution(rng, (9, 2, 6, 5), 3, (6, 5)),
        _convolution(rng, (3, 4, 17), 4, (3,), strides=(2,), pads=(2, 1), dilations=(3,)),
        _convolution(rng, (2, 1, 9, 8), 4, (3, 3), auto_pad="SAME_UPPER"),
        _convolution(rng, (2, 6, 9, 8), 9, (3, 2), group=3, strides=(1, 2), auto_pad="SAME_LOWER"),
        _convolution(rng, (2, 5, 7, 6), 5, (3, 3), group=5, pads=(1, 0, 1, 2)),
        _convolution(rng, (2, 3, 7, 6), 6, (2, 2), group=3, strides=(3, 2), auto_pad="VALID"),
        _convolution(rng, (1, 7, 10, 9), 8, (1, 1), kernel_shape=(1, 1)),
        _convolution(rng, (2, 2, 9, 9), 3, (1, 1), strides=(3, 3)),
        _convolution(rng, (1, 2, 4, 5, 6), 3, (2, 3, 2), strides=(1, 2, 1), pads=(1, 1, 0, 0, 1, 1)),
        _convolution(rng, (1, 2, 5, 4, 7), 2, (2, 1, 3), group=2, dilations=(2, 1, 2)),
        _convolution(rng, (0, 3, 6), 2, (3,)),
        _convolution(rng, (2, 3, 2), 2, (3,)),
    ]


def _convolution(
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


def conv_transpose_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes; channels around the sizes of tiles."""
    if large:
        return [_transposed(rng, (32, 64, 14, 14), 32, (2, 2), strides=(2, 2))]
    return [
        _transposed(rng, (2, 5, 20), 3, (4,)),
        _transposed(rng, (3, 4, 9), 2, (3,), strides=(2,), pads=(2, 1), dilations=(3,), output_padding=(1,)),
        _transposed(rng, (2, 4, 7, 6), 1, (2, 2), strides=(2, 2)),
        _transposed(rng, (2, 1, 7, 6), 5, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1)),
        _transposed(rng, (2, 6, 5, 4), 3, (3, 2), group=3, strides=(1, 2), auto_pad="SAME_UPPER"),
        _transposed(rng, (2, 3, 5, 4), 6, (3, 4), strides=(2, 3), auto_pad="SAME_LOWER"),
        _transposed(rng, (2, 3, 4, 4), 2, (1, 2), strides=(3, 2), auto_pad="VALID"),
        _transposed(rng, (2, 3, 4, 5), 2, (3, 3), strides=(2, 2), output_shape=(8, 12)),
        _transposed(rng, (2, 3, 4, 5), 2, (3, 3), strides=(2, 2), output_shape=(2, 2, 11, 9), kernel_shape=(3, 3)),
        _transposed(rng, (1, 3, 3, 4), 2, (2, 2), dilations=(3, 1), output_padding=(2, 0)),
        _transposed(rng, (1, 3, 4, 5, 3), 2, (2, 3, 2), strides=(1, 2, 1), pads=(1, 1, 0, 0, 1, 1)),
        _transposed(rng, (1, 4, 3, 2, 4), 2, (2, 1, 3), group=2, strides=(2, 3, 1), dilations=(2, 1, 2)),
        _transposed(rng, (0, 3, 6), 2, (3,)),
        _transposed(rng, (2, 0, 6), 2, (3,)),
    ]


def _transposed(
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


LARGE_IMAGES = (32, 64, 56, 56)  # images, channels, and the axes along which windows lie


def max_pool_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Windows side by side and overlapping, whose maxima stand anywhere in their plane."""
    if large:
        # The maxima of pooling of 2 x 2 elements: each in a window of its own.
        windows = (8, 64, 56, 56)
        shape = (*windows[:2], *(2 * count for count in windows[2:]))
        places = [
            2 * place + rng.integers(0, 2, windows) if axis > 1 else place
            for axis, place in enumerate(np.indices(windows))
        ]
        indices = np.ravel_multi_index(tuple(places), shape)
        return [Example({"dy": rng.normal(size=windows), "indices": indices, "shape": shape})]
    cases = [
        ((2, 3, 70), (35,)),
        ((2, 5, 9, 7), (4, 3)),
        ((1, 2, 33, 40), (40, 33)),
        ((1, 3, 4, 5, 6), (2, 3, 3)),
        ((2, 0, 4), (2,)),
        ((2, 3, 4), (0,)),
    ]
    found = [_maxima(rng, *case) for case in cases]
    return [*found, *(_maxima(rng, *case, storage_order=1) for case in cases[:4])]


def _maxima(rng: np.random.Generator, shape: tuple[int, ...], windows: tuple[int, ...], **order: int) -> Example:
    plane = math.prod(shape[2:])
    first = np.arange(math.prod(shape[:2])).reshape(*shape[:2], *(1 for _ in windows)) * plane
    indices = first + rng.integers(0, plane, (*shape[:2], *windows))
    arguments = {"dy": rng.normal(size=indices.shape), "indices": indices, "shape": shape, **order}
    return Example(arguments, terms=8)


def average_pool_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Every attribute, along one to three axes."""
    if large:
        return [_averages(rng, LARGE_IMAGES, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))]
    return [
        _averages(rng, (2, 3, 70), (2,), strides=(2,)),
        _averages(rng, (2, 3, 37), (5,), pads=(2, 4)),
        _averages(rng, (2, 2, 70), (3,), strides=(5,), dilations=(2,)),
        _averages(rng, (2, 3, 9, 8), (3, 2), strides=(2, 1), pads=(1, 1, 1, 0)),
        _averages(rng, (1, 2, 9, 40), (4, 3), strides=(3, 3), ceil_mode=True),
        _averages(
            rng, (1, 2, 9, 40), (3, 4), strides=(2, 3), pads=(1, 0, 0, 2), ceil_mode=True, count_include_pad=True
        ),
        _averages(rng, (2, 2, 8, 9), (3, 4), strides=(2, 3), auto_pad="SAME_UPPER"),
        _averages(rng, (2, 2, 8, 9), (3, 4), strides=(2, 3), auto_pad="SAME_LOWER", count_include_pad=True),
        _averages(rng, (1, 3, 7, 7), (7, 7), auto_pad="VALID"),
        _averages(rng, (1, 2, 5, 6, 7), (2, 3, 2), strides=(1, 2, 1), pads=(1, 0, 1, 0, 1, 0)),
        _averages(rng, (1, 2, 5, 6, 7), (2, 2, 2), dilations=(2, 1, 3), count_include_pad=True),
        _averages(rng, (0, 3, 4, 4), (2, 2)),
    ]


def _averages(rng: np.random.Generator, shape: tuple[int, ...], kernel_shape: tuple[int, ...], **given: Any) -> Example:
    names = ("strides", "dilations", "pads")
    attributes: dict[str, Any] = {"kernel_shape": kernel_shape, **dict.fromkeys(names, ()), "auto_pad": "NOTSET"}
    attributes |= {"ceil_mode": False, "count_include_pad": False, **given}
    windows = (attributes[name] for name in ("kernel_shape", *names, "auto_pad", "ceil_mode"))
    along = axes("average_pool_grad", shape[2:], *windows)
    dy: Array = rng.normal(size=(*shape[:2], *(axis.count for axis in along)))
    return Example({"dy": dy, "shape": shape, **attributes}, terms=math.prod(kernel_shape))


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
