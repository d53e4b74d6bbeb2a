"""Activations and their gradients, element by element."""

from typing import Annotated

import numpy as np

from opgrad.contract import OnnxName, Tensor, elements, like, operator
from opgrad.contract.attributes import FLOATS, Array

X = Annotated[Array, Tensor(FLOATS)]
Saved = Annotated[Array, like("dy")]


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


@operator(**elements("y", "x"))
def relu(x: X, *, out: Array | None = None) -> Array:
    """Rectified linear unit.

    x: any shape; float32, float64, float16 or bfloat16. out: where to write; may be x.
    Returns y, of the shape and dtype of x; NaN stays NaN. Raises TypeError, ValueError.

    Formula: y = max(x, 0). Source: ONNX Relu.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.relu(x)
    array([0. , 0. , 0. , 1.5], dtype=float32)
    """
    return np.maximum(x, 0)


@operator(forward="relu", onnx=OnnxName("ReluGrad", ("dy", "x"), ("dx",)), **elements("dx", "dy"))
def relu_grad(dy: X, x: Saved, *, out: Array | None = None) -> Array:
    """Gradient of relu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: input or output of relu (both have the same sign), of the shape and dtype of dy.
    out: where to write; may be dy. Returns dx, of the shape and dtype of dy; 0 where x is 0 or NaN.
    Raises TypeError, ValueError.

    Formula: dx = dy where x > 0 else 0. Source: com.microsoft ReluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.relu_grad(dy, x)
    array([0., 0., 0., 2.], dtype=float32)
    """
    return np.where(x > 0, dy, 0)


@operator(**elements("y", "x"))
def sigmoid(x: X, *, out: Array | None = None) -> Array:
    """Logistic function.

    x: any shape; float32, float64, float16 or bfloat16. out: where to write; may be x.
    Returns y, of the shape and dtype of x. Raises TypeError, ValueError.

    Formula: y = 1 / (1 + exp(-x)). Source: ONNX Sigmoid.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.sigmoid(x)
    array([0.1192, 0.3775, 0.5   , 0.8176], dtype=float32)
    """
    return _sigmoid(x)


@operator(forward="sigmoid", onnx=OnnxName("SigmoidGrad", ("dy", "y"), ("dx",)), **elements("dx", "dy"))
def sigmoid_grad(dy: X, y: Saved, *, out: Array | None = None) -> Array:
    """Gradient of sigmoid.

    dy: gradient with respect to y; float32, float64, float16 or bfloat16.
    y: the output of sigmoid, of the shape and dtype of dy. It is not clamped.
    out: where to write; may be dy. Returns dx, of the shape and dtype of dy. Raises TypeError, ValueError.

    Formula: dx = dy * y * (1 - y). Source: com.microsoft SigmoidGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.sigmoid_grad(dy, opgrad.sigmoid(x))
    array([ 0.105 ,  0.235 , -0.25  ,  0.2983], dtype=float32)
    """
    return dy * y * (1 - y)


@operator(**elements("y", "x"))
def tanh(x: X, *, out: Array | None = None) -> Array:
    """Hyperbolic tangent.

    x: any shape; float32, float64, float16 or bfloat16. out: where to write; may be x.
    Returns y, of the shape and dtype of x. Raises TypeError, ValueError.

    Formula: y = tanh(x). Source: ONNX Tanh.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.tanh(x)
    array([-0.964 , -0.4621,  0.    ,  0.9051], dtype=float32)
    """
    return np.tanh(x)


@operator(forward="tanh", onnx=OnnxName("TanhGrad", ("dy", "y"), ("dx",)), **elements("dx", "dy"))
def tanh_grad(dy: X, y: Saved, *, out: Array | None = None) -> Array:
    """Gradient of tanh.

    dy: gradient with respect to y; float32, float64, float16 or bfloat16.
    y: the output of tanh, of the shape and dtype of dy. It is not clamped.
    out: where to write; may be dy. Returns dx, of the shape and dtype of dy. Raises TypeError, ValueError.

    Formula: dx = dy * (1 - y * y). Source: com.microsoft TanhGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.tanh_grad(dy, opgrad.tanh(x))
    array([ 0.0707,  0.7864, -1.    ,  0.3614], dtype=float32)
    """
    return dy * (1 - y * y)


@operator(
    onnx=OnnxName("QuickGelu", ("x",), ("y",), {"alpha": 1.702}),
    **elements("y", "x"),
)
def quick_gelu(x: X, alpha: float = 1.702, *, out: Array | None = None) -> Array:
    """Gelu approximated by a sigmoid; with alpha=1 it is SiLU.

    x: any shape; float32, float64, float16 or bfloat16. alpha: the factor inside the sigmoid.
    out: where to write; may be x.
    Returns y, of the shape and dtype of x; the limit -0 at -inf is not taken: -inf gives NaN.
    Raises TypeError, ValueError.

    Formula: y = x * sigmoid(alpha * x). Source: com.microsoft QuickGelu.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.quick_gelu(x)
    array([-0.0643, -0.1496,  0.    ,  1.3917], dtype=float32)
    """
    return x * _sigmoid(alpha * x)


@operator(
    "dx = dy * s * (1 + alpha * x * (1 - s)), s = sigmoid(alpha * x)",
    forward="quick_gelu",
    onnx=OnnxName("QuickGeluGrad", ("dy", "x"), ("dx",), {"alpha": 1.702}),
    **elements("dx", "dy"),
)
def quick_gelu_grad(dy: X, x: Saved, alpha: float = 1.702, *, out: Array | None = None) -> Array:
    """Gradient of quick_gelu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: the input of quick_gelu (not its output), of the shape and dtype of dy.
    alpha: as given to quick_gelu.
    out: where to write; may be dy. Returns dx, of the shape and dtype of dy. Raises TypeError, ValueError.

    Formula: s = sigmoid(alpha * x); dx = dy * s * (1 + alpha * x * (1 - s)).
    Source: com.microsoft QuickGeluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.quick_gelu_grad(dy, x)
    array([-0.0738,  0.1208, -0.5   ,  2.1977], dtype=float32)
    """
    s = _sigmoid(alpha * x)
    return dy * s * (1 + alpha * x * (1 - s))


@operator(**elements("y", "x"))
def leaky_relu(x: X, alpha: float = 0.01, *, out: Array | None = None) -> Array:
    """Rectified linear unit with a slope for negative inputs.

    x: any shape; float32, float64, float16 or bfloat16. alpha: the slope where x is negative.
    out: where to write; may be x.
    Returns y, of the shape and dtype of x. Raises TypeError, ValueError.

    Formula: y = x where x > 0 else alpha * x. Source: ONNX LeakyRelu.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.leaky_relu(x)
    array([-0.02 , -0.005,  0.   ,  1.5  ], dtype=float32)
    """
    return np.where(x > 0, x, alpha * x)


@operator(
    forward="leaky_relu", onnx=OnnxName("LeakyReluGrad", ("dy", "y"), ("dx",), {"alpha": 0.01}), **elements("dx", "dy")
)
def leaky_relu_grad(dy: X, y: Saved, alpha: float = 0.01, *, out: Array | None = None) -> Array:
    """Gradient of leaky_relu, from its output.

    dy: gradient with respect to y; float32, float64, float16 or bfloat16.
    y: the output of leaky_relu, of the shape and dtype of dy. Its sign is that of the input only for
        alpha >= 0: with a negative alpha pass the input instead.
    alpha: as given to leaky_relu.
    out: where to write; may be dy. Returns dx, of the shape and dtype of dy; alpha * dy where y is 0 or NaN.
    Raises TypeError, ValueError.

    Formula: dx = dy where y > 0 else alpha * dy. Source: com.microsoft LeakyReluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.leaky_relu_grad(dy, opgrad.leaky_relu(x))
    array([ 0.01,  0.01, -0.01,  2.  ], dtype=float32)
    """
    return np.where(y > 0, dy, alpha * dy)
