"""Normalization of rows and of channels: the forward operators and their gradients."""

import math
from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, Axis, OnnxName, Tensor, like, operator
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes

STATISTICS = ("float32", "float64")  # a result's dtype: that of x if it is one of these, else the first


def _normalized(shapes: Shapes, attributes: Attributes) -> Shape:
    """The sizes of the axes from `axis` to the last, which are normalized."""
    return shapes["x"][attributes["axis"].start :]


def _rows(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of x with 1 for each normalized axis."""
    start = attributes["axis"].start
    return shapes["x"][:start] + (1,) * (len(shapes["x"]) - start)


def _channels(shapes: Shapes, _: Attributes) -> Shape:
    return shapes["x"][1:2]


X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Saved = Annotated[Array, like("dy")]
Weight = Annotated[Array, Tensor(FLOATS, _normalized, "the shape of x from axis on", dtype_of="x")]
OfRow = Annotated[Array, Tensor(FLOATS, _rows, "the shape of x with 1 from axis on")]
Image = Annotated[Array, Tensor(FLOATS, ranks=range(2, 65))]
OfChannel = Annotated[Array, Tensor(FLOATS, _channels, "the size of axis 1 of x")]

ROW_STATISTIC = Tensor(STATISTICS, _rows, "the shape of x with 1 from axis on", dtype_of="x")
CHANNEL_STATISTIC = Tensor(FLOATS, _channels, "the size of axis 1 of x", dtype_of="running_mean")

# The dtypes of a gradient's inputs in ONNX.
GRADIENT_TYPES = {"mean": "U", "inv_std": "U"}


def _over(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(range(axis % x.ndim, x.ndim))


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """The mean over some axes, which stay with size 1; 0 of nothing."""
    count = math.prod(x.shape[axis] for axis in axes)
    return np.asarray(x.sum(axes, keepdims=True) / max(count, 1))


# --- rows ----------------------------------------------------------------------------------------------------------


@operator(support=IN_GRAPHS, results={"y": like("x"), "mean": ROW_STATISTIC, "inv_std": ROW_STATISTIC})
def layer_normalization(
    x: X, scale: Weight, bias: Weight | None = None, axis: Axis = -1, epsilon: float = 1e-5, *,
    out: tuple[Array, ...] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Layer normalization, with what its gradient needs.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    scale: what each normalized element is multiplied with, of shape x.shape[axis:] and the dtype of x.
    bias: what is then added, likewise; none if not given.
    axis: the first of the axes that are normalized together; the last one alone by default.
    epsilon: added to the variance.

    Returns y like x, and mean and inv_std of shape x.shape[:axis] + (1, ..), in float32 (float64 for float64):
    the mean and 1 / sqrt(variance + epsilon) of each row, the variance divided by the number of elements. Of a row
    without elements both sums are 0.

    Formula: y = (x - mean) * inv_std * scale + bias. Source: ONNX LayerNormalization.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [2.0, 0.0, 4.0]], np.float32)
    >>> scale = np.array([1.0, 2.0, 1.0], np.float32)
    >>> opgrad.layer_normalization(x, scale)
    (array([[-1.2247,  0.    ,  1.2247],
           [ 0.    , -2.4495,  1.2247]], dtype=float32), array([[1.],
           [2.]], dtype=float32), array([[1.2247],
           [0.6124]], dtype=float32))
    """
    axes = _over(x, axis)
    mean = _mean(x, axes)
    inv_std = 1 / np.sqrt(_mean(np.square(x - mean), axes) + epsilon)
    y = (x - mean) * inv_std * scale
    return y if bias is None else y + bias, mean, inv_std


@operator(
    forward="layer_normalization",
    support=IN_GRAPHS,
    results={"dx": like("x"), "dscale": like("scale"), "dbias": like("scale")},
    onnx=OnnxName(
        "LayerNormalizationGrad", outputs=("dx", "dscale?", "dbias?"), attributes={"axis": -1}, types=GRADIENT_TYPES
    ),
)
def layer_normalization_grad(
    dy: X, x: Saved, scale: Weight, mean: OfRow, inv_std: OfRow, axis: Axis = -1, *,
    out: tuple[Array, ...] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of layer_normalization with respect to its input, scale and bias.

    dy: gradient with respect to y; at least one dimension; float32, float64, float16 or bfloat16.
    x: the input of layer_normalization, of the shape and dtype of dy.
    scale: as given to layer_normalization, of shape x.shape[axis:] and the dtype of dy.
    mean, inv_std: as layer_normalization returned them, of shape x.shape[:axis] + (1, ..); any of the four dtypes.
    axis: the first of the axes that were normalized together.

    Returns dx of the shape of x, dscale and dbias of the shape of scale, all of the dtype of dy. Sums over rows are
    formed in float32 (float64 for float64), in an order that depends on the shape alone.

    Formula: n = (x - mean) * inv_std; g = dy * scale; dx = inv_std * (g - mean(g) - n * mean(g * n));
    dscale = sum(dy * n); dbias = sum(dy). Source: com.microsoft LayerNormalizationGrad.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [2.0, 0.0, 4.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    >>> scale = np.array([1.0, 2.0, 1.0], np.float32)
    >>> _, mean, inv_std = opgrad.layer_normalization(x, scale)
    >>> opgrad.layer_normalization_grad(dy, x, scale, mean, inv_std)
    (array([[ 0.2041, -0.4082,  0.2041],
           [-0.2041,  0.1021,  0.1021]], dtype=float32),
     array([-1.2247,  0.    ,  1.2247], dtype=float32),
     array([1., 0., 1.], dtype=float32))
    """
    axes = _over(x, axis)
    n = (x - mean) * inv_std
    g = dy * scale
    dx = inv_std * (g - _mean(g, axes) - n * _mean(g * n, axes))
    rows = tuple(range(axes[0]))
    return dx, (dy * n).sum(rows), dy.sum(rows)


@operator(support=IN_GRAPHS, results={"y": like("x"), "inv_std": ROW_STATISTIC})
def simplified_layer_normalization(
    x: X, scale: Weight, axis: Axis = -1, epsilon: float = 1e-5, *, out: tuple[Array, ...] | None = None
) -> tuple[Array, Array]:
    """Layer normalization without a mean and a bias (RMS normalization), with what its gradient needs.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    scale: what each normalized element is multiplied with, of shape x.shape[axis:] and the dtype of x.
    axis: the first of the axes that are normalized together; the last one alone by default.
    epsilon: added to the mean square.

    Returns y like x, and inv_std of shape x.shape[:axis] + (1, ..), in float32 (float64 for float64):
    1 / sqrt(mean(x * x) + epsilon) of each row.

    Formula: y = x * inv_std * scale. Source: ONNX Runtime's SimplifiedLayerNormalization, ONNX RMSNormalization.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [2.0, 0.0, 4.0]], np.float32)
    >>> scale = np.array([1.0, 2.0, 1.0], np.float32)
    >>> opgrad.simplified_layer_normalization(x, scale)
    (array([[0.    , 1.5492, 1.5492],
           [0.7746, 0.    , 1.5492]], dtype=float32), array([[0.7746],
           [0.3873]], dtype=float32))
    """
    inv_std = 1 / np.sqrt(_mean(np.square(x), _over(x, axis)) + epsilon)
    return x * inv_std * scale, inv_std


@operator(
    forward="simplified_layer_normalization",
    support=IN_GRAPHS,
    results={"dx": like("x"), "dscale": like("scale")},
    onnx=OnnxName(
        "SimplifiedLayerNormalizationGrad", outputs=("dx", "dscale?"), attributes={"axis": -1}, types={"inv_std": "U"}
    ),
)
def simplified_layer_normalization_grad(
    dy: X, x: Saved, scale: Weight, inv_std: OfRow, axis: Axis = -1, *, out: tuple[Array, ...] | None = None
) -> tuple[Array, Array]:
    """Gradients of simplified_layer_normalization with respect to its input and scale.

    dy: gradient with respect to y; at least one dimension; float32, float64, float16 or bfloat16.
    x: the input of simplified_layer_normalization, of the shape and dtype of dy.
    scale: as given to simplified_layer_normalization, of shape x.shape[axis:] and the dtype of dy.
    inv_std: as simplified_layer_normalization returned it, of shape x.shape[:axis] + (1, ..); any of the four dtypes.
    axis: the first of the axes that were normalized together.

    Returns dx of the shape of x and dscale of the shape of scale, both of the dtype of dy. Sums over rows are formed
    in float32 (float64 for float64), in an order that depends on the shape alone.

    Formula: n = x * inv_std; g = dy * scale; dx = inv_std * (g - n * mean(g * n)); dscale = sum(dy * n).
    Source: com.microsoft SimplifiedLayerNormalizationGrad.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [2.0, 0.0, 4.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    >>> scale = np.array([1.0, 2.0, 1.0], np.float32)
    >>> _, inv_std = opgrad.simplified_layer_normalization(x, scale)
    >>> opgrad.simplified_layer_normalization_grad(dy, x, scale, inv_std)
    (array([[ 0.7746,  0.    ,  0.    ],
           [-0.1549,  0.    ,  0.0775]], dtype=float32), array([0.    , 0.    , 1.5492], dtype=float32))
    """
    axes = _over(x, axis)
    n = x * inv_std
    g = dy * scale
    dx = inv_std * (g - n * _mean(g * n, axes))
    return dx, (dy * n).sum(tuple(range(axes[0])))


# --- channels ------------------------------------------------------------------------------------------------------


def _all_but_channels(x: Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _by_channel(values: Array, x: Array) -> Array:
    """One value for each channel, in a shape that goes with x."""
    return values.reshape(-1, *(1,) * (x.ndim - 2))


@operator(
    support=IN_GRAPHS,
    results={
        "y": like("x"),
        "new_mean": CHANNEL_STATISTIC,
        "new_var": CHANNEL_STATISTIC,
        "saved_mean": CHANNEL_STATISTIC,
        "saved_inv_std": CHANNEL_STATISTIC,
    },
    in_place={"new_mean": ("running_mean",), "new_var": ("running_var",)},
    onnx=(
        OnnxName(
            "BatchNormInternal",
            outputs=("y", "new_mean?", "new_var?", "saved_mean?", "saved_inv_std?"),
            attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1},
            types={"running_mean": "U", "running_var": "U"},
            overwrites={"new_mean": "running_mean", "new_var": "running_var"},
        ),
        # The same without anything that outlives a run: opgrad.gradients writes it.
        OnnxName(
            "BatchNormTraining",
            outputs=("y", "new_mean?", "new_var?", "saved_mean?", "saved_inv_std?"),
            attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1},
            types={"running_mean": "U", "running_var": "U"},
        ),
    ),
)
def batch_norm_internal(
    x: Image, scale: OfChannel, bias: OfChannel, running_mean: OfChannel, running_var: OfChannel,
    epsilon: float = 1e-5, momentum: float = 0.9, training_mode: bool = True, *, out: tuple[Array, ...] | None = None,
) -> tuple[Array, Array, Array, Array, Array]:  # fmt: skip
    """Batch normalization, with what its gradient needs.

    x: shape (N, C, ..) of at least two dimensions; float32, float64, float16 or bfloat16.
    scale, bias: shape (C,); any of the four dtypes.
    running_mean, running_var: the statistics so far, shape (C,); any of the four dtypes.
    epsilon: added to the variance.
    momentum: the share of the statistics so far in the new ones; 1 - momentum is that of this batch.
    training_mode: normalize with the statistics of x, otherwise with running_mean and running_var.
    out: where to write the five results; those of the running statistics may be their inputs.

    Returns y like x; new_mean and new_var, the statistics so far mixed with those of x, or copies of them if not in
    training_mode or x is empty; saved_mean and saved_inv_std, what was subtracted from and multiplied with each
    channel. They have shape (C,) and the dtype of running_mean. Every variance is divided by the number of elements,
    not by one less.

    Formula: y = (x - mean) * inv_std * scale + bias; inv_std = 1 / sqrt(var + epsilon);
    new_mean = momentum * running_mean + (1 - momentum) * mean, new_var likewise.
    Source: com.microsoft BatchNormInternal; BatchNormTraining, a name of opgrad's own, overwrites nothing.

    Example:
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0]], np.float32)
    >>> one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> opgrad.batch_norm_internal(x, one, zero, running_mean=zero, running_var=one)
    (array([[-1., -1.],
           [ 1.,  1.]], dtype=float32),
     array([0.2, 2. ], dtype=float32),
     array([ 1. , 10.9], dtype=float32),
     array([ 2., 20.], dtype=float32),
     array([1. , 0.1], dtype=float32))
    """
    mean, var, new_mean, new_var = running_mean, running_var, running_mean.copy(), running_var.copy()
    if training_mode:
        mean = _mean(x, _all_but_channels(x)).ravel()
        var = _mean(np.square(x - _by_channel(mean, x)), _all_but_channels(x)).ravel()
        if x.size:
            new_mean = momentum * running_mean + (1 - momentum) * mean
            new_var = momentum * running_var + (1 - momentum) * var
    inv_std = 1 / np.sqrt(var + epsilon)
    factor = _by_channel(inv_std * scale, x)
    return (x - _by_channel(mean, x)) * factor + _by_channel(bias, x), new_mean, new_var, mean, inv_std


@operator(
    forward="batch_norm_internal",
    support=IN_GRAPHS,
    results={"dx": like("x"), "dscale": like("scale"), "dbias": like("scale")},
    onnx=OnnxName("BatchNormalizationGrad", outputs=("dx", "dscale?", "dbias?"), types=GRADIENT_TYPES),
)
def batch_normalization_grad(
    dy: Image, x: Saved, scale: OfChannel, mean: OfChannel, inv_std: OfChannel, *, out: tuple[Array, ...] | None = None
) -> tuple[Array, Array, Array]:
    """Gradients of batch normalization, in training, with respect to its input, scale and bias.

    dy: gradient with respect to y, shape (N, C, ..); float32, float64, float16 or bfloat16.
    x: the input of the normalization, of the shape and dtype of dy.
    scale: as given to the normalization, shape (C,); any of the four dtypes.
    mean, inv_std: the mean of each channel of x and 1 / sqrt(variance + epsilon), as batch_norm_internal saved them
        (the original calls the latter a variance but takes it as this); shape (C,); any of the four dtypes.

    Returns dx of the shape and dtype of x, dscale and dbias of the shape and dtype of scale. Sums are formed in
    float32 (float64 for float64), in an order that depends on the shape alone.

    Formula: n = (x - mean) * inv_std; dscale = sum(dy * n); dbias = sum(dy) over all axes but 1;
    dx = scale * inv_std * (dy - mean(dy) - n * mean(dy * n)). Source: com.microsoft BatchNormalizationGrad.

    Example:
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0], [2.0, 60.0]], np.float32)
    >>> one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> _, _, _, mean, inv_std = opgrad.batch_norm_internal(x, one, zero, zero, one)
    >>> dy = np.array([[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]], np.float32)
    >>> opgrad.batch_normalization_grad(dy, x, one, mean, inv_std)
    (array([[ 0.2041, -0.0269],
           [ 0.2041,  0.0448],
           [-0.4082, -0.0179]], dtype=float32),
     array([-1.2247, -1.46  ], dtype=float32),
     array([1., 3.], dtype=float32))
    """
    axes = _all_but_channels(x)
    n = (x - _by_channel(mean, x)) * _by_channel(inv_std, x)
    factor = _by_channel(scale * inv_std, x)
    dx = factor * (dy - _mean(dy, axes) - n * _mean(dy * n, axes))
    return dx, (dy * n).sum(axes), dy.sum(axes)
