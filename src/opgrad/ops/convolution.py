"""The gradients of convolution and of transposed convolution."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, choosing, chosen, operator, shaped_like
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes
from opgrad.ops.reference.windows import MOST_AXES, WindowAxis, axes, convolution_axes, transposed_axes

RANKS = range(3, 3 + MOST_AXES)


def _checked(operator: str, shapes: Shapes, attributes: Attributes, channels: str, multiple: str) -> None:
    """Checks the ranks of x and w, and that groups divide the channels of x and the filters."""
    x, w, group = shapes["x"], shapes["w"], attributes["group"]
    if len(w) != len(x):
        raise ValueError(f"{operator}: w has {len(w)} dimensions, expected {len(x)}, as x has")
    if group < 1 or x[1] % group or w[0] % group:
        expected = f"a divisor of {channels}, {x[1]}{multiple}"
        raise ValueError(f"{operator}: group is {group}, expected {expected}")


def _weights(shapes: Shapes, attributes: Attributes) -> Shape:
    """Checks w against x: a filter for each of M channels of dy, C / group channels each."""
    x, w = shapes["x"], shapes["w"]
    _checked("conv_grad", shapes, attributes, "the channels of x", f", and the filters of w, {w[0]}")
    return (w[0], x[1] // attributes["group"], *w[2:])


def _output(shapes: Shapes, attributes: Attributes) -> Shape:
    _weights(shapes, attributes)
    return (shapes["x"][0], shapes["w"][0], *(axis.count for axis in convolution_axes(shapes, attributes)))


def _transposed_weights(shapes: Shapes, attributes: Attributes) -> Shape:
    """Checks w against x: filters for each of C channels of x, one for each of the M / group channels of dy."""
    w = (shapes["x"][1], *shapes["w"][1:])
    _checked("conv_transpose_grad", {**shapes, "w": w}, attributes, "the channels of x", "")
    return w


def _transposed_output(shapes: Shapes, attributes: Attributes) -> Shape:
    w = _transposed_weights(shapes, attributes)
    axes = transposed_axes(shapes, attributes)
    return (shapes["x"][0], w[1] * attributes["group"], *(axis.size for axis in axes))


EXPECTED = "what the attributes make of x and w"
Output = Annotated[Array, Tensor(FLOATS, _output, EXPECTED, ranks=RANKS)]
TransposedOutput = Annotated[Array, Tensor(FLOATS, _transposed_output, EXPECTED, ranks=RANKS)]
Input = Annotated[Array, Tensor(FLOATS, ranks=RANKS, dtype_of="dy")]
Weights = Annotated[
    Array, Tensor(FLOATS, _weights, "filters for the channels of x in each group", ranks=RANKS, dtype_of="dy")
]
TransposedWeights = Annotated[
    Array, Tensor(FLOATS, _transposed_weights, "filters for each channel of x", ranks=RANKS, dtype_of="dy")
]
DX = shaped_like("x", dtype_of="dy")
DW = shaped_like("w", dtype_of="dy")
ATTRIBUTES = {"strides": (), "pads": (), "dilations": (), "group": 1, "auto_pad": "NOTSET", "kernel_shape": ()}


def _elements(w: Array, along: Sequence[WindowAxis]) -> Iterator[tuple[Any, Any]]:
    """Each element of a window: where it stands in w, and where those of all windows stand in what is padded."""
    for k in itertools.product(*map(range, w.shape[2:])):
        starts = [(i * axis.dilation, axis.stride, axis.count) for i, axis in zip(k, along, strict=True)]
        yield (..., *k), (..., *(slice(start, start + stride * count, stride) for start, stride, count in starts))


def _grouped(array: Array, group: int) -> Array:
    return array.reshape(len(array), group, array.shape[1] // group, *array.shape[2:])


def _padded(array: Array, along: Sequence[WindowAxis]) -> tuple[Array, Any]:
    """An array with room for all windows, and where the array stands in it."""
    reach = [(axis.count - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1 for axis in along]
    ends = [max(axis.end, size - axis.begin - axis.size) for axis, size in zip(along, reach, strict=True)]
    pads = [(0, 0), (0, 0), *((axis.begin, end) for axis, end in zip(along, ends, strict=True))]
    return np.pad(array, pads), (..., *(slice(axis.begin, axis.begin + axis.size) for axis in along))


def _gradients(dy: Array, x: Array, w: Array, along: Sequence[WindowAxis], group: int) -> tuple[Array, Array]:
    """dx and dw: for each element of a window, one sum over the channels and one over the windows."""
    wide, inside = _padded(x, along)
    gradient, padded = _grouped(dy, group), _grouped(wide, group)
    filters = w.reshape(group, len(w) // group, *w.shape[1:])
    dpadded, dfilters = np.zeros_like(padded), np.zeros_like(filters)
    for at, here in _elements(w, along):
        dpadded[here] += np.einsum("gmc,ngm...->ngc...", filters[at], gradient)
        dfilters[at] = _products(gradient, padded[here])
    return dpadded.reshape(wide.shape)[inside], dfilters.reshape(w.shape)


def _transposed_gradients(
    dy: Array, x: Array, w: Array, along: Sequence[WindowAxis], group: int
) -> tuple[Array, Array]:
    """The same for windows that x has numbers for, on what is dy."""
    inputs, padded = _grouped(x, group), _grouped(_padded(dy, along)[0], group)
    filters = w.reshape(group, len(w) // group, *w.shape[1:])
    dx, dfilters = np.zeros_like(inputs), np.zeros_like(filters)
    for at, here in _elements(w, along):
        dx += np.einsum("gcm,ngm...->ngc...", filters[at], padded[here])
        dfilters[at] = _products(inputs, padded[here])
    return dx.reshape(x.shape), dfilters.reshape(w.shape)


def _products(a: Array, b: Array) -> Array:
    """The sum over images and windows of each channel of a times each of b."""

    def flat(array: Array) -> Array:
        return array.reshape(*array.shape[:3], math.prod(array.shape[3:]))

    return np.asarray(np.einsum("ngmo,ngco->gmc", flat(a), flat(b)))


def _chosen(dy: Array, dx: Array, dw: Array, needs: tuple[str, ...] | None) -> Any:
    return chosen({"dx": dx, "dw": dw, "db": dy.sum((0, *range(2, dy.ndim)))}, needs)


@operator(
    "dx[i] = sum of w[k] * dy[o], dw[k] = sum of x[i] * dy[o] where window o has i as element k, db = sum of dy",
    support=IN_GRAPHS,
    results={
        "dx": DX,
        "dw": DW,
        "db": Tensor(FLOATS, lambda shapes, _: shapes["w"][:1], "one number for each filter of w", dtype_of="dy"),
    },
    onnx=OnnxName("ConvGrad", outputs=("dx?", "dw?", "db?"), attributes=ATTRIBUTES),
    general=choosing(),
)
def conv_grad(
    dy: Output, x: Input, w: Weights, strides: tuple[int, ...] = (), pads: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (), group: int = 1, auto_pad: str = "NOTSET", kernel_shape: tuple[int, ...] = (),
    *, needs: tuple[str, ...] | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """Gradients of convolution with respect to its input, its filters and its bias.

    dy: gradient with respect to Conv's output, N x M x one to three axes, as many windows as the attributes make of x;
        float32, float64, float16 or bfloat16.
    x: Conv's input, N x C x as many axes; of the dtype of dy.
    w: Conv's filters, M x C / group x the shape of a window; of the dtype of dy.
    strides, pads, dilations, group, auto_pad, kernel_shape: as given to Conv: one number for each axis, two for pads
        (all beginnings, then all ends); empty: strides and dilations of 1, no pads, the windows of w. pads count with
        auto_pad NOTSET alone.

    Returns (dx, dw, db), or those in needs, of the shapes (x.shape, w.shape, (M,)) and the dtype of dy. Sums are formed
    in float32 (float64 for float64). Zeros around x and dy are multiplied like all else, so a number in x or w that is
    not finite may show in more of its channel's sums than it stands in.

    Formula: dx[n, c, i] = sum of w[m, c, k] * dy[n, m, o], dw[m, c, k] = sum of x[n, c, i] * dy[n, m, o] over all
    windows o that have i as element k, db[m] = sum of dy[n, m, o]. Source: com.microsoft ConvGrad.

    Example:
    >>> x = np.arange(6, dtype=np.float32).reshape(1, 1, 6)
    >>> w = np.array([[[1.0, 0.0, -1.0]]], np.float32)
    >>> dy = np.ones((1, 1, 4), np.float32)
    >>> opgrad.conv_grad(dy, x, w)
    (array([[[ 1.,  1.,  0.,  0., -1., -1.]]], dtype=float32),
     array([[[ 6., 10., 14.]]], dtype=float32),
     array([4.], dtype=float32))
    """
    dx, dw = _gradients(
        dy, x, w, axes("conv_grad", x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad), group
    )
    return _chosen(dy, dx, dw, needs)


@operator(
    "dx[i] = sum of w[k] * dy[o], dw[k] = sum of x[i] * dy[o] where o is element k of window i, db = sum of dy",
    support=IN_GRAPHS,
    results={
        "dx": DX,
        "dw": DW,
        "db": Tensor(FLOATS, lambda shapes, _: shapes["dy"][1:2], "one number for each channel of dy", dtype_of="dy"),
    },
    onnx=OnnxName(
        "ConvTransposeGrad",
        outputs=("dx?", "dw?", "db?"),
        attributes={**ATTRIBUTES, "output_padding": (), "output_shape": ()},
    ),
    general=choosing(),
)
def conv_transpose_grad(
    dy: TransposedOutput, x: Input, w: TransposedWeights, strides: tuple[int, ...] = (), pads: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (), group: int = 1, auto_pad: str = "NOTSET", kernel_shape: tuple[int, ...] = (),
    output_padding: tuple[int, ...] = (), output_shape: tuple[int, ...] = (),
    *, needs: tuple[str, ...] | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """Gradients of transposed convolution with respect to its input, its filters and its bias.

    dy: gradient with respect to ConvTranspose's output, N x M x one to three axes, of the sizes that the attributes
        make of x and w; float32, float64, float16 or bfloat16.
    x: ConvTranspose's input, N x C x as many axes; of the dtype of dy.
    w: ConvTranspose's filters, C x M / group x the shape of a window; of the dtype of dy.
    strides, pads, dilations, group, auto_pad, kernel_shape, output_padding, output_shape: as given to ConvTranspose:
        one number for each axis, two for pads (all beginnings, then all ends); empty: strides and dilations of 1, no
        pads, the windows of w, no more than they reach. pads count with auto_pad NOTSET and no output_shape alone,
        which may have N and M before the axes, too.

    Returns (dx, dw, db), or those in needs, of the shapes (x.shape, w.shape, (M,)) and the dtype of dy. Sums are formed
    in float32 (float64 for float64). Zeros around x and dy are multiplied like all else, so a number in dy or w that is
    not finite may show in more of its channel's sums than it stands in.

    Formula: window i has its element k at o = i * stride - pad + k * dilation; dx[n, c, i] = sum of w[c, m, k] *
    dy[n, m, o] over all k and m of the group, dw[c, m, k] = sum of x[n, c, i] * dy[n, m, o] over all windows i and n,
    db[m] = sum of dy[n, m, o]. Source: com.microsoft ConvTransposeGrad.

    Example:
    >>> x = np.array([[[1.0, 2.0]]], np.float32)
    >>> w = np.array([[[1.0, 0.0, -1.0]]], np.float32)
    >>> dy = np.ones((1, 1, 4), np.float32)
    >>> opgrad.conv_transpose_grad(dy, x, w)
    (array([[[0., 0.]]], dtype=float32), array([[[3., 3., 3.]]], dtype=float32), array([4.], dtype=float32))
    """
    given = {"strides": strides, "pads": pads, "dilations": dilations, "auto_pad": auto_pad}
    given |= {"kernel_shape": kernel_shape, "output_padding": output_padding, "output_shape": output_shape}
    dx, dw = _transposed_gradients(dy, x, w, transposed_axes({"x": x.shape, "w": w.shape}, given), group)
    return _chosen(dy, dx, dw, needs)
