"""Nodes to lower, each with a float64 formula of its own that tells what it computes."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opgrad.ops.pooling import resized_axes

BOTH = ("float32", "float64")
SINGLE = ("float32",)  # onnxruntime has the operators of the body for no other type


@dataclass(frozen=True)
class Case:
    """A node: its inputs from a generator, its outputs by formula.

    formula: from the inputs in float64 to the outputs; None for one that is not wanted.
    sizes: whether the graph tells the shapes of the outputs.
    terms: the length of the longest sum.
    """

    op: str
    inputs: Callable[[np.random.Generator], list[Any]]
    formula: Callable[..., Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    domain: str = "com.microsoft"
    dtypes: tuple[str, ...] = BOTH
    sizes: bool = False
    terms: int = 100

    def __str__(self) -> str:
        return "-".join(filter(None, [self.op, *(f"{k}={v}" for k, v in self.attributes.items()), self.note]))


def normal(*shapes):
    return lambda rng: [rng.standard_normal(shape) for shape in shapes]


# --- activations -----------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu_slope(x):
    return 0.5 * (1 + erf(x / math.sqrt(2))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu(x):
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def fast_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def fast_gelu_slope(x):
    u, du = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x * (1 - np.tanh(u) ** 2) * du


def quick_gelu_grad(dy, x, alpha=1.702):
    s = sigmoid(alpha * x)
    return dy * (s + alpha * x * s * (1 - s))


def edges(rng):
    return [rng.standard_normal((2, 4)), np.array([[0.0, -0.0, np.nan, 1], [-1, np.inf, -np.inf, 1e-30]])]


PAIR = ((3, 5), (3, 5))
ACTIVATIONS = [
    Case("ReluGrad", normal(*PAIR), lambda dy, x: np.where(x > 0, dy, 0)),
    Case("ReluGrad", edges, lambda dy, x: np.where(x > 0, dy, 0), note="edges"),
    Case("ReluGrad", normal((), ()), lambda dy, x: np.where(x > 0, dy, 0), note="scalar"),
    Case("ReluGrad", normal((0, 3), (0, 3)), lambda dy, x: dy, note="empty"),
    Case("LeakyReluGrad", normal(*PAIR), lambda dy, y: np.where(y > 0, dy, 0.01 * dy)),
    Case("LeakyReluGrad", edges, lambda dy, y: np.where(y > 0, dy, 0.25 * dy), {"alpha": 0.25}, "edges"),
    Case("SigmoidGrad", normal(*PAIR), lambda dy, y: dy * y * (1 - y)),
    Case("TanhGrad", normal(*PAIR), lambda dy, y: dy * (1 - y**2)),
    Case("QuickGelu", normal((3, 5)), lambda x: x * sigmoid(1.702 * x)),
    Case("Gelu", normal((3, 5)), gelu, dtypes=SINGLE),
    Case("BiasGelu", normal((3, 5), (5,)), lambda x, b: gelu(x + b), dtypes=SINGLE),
    Case("FastGelu", normal((3, 5)), fast_gelu),
    Case("FastGelu", normal((3, 5), (5,)), lambda x, b: fast_gelu(x + b), note="bias"),
    Case("QuickGeluGrad", normal(*PAIR), quick_gelu_grad),
    Case("QuickGeluGrad", normal(*PAIR), lambda dy, x: quick_gelu_grad(dy, x, -2.0), {"alpha": -2.0}),
    Case("GeluGrad", normal(*PAIR), lambda dy, x: dy * gelu_slope(x), dtypes=SINGLE),
    Case("FastGeluGrad", normal(*PAIR), lambda dy, x: dy * fast_gelu_slope(x)),
    Case("BiasGeluGrad_dX", normal(*PAIR, (5,)), lambda dy, x, b: dy * gelu_slope(x + b), dtypes=SINGLE),
    Case("BiasFastGeluGrad_dX", normal(*PAIR, (5,)), lambda dy, x, b: dy * fast_gelu_slope(x + b)),
]


# --- softmax and dropout ---------------------------------------------------------------------------------------------


def softmax_grad(dy, y, axes):
    return y * (dy - (y * dy).sum(axes, keepdims=True))


def log_softmax_grad(dy, y, axes):
    return dy - np.exp(y) * dy.sum(axes, keepdims=True)


def softmax(x, axes):
    e = np.exp(x - x.max(axes, keepdims=True))
    return e / e.sum(axes, keepdims=True)


def from_axis(axis, rank=3):
    return tuple(range(axis % rank, rank))


def dropped(rng):
    return [rng.standard_normal((2, 3, 4)), rng.random((2, 3, 4)) > 0.3]


CUBES = normal((2, 3, 4), (2, 3, 4))
SOFTMAX = [
    *(
        Case(f"{kind}Grad{suffix}", CUBES, lambda dy, y, f=f, a=a: f(dy, y, a), {} if axis is None else {"axis": axis})
        for kind, f in (("Softmax", softmax_grad), ("LogSoftmax", log_softmax_grad))
        for suffix, axis, a in [
            ("_13", None, -1),
            ("_13", 0, 0),
            ("_13", 1, 1),
            ("_13", -2, 1),
            ("", None, from_axis(1)),
            ("", 0, from_axis(0)),
            ("", -1, from_axis(-1)),
        ]
    ),
    Case("SoftmaxGrad_13", normal((0, 3), (0, 3)), lambda dy, y: dy, {"axis": 0}, "empty"),
    *(
        Case(
            "BiasSoftmax",
            normal((2, 3, 4), bias),
            lambda x, b: softmax(x + b, -1),
            {"axis": 2, "is_inner_broadcast": inner},
        )
        for bias, inner in (((1, 3, 4), 0), ((2, 1, 4), 1))
    ),
    Case(
        "BiasSoftmaxDropout",
        lambda rng: [*rng.standard_normal((2, 3, 4)), np.array(0.0)],
        lambda x, b, ratio: (softmax(x + b, -1), np.ones((3, 4), bool), softmax(x + b, -1)),
        note="ratio 0",
    ),
    Case("DropoutGrad", dropped, lambda dy, mask: np.where(mask, 2 * dy, 0)),
    Case(
        "DropoutGrad",
        lambda rng: [*dropped(rng), np.array(0.25), np.array(True)],
        lambda dy, mask, ratio, training: np.where(mask, dy / 0.75, 0),
        note="ratio",
    ),
    Case(
        "SoftmaxDropoutGrad",
        lambda rng: [*dropped(rng), rng.random((2, 3, 4)), np.array(0.2)],
        lambda dy, mask, y, ratio: softmax_grad(np.where(mask, dy / 0.8, 0), y, (1, 2)),
        {"axis": 1},
    ),
]


# --- gathering and slicing -------------------------------------------------------------------------------------------


def gather_grad(shape, indices, dy, axis=0):
    dx = np.zeros(shape)
    np.add.at(np.moveaxis(dx, axis, 0), indices, _front(dy, axis % len(shape), indices.ndim))
    return dx


def _front(dy, axis, count):
    return np.moveaxis(dy, range(axis, axis + count), range(count))


def gather_inputs(shape, indices, axis, kind=np.int64):
    indices = np.array(indices, kind)
    axis %= len(shape)
    dims = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    return lambda rng: [np.array(shape), indices, rng.standard_normal(dims)]


def gather_elements_grad(dy, shape, indices, axis=0):
    dx = np.zeros(shape)
    for place in np.ndindex(dy.shape):
        target = list(place)
        target[axis] = indices[place]
        dx[tuple(target)] += dy[place]
    return dx


def gather_nd_grad(shape, indices, dy, batch_dims=0):
    dx = np.zeros(shape)
    for place in np.ndindex(indices.shape[:-1]):
        dx[(*place[:batch_dims], *indices[place])] += dy[place]
    return dx


def slice_grad(dy, shape, starts, ends, axes=None, steps=None):
    dx = np.zeros(shape)
    cut = [slice(None)] * len(shape)
    axes = range(len(starts)) if axes is None else axes
    for axis, start, end, step in zip(axes, starts, ends, [1] * len(starts) if steps is None else steps, strict=True):
        cut[axis] = slice(int(start), None if step < 0 and end < -shape[axis] else int(end), int(step))
    dx[tuple(cut)] = dy
    return dx


def gather_case(shape, indices, axis, note="", kind=np.int64):
    formula = lambda shape, indices, dy: gather_grad(shape, indices, dy, axis)  # noqa: E731
    return Case("GatherGrad", gather_inputs(shape, indices, axis, kind), formula, {"axis": axis} if axis else {}, note)


def slice_case(shape, dy, *limits, note=""):
    arrays = [None if each is None else np.array(each) for each in limits]
    return Case("SliceGrad", lambda rng: [rng.standard_normal(dy), np.array(shape), *arrays], slice_grad, note=note)


def nd_inputs(shape, indices, dims):
    return lambda rng: [np.array(shape), np.array(indices), rng.standard_normal(dims)]


GATHER = [
    gather_case((5, 3), [[1, 4], [1, -1]], 0),
    gather_case((5, 3), [2, 2, 2], 1),
    gather_case((2, 5, 3), [[0, -5, 4]], 1, "int32", np.int32),
    gather_case((2, 5, 3), [[0, 2], [2, 2]], -1),
    gather_case((2, 5, 3), [0, -1], -2),
    gather_case((2, 5, 3), 3, 1, "scalar"),
    gather_case((5, 3), np.zeros((0,), int), 0, "empty"),
    gather_case((4,), [0, 3, 3], 0, "vector"),
    Case(
        "GatherElementsGrad",
        lambda rng: [rng.standard_normal((2, 3)), np.array([2, 4]), np.array([[0, 3, -1], [3, 0, 0]])],
        lambda *given: gather_elements_grad(*given, axis=1),
        {"axis": 1},
    ),
    Case(
        "GatherElementsGrad",
        lambda rng: [rng.standard_normal((2, 3)), np.array([4, 3]), np.array([[0, 3, 1], [0, -1, 1]], np.int32)],
        gather_elements_grad,
    ),
    Case("GatherNDGrad", nd_inputs((2, 3, 4), [[0, 1], [1, -1], [0, 1]], (3, 4)), gather_nd_grad),
    Case("GatherNDGrad", nd_inputs((2, 3), [[[0, 1]], [[0, 1]]], (2, 1)), gather_nd_grad, note="elements"),
    Case(
        "GatherNDGrad",
        nd_inputs((2, 3, 4), [[[0], [2], [0]], [[1], [1], [-1]]], (2, 3, 4)),
        lambda *given: gather_nd_grad(*given, batch_dims=1),
        {"batch_dims": 1},
    ),
    Case(
        "GatherNDGrad",
        nd_inputs((2, 3, 4, 2), [[[3], [0], [1]], [[1], [1], [-1]]], (2, 3, 2)),
        lambda *given: gather_nd_grad(*given, batch_dims=2),
        {"batch_dims": 2},
    ),
    slice_case((5, 4), (2, 4), [1], [3], note="first axis"),
    slice_case((5, 4), (2, 2), [4, 0], [-10, 2], [0, 1], [-3, 1], note="steps"),
    slice_case((5, 4), (5, 2), [1], [100], [1], [2], note="clamped"),
    slice_case((5, 4), (5, 1), [-1], [2**63 - 1], [-1], note="no steps"),
    slice_case((3,), (0,), [2], [1], note="nothing"),
]


# --- joins and sums --------------------------------------------------------------------------------------------------


def reduce_axes(a, b):
    rank = max(len(a), len(b))
    a, b = ([None] * (rank - len(each)) + list(each) for each in (a, b))
    summed = [a[i] is None or (a[i] == 1 and b[i] not in (1, None)) for i in range(rank)]
    return np.flatnonzero(summed)[::-1]


def div_grad(dy, a, b):
    def summed(grad, like):
        extra = grad.ndim - like.ndim
        axes = [*range(extra), *(i + extra for i, size in enumerate(like.shape) if size == 1 != grad.shape[i + extra])]
        return grad.sum(tuple(axes), keepdims=True).reshape(like.shape)

    return summed(dy / b, a), summed(-dy * a / b**2, b)


def shapes_case(a, b):
    formula = lambda a, b: (reduce_axes(a, b), reduce_axes(b, a))  # noqa: E731
    return Case("BroadcastGradientArgs", lambda rng: [np.array(a, int), np.array(b, int)], formula, note=f"{a}{b}")


def positive(*shapes):
    return lambda rng: [rng.random(shape) + 0.5 for shape in shapes]


JOINS = [
    Case(
        "ConcatTraining",
        normal((2, 3), (2, 1), (2, 0)),
        lambda *parts: (np.concatenate(parts, 1), np.array([3, 1, 0])),
        {"axis": 1},
    ),
    Case("ConcatTraining", normal((2, 3), (1, 3)), lambda *parts: (np.concatenate(parts), None), {"axis": -2}),
    Case(
        "ConcatTraining",
        lambda rng: [np.array([1, 2]), np.array([], np.int64), np.array([-1])],
        lambda *parts: (np.concatenate(parts), np.array([2, 0, 1])),
        {"axis": 0},
        "int64",
    ),
    Case(
        "SplitTraining",
        lambda rng: [rng.standard_normal((2, 6)), np.array([1, 3, 2])],
        lambda x, lengths: np.split(x, [1, 4], 1),
        {"axis": 1},
    ),
    Case("SplitTraining", lambda rng: [rng.standard_normal(5), np.array([3, 2])], lambda x, n: np.split(x, [3])),
    Case(
        "ReduceSumTraining",
        lambda rng: [rng.standard_normal((2, 3, 4)), np.array([0, -1])],
        lambda x, axes: x.sum((0, 2)),
        {"keepdims": 0},
    ),
    Case(
        "ReduceSumTraining",
        lambda rng: [rng.standard_normal((2, 3)), np.array([], int)],
        lambda x, axes: x,
        {"noop_with_empty_axes": 1},
    ),
    Case(
        "ReduceSumTraining",
        lambda rng: [rng.standard_normal((2, 3)), np.array([], int)],
        lambda x, axes: x.sum(keepdims=True),
    ),
    *itertools.starmap(
        shapes_case,
        [
            ([1, 2, 1, 4], [3, 1]),
            ([1, 1, 4], [1]),
            ([2, 3], [2, 3]),
            ([], [4, 1]),
            ([5, 1, 3], [1, 7, 3]),
            ([0, 3], [1, 1]),
            ([], []),
        ],
    ),
    Case("DivGrad", positive((2, 3, 4), (2, 3, 4), (4,)), div_grad),
    Case("DivGrad", positive((2, 3, 4), (3, 1), (2, 1, 4)), div_grad),
    Case("DivGrad", positive((2, 3), (2, 3), ()), lambda *given: (None, div_grad(*given)[1]), note="divisor"),
    Case("DivGrad", positive((2, 3), (2, 3), (1, 1)), lambda *given: (div_grad(*given)[0], None), note="dividend"),
]


# --- convolution and pooling -----------------------------------------------------------------------------------------


def windows(x_shape, y_shape, kernel, strides, dilations, pads):
    """For each offset in the kernel: which spatial places of Y have it in X, and where there."""
    for offset in np.ndindex(*kernel):
        y_places, x_places = [], []
        for axis, place in enumerate(offset):
            y = np.arange(y_shape[2 + axis])
            x = y * strides[axis] + place * dilations[axis] - pads[axis]
            inside = (x >= 0) & (x < x_shape[2 + axis])
            y_places.append(y[inside])
            x_places.append(x[inside])
        yield offset, np.ix_(*y_places), np.ix_(*x_places)


def conv_grad(dy, x, w, kernel, strides, dilations, pads, group):
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    per_group, outputs = w.shape[1], w.shape[0] // group
    for offset, y_place, x_place in windows(x.shape, dy.shape, kernel, strides, dilations, pads):
        for o in range(w.shape[0]):
            for i in range(per_group):
                channel = o // outputs * per_group + i
                for n in range(x.shape[0]):
                    dx[n, channel][x_place] += w[o, i][offset] * dy[n, o][y_place]
                    dw[o, i][offset] += (x[n, channel][x_place] * dy[n, o][y_place]).sum()
    return dx, dw, dy.sum((0, *range(2, x.ndim)))


def conv_case(sizes, kernel, group=1, strides=None, dilations=None, pads=None, auto_pad=None, skip=()):
    axes, channels, outputs = len(sizes), 2 * group, 3 * group
    given = {"strides": strides, "dilations": dilations, "pads": pads, "auto_pad": auto_pad, "group": group}
    strides, dilations = strides or [1] * axes, dilations or [1] * axes
    widths = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        y = [-(-n // s) for n, s in zip(sizes, strides, strict=True)]
        total = [max((m - 1) * s + w - n, 0) for m, s, w, n in zip(y, strides, widths, sizes, strict=True)]
        begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
    else:
        begin, end = (pads or [0] * 2 * axes)[:axes], (pads or [0] * 2 * axes)[axes:]
        y = [(n + b + e - w) // s + 1 for n, b, e, w, s in zip(sizes, begin, end, widths, strides, strict=True)]
    attributes = {"kernel_shape": kernel} | {name: value for name, value in given.items() if value is not None}
    shapes = (2, outputs, *y), (2, channels, *sizes), (outputs, channels // group, *kernel)

    def formula(dy, x, w):
        results = conv_grad(dy, x, w, kernel, strides, dilations, begin, group)
        return tuple(None if index in skip else each for index, each in enumerate(results))

    return Case("ConvGrad", normal(*shapes), formula, attributes, f"{sizes}{skip or ''}", dtypes=SINGLE)


CONVOLUTION = [
    conv_case((5,), [3]),
    conv_case((7,), [3], strides=[2], pads=[1, 0], group=2),
    conv_case((5, 6), [3, 2]),
    conv_case((5, 6), [3, 2], pads=[1, 0, 1, 1], skip=(0,)),
    conv_case((5, 6), [3, 2], pads=[1, 0, 1, 1], skip=(2,)),
    conv_case((8, 7), [3, 2], strides=[2, 3], pads=[1, 0, 0, 1], dilations=[2, 1]),
    conv_case((6, 6), [2, 2], strides=[3, 3], group=2),
    conv_case((8, 7), [3, 3], dilations=[2, 3], pads=[2, 3, 2, 3], group=3),
    conv_case((4, 3, 5), [2, 2, 3], strides=[1, 2, 2], pads=[0, 1, 1, 1, 0, 1]),
    conv_case((5, 6), [2, 4], auto_pad="SAME_UPPER"),
    conv_case((5, 6), [2, 4], auto_pad="SAME_LOWER"),
    conv_case((5, 6), [3, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
    conv_case((6, 5), [3, 4], strides=[2, 3], auto_pad="SAME_LOWER"),
    conv_case((5, 6), [2, 3], strides=[2, 1], auto_pad="VALID"),
]


def conv_transpose_grad(dy, x, w, kernel, strides, dilations, pads, group):
    """A transposed convolution is the gradient of a convolution from Y to X."""
    dw = conv_grad(x, dy, w, kernel, strides, dilations, pads, group)[1]
    dx = np.zeros(x.shape)
    inputs, per_group = w.shape[0] // group, w.shape[1]
    for offset, x_place, y_place in windows(dy.shape, x.shape, kernel, strides, dilations, pads):
        for i, o in np.ndindex(*w.shape[:2]):
            channel = i // inputs * per_group + o
            for n in range(x.shape[0]):
                dx[n, i][x_place] += w[i, o][offset] * dy[n, channel][y_place]
    return dx, dw, dy.sum((0, *range(2, x.ndim)))


def conv_transpose_case(x, y, kernel, strides, dilations, pads, group=1, **more):
    """pads: where the formula finds what the attributes `more` say, if there are any."""
    shapes = (2, 3 * group, *y), (2, 2 * group, *x), (2 * group, 3, *kernel)

    def formula(*given):
        return conv_transpose_grad(*given, kernel, strides, dilations, pads, group)

    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group}
    attributes |= more if "auto_pad" in more or "output_shape" in more else {"pads": pads, **more}
    return Case("ConvTransposeGrad", normal(*shapes), formula, attributes, dtypes=SINGLE)


TRANSPOSED = [
    conv_transpose_case((5,), (7,), [3], [1], [1], [0, 0]),
    conv_transpose_case((4, 3), (9, 5), [3, 2], [2, 2], [1, 1], [0, 1, 0, 0], group=2),
    conv_transpose_case((4, 3), (8, 6), [3, 2], [2, 2], [1, 1], [1, 1, 1, 0]),  # output_padding of 1
    conv_transpose_case((3, 4), (7, 8), [3, 3], [1, 1], [2, 2], [0, 0, 0, 0]),
    conv_transpose_case((3,), (9,), [2], [1], [4], [0, 0], output_padding=[2]),  # not less than the stride
    conv_transpose_case((4, 3), (8, 6), [3, 4], [2, 2], [1, 1], [0, 1, 1, 1], auto_pad="SAME_UPPER"),
    conv_transpose_case((4, 3), (8, 6), [3, 4], [2, 2], [1, 1], [1, 1, 0, 1], auto_pad="SAME_LOWER"),
    conv_transpose_case((4, 3), (6, 9), [3, 2], [2, 2], [1, 1], [2, 0, 1, 0], output_shape=[6, 9]),
]


def average_pool_case(sizes, y, kernel, strides, pads, include, **more):
    begin, end = pads[: len(sizes)], pads[len(sizes) :]

    def formula(dy):
        """Windows over X within its padding; the gradient of the padding is dropped."""
        padded = [n + b + e for n, b, e in zip(sizes, begin, end, strict=True)]
        dx, inside = np.zeros((2, 3, *padded)), np.zeros(padded)
        core = tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))
        inside[core] = 1
        for place in np.ndindex(*y):
            window = tuple(slice(i * s, i * s + k) for i, s, k in zip(place, strides, kernel, strict=True))
            count = inside[window].size if include else inside[window].sum()
            dx[:, :, *window] += (dy[:, :, *place] / count).reshape(2, 3, *[1] * len(y))
        return dx[:, :, *core]

    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads, "count_include_pad": int(include), **more}
    return Case("AveragePoolGrad", normal((2, 3, *y)), formula, attributes, f"{sizes}", "", SINGLE, sizes=True)


POOLING = [
    average_pool_case((5,), (3,), [3], [2], [1, 1], False),
    average_pool_case((5,), (3,), [3], [2], [1, 1], True),
    average_pool_case((7, 4), (3, 3), [3, 2], [2, 1], [0, 0, 0, 0], False),
    average_pool_case((6, 4), (3, 3), [3, 2], [2, 1], [0, 0, 0, 0], False, ceil_mode=1),
    average_pool_case((6, 4), (3, 3), [3, 2], [2, 1], [0, 0, 0, 0], True, ceil_mode=1),
    average_pool_case((5, 4), (3, 2), [2, 2], [2, 2], [1, 0, 1, 0], True, ceil_mode=1),
    average_pool_case((4, 3, 5), (2, 2, 3), [2, 2, 3], [2, 2, 2], [0, 1, 1, 0, 0, 1], True),
    average_pool_case((4, 3, 5), (2, 2, 3), [2, 2, 3], [2, 2, 2], [0, 1, 1, 0, 0, 1], False),
]


def resize_case(x, y, note, scales=(), roi=(), axes=None, **attributes):
    """Resizing of two axes; the formula is that of its weights, which onnxruntime's own forward has proved."""
    rank = len(x)
    form = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"}
    form |= {"cubic_coeff_a": -0.75, "exclude_outside": 0, "antialias": 0, "keep_aspect_ratio_policy": "stretch"}
    form |= attributes | {"axes": tuple(axes or range(rank)), "scales": scales, "roi": roi}

    def formula(dy, *_):
        dx = dy
        for axis, resized in resized_axes("", x, y, form).items():
            dx = np.moveaxis(np.tensordot(resized.matrix(), dx, (0, axis)), 0, axis)
        return dx

    def inputs(rng):
        more = [np.array(each, np.float32) if each else None for each in (roi, scales)]
        return [rng.standard_normal(y), np.zeros(x), *more]

    attributes |= {"axes": axes} if axes else {}
    return Case("ResizeGrad", inputs, formula, attributes, note, dtypes=SINGLE)


REGION = (0.0, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.3)
RESIZING = [
    resize_case((2, 3, 4, 5), (2, 3, 8, 10), "scales", (1.0, 1.0, 2.0, 2.0), mode="linear"),
    resize_case((2, 3, 4, 5), (2, 3, 7, 3), "sizes", mode="linear", coordinate_transformation_mode="align_corners"),
    resize_case((2, 3, 4, 5), (2, 3, 9, 10), "axes", (2.3, 2.0), axes=[2, 3], nearest_mode="ceil"),
    resize_case(
        (1, 2, 4, 4),
        (1, 2, 3, 5),
        "region",
        roi=REGION,
        mode="cubic",
        coordinate_transformation_mode="tf_crop_and_resize",
    ),
]
