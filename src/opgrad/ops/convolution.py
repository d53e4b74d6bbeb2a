"""The gradient of convolution."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from opgrad.contract import FLOATS, IN_GRAPHS, Array, Attributes, OnnxName, Shape, Shapes, Tensor, choosing, operator
from opgrad.contract.windows import MOST_AXES, Axis, axes, convolution_axes

RANKS = range(3, 3 + MOST_AXES)
NAME = "conv_grad"


def _weights(shapes: Shapes, attributes: Attributes) -> Shape:
    """Checks w against x: a filter for each of M channels of dy, C / group channels each."""
    x, w, group = shapes["x"], shapes["w"], attributes["group"]
    if len(w) != len(x):
        raise ValueError(f"{NAME}: w has {len(w)} dimensions, expected {len(x)}, as x has")
    if group < 1 or x[1] % group or w[0] % group:
        expected = f"a divisor of the channels of x, {x[1]}, and the filters of w, {w[0]}"
        raise ValueError(f"{NAME}: group is {group}, expected {expected}")
    return (w[0], x[1] // group, *w[2:])


def _output(shapes: Shapes, attributes: Attributes) -> Shape:
    _weights(shapes, attributes)
    return (shapes["x"][0], shapes["w"][0], *(axis.count for axis in convolution_axes(shapes, attributes)))


Alone = functools.partial(Tensor, role="alone")
Output = Annotated[Array, Alone(FLOATS, _output, "what the attributes make of x and w", ranks=RANKS)]
Input = Annotated[Array, Alone(FLOATS, ranks=RANKS, dtype_of="dy")]
Weights = Annotated[
    Array, Alone(FLOATS, _weights, "filters for the channels of x in each group", ranks=RANKS, dtype_of="dy")
]


def _gradients(dy: Array, x: Array, w: Array, along: Sequence[Axis], group: int) -> tuple[Array, Array]:
    """dx and dw: for each element of a window, one sum over the channels and one over the windows."""
    batch, counts, sizes = len(x), [axis.count for axis in along], [axis.begin + axis.size + axis.end for axis in along]
    gradient = dy.reshape(batch, group, len(w) // group, *counts)
    filters = w.reshape(group, len(w) // group, *w.shape[1:])
    padded = np.pad(x, [(0, 0), (0, 0), *((axis.begin, axis.end) for axis in along)])
    padded = padded.reshape(batch, group, w.shape[1], *sizes)

    def flat(array: Array) -> Array:
        return array.reshape(*array.shape[:3], math.prod(counts))

    dpadded, dfilters = np.zeros_like(padded), np.zeros_like(filters)
    for k in itertools.product(*map(range, w.shape[2:])):
        starts = [(i * axis.dilation, axis.stride, axis.count) for i, axis in zip(k, along, strict=True)]
        here: Any = (..., *(slice(start, start + stride * count, stride) for start, stride, count in starts))
        at: Any = (..., *k)
        dpadded[here] += np.einsum("gmc,ngm...->ngc...", filters[at], gradient)
        dfilters[at] = np.einsum("ngmo,ngco->gmc", flat(gradient), flat(padded[here]))
    inside: Any = (..., *(slice(axis.begin, axis.begin + axis.size) for axis in along))
    return dpadded.reshape(batch, x.shape[1], *sizes)[inside], dfilters.reshape(w.shape)


@operator(
    "dx[i] = sum of w[k] * dy[o], dw[k] = sum of x[i] * dy[o] where window o has i as element k, db = sum of dy",
    support=IN_GRAPHS,
    results={
        "dx": Alone(FLOATS, lambda shapes, _: shapes["x"], "the shape of x", dtype_of="dy"),
        "dw": Alone(FLOATS, lambda shapes, _: shapes["w"], "the shape of w", dtype_of="dy"),
        "db": Alone(FLOATS, lambda shapes, _: shapes["w"][:1], "one number for each filter of w", dtype_of="dy"),
    },
    onnx=(
        OnnxName(
            "ConvGrad",
            ("dy", "x", "w"),
            ("dx?", "dw?", "db?"),
            {"strides": (), "pads": (), "dilations": (), "group": 1, "auto_pad": "NOTSET", "kernel_shape": ()},
        ),
    ),
    general=choosing(),
)
def conv_grad(
    dy: Output,
    x: Input,
    w: Weights,
    strides: tuple[int, ...] = (),
    pads: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (),
    group: int = 1,
    auto_pad: str = "NOTSET",
    kernel_shape: tuple[int, ...] = (),
    *,
    needs: tuple[str, ...] | None = None,
    out: Any = None,
) -> Any:
    """Gradients of convolution with respect to its input, its filters and its bias.

    dy: gradient with respect to Conv's output, N x M x one to three axes, as many windows as the attributes make of x;
        float32, float64, float16 or bfloat16.
    x: Conv's input, N x C x as many axes; of the dtype of dy.
    w: Conv's filters, M x C / group x the shape of a window; of the dtype of dy.
    strides, pads, dilations, group, auto_pad, kernel_shape: as given to Conv: one number for each axis, two for pads
        (all beginnings, then all ends); empty: strides and dilations of 1, no pads, the windows of w. pads count with
        auto_pad NOTSET alone.
    needs: the names of the results that are wanted, such as ("dw", "db"); the others are not computed. None: all.
    out: where to write; a tuple if there are several results; must not overlap dy, x or w.

    Returns (dx, dw, db), or those in needs, of the shapes (x.shape, w.shape, (M,)) and the dtype of dy. Sums are
    formed in float32 (float64 for float64). Zeros around x and dy are multiplied like all else, so a number in x or w
    that is not finite may show in more of its channel's sums than it stands in.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or attribute.

    Formula: dx[n, c, i] = sum of w[m, c, k] * dy[n, m, o], dw[m, c, k] = sum of x[n, c, i] * dy[n, m, o] over all
    windows o that have i as element k, db[m] = sum of dy[n, m, o]. Source: com.microsoft ConvGrad.
    """
    dx, dw = _gradients(dy, x, w, axes(NAME, x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad), group)
    results = {"dx": dx, "dw": dw, "db": dy.sum((0, *range(2, dy.ndim)))}
    found = tuple(results[name] for name in needs or results)
    return found if len(found) > 1 else found[0]
