"""Activations, gelu alone and behind the addition of a bias, gated linear units, and their gradients."""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, elements, like, one_of, operator
from opgrad.contract.attributes import FLOATS, Array
from opgrad.ops.reference.post_ops import SLOPES, VALUES

X = Annotated[Array, Tensor(FLOATS)]
Saved = Annotated[Array, like("dy")]


@operator(**elements("y", "x"))
def relu(x: X, *, out: Array | None = None) -> Array:
    """Rectified linear unit.

    x: any shape; float32, float64, float16 or bfloat16.
    Returns y, of the shape and dtype of x; NaN stays NaN.

    Formula: y = max(x, 0). Source: ONNX Relu.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.relu(x)
    array([0. , 0. , 0. , 1.5], dtype=float32)
    """
    return np.maximum(x, 0)


@operator(forward="relu", onnx=OnnxName("ReluGrad"), **elements("dx", "dy"))
def relu_grad(dy: X, x: Saved, *, out: Array | None = None) -> Array:
    """Gradient of relu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: input or output of relu (both have the same sign), of the shape and dtype of dy.
    Returns dx, of the shape and dtype of dy; 0 where x is 0 or NaN.

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

    x: any shape; float32, float64, float16 or bfloat16.

    Formula: y = 1 / (1 + exp(-x)). Source: ONNX Sigmoid.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.sigmoid(x)
    array([0.1192, 0.3775, 0.5   , 0.8176], dtype=float32)
    """
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


@operator(forward="sigmoid", onnx=OnnxName("SigmoidGrad"), **elements("dx", "dy"))
def sigmoid_grad(dy: X, y: Saved, *, out: Array | None = None) -> Array:
    """Gradient of sigmoid.

    dy: gradient with respect to y; float32, float64, float16 or bfloat16.
    y: the output of sigmoid, of the shape and dtype of dy. It is not clamped.

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

    x: any shape; float32, float64, float16 or bfloat16.

    Formula: y = tanh(x). Source: ONNX Tanh.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.tanh(x)
    array([-0.964 , -0.4621,  0.    ,  0.9051], dtype=float32)
    """
    return np.tanh(x)


@operator(forward="tanh", onnx=OnnxName("TanhGrad"), **elements("dx", "dy"))
def tanh_grad(dy: X, y: Saved, *, out: Array | None = None) -> Array:
    """Gradient of tanh.

    dy: gradient with respect to y; float32, float64, float16 or bfloat16.
    y: the output of tanh, of the shape and dtype of dy. It is not clamped.

    Formula: dx = dy * (1 - y * y). Source: com.microsoft TanhGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.tanh_grad(dy, opgrad.tanh(x))
    array([ 0.0707,  0.7864, -1.    ,  0.3614], dtype=float32)
    """
    return dy * (1 - y * y)


@operator(onnx=OnnxName("QuickGelu", attributes={"alpha": 1.702}), **elements("y", "x"))
def quick_gelu(x: X, alpha: float = 1.702, *, out: Array | None = None) -> Array:
    """Gelu approximated by a sigmoid; with alpha=1 it is SiLU.

    x: any shape; float32, float64, float16 or bfloat16. alpha: the factor inside the sigmoid.
    Returns y, of the shape and dtype of x; the limit -0 at -inf is not taken: -inf gives NaN.

    Formula: y = x * sigmoid(alpha * x). Source: com.microsoft QuickGelu.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.quick_gelu(x)
    array([-0.0643, -0.1496,  0.    ,  1.3917], dtype=float32)
    """
    return x * sigmoid(alpha * x)


@operator(forward="quick_gelu", onnx=OnnxName("QuickGeluGrad", attributes={"alpha": 1.702}), **elements("dx", "dy"))
def quick_gelu_grad(dy: X, x: Saved, alpha: float = 1.702, *, out: Array | None = None) -> Array:
    """Gradient of quick_gelu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: the input of quick_gelu (not its output), of the shape and dtype of dy.
    alpha: as given to quick_gelu.

    Formula: s = sigmoid(alpha * x); dx = dy * s * (1 + alpha * x * (1 - s)).
    Source: com.microsoft QuickGeluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.quick_gelu_grad(dy, x)
    array([-0.0738,  0.1208, -0.5   ,  2.1977], dtype=float32)
    """
    s = sigmoid(alpha * x)
    return dy * s * (1 + alpha * x * (1 - s))


@operator(**elements("y", "x"))
def leaky_relu(x: X, alpha: float = 0.01, *, out: Array | None = None) -> Array:
    """Rectified linear unit with a slope for negative inputs.

    x: any shape; float32, float64, float16 or bfloat16. alpha: the slope where x is negative.

    Formula: y = x where x > 0 else alpha * x. Source: ONNX LeakyRelu.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.leaky_relu(x)
    array([-0.02 , -0.005,  0.   ,  1.5  ], dtype=float32)
    """
    return np.where(x > 0, x, alpha * x)


@operator(forward="leaky_relu", onnx=OnnxName("LeakyReluGrad", attributes={"alpha": 0.01}), **elements("dx", "dy"))
def leaky_relu_grad(dy: X, y: Saved, alpha: float = 0.01, *, out: Array | None = None) -> Array:
    """Gradient of leaky_relu, from its output.

    dy: gradient with respect to y; float32, float64, float16 or bfloat16.
    y: the output of leaky_relu, of the shape and dtype of dy. Its sign is that of the input only for
        alpha >= 0: with a negative alpha pass the input instead.
    alpha: as given to leaky_relu.
    Returns dx, of the shape and dtype of dy; alpha * dy where y is 0 or NaN.

    Formula: dx = dy where y > 0 else alpha * dy. Source: com.microsoft LeakyReluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.leaky_relu_grad(dy, opgrad.leaky_relu(x))
    array([ 0.01,  0.01, -0.01,  2.  ], dtype=float32)
    """
    return np.where(y > 0, dy, alpha * dy)


# Where a bias is added along the last axis, that axis counts: no other order of the axes will do.
Whole = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Bias = Annotated[Array, Tensor(FLOATS, lambda shapes, _: shapes["dy"][-1:], "the last dimension of dy", dtype_of="dy")]


@operator(support=IN_GRAPHS, **elements("y", "x"))
def gelu(x: X, *, out: Array | None = None) -> Array:
    """Gaussian error linear unit: x times the probability that a normally distributed number is below x.

    x: any shape; float32, float64, float16 or bfloat16.
    Returns y, of the shape and dtype of x; the limit -0 at -inf is not taken: -inf gives NaN.

    Formula: y = x / 2 * (1 + erf(x / sqrt(2))), also accurate where x is far below 0.
    Source: com.microsoft Gelu, which onnxruntime has.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.gelu(x)
    array([-0.0455, -0.1543,  0.    ,  1.3998], dtype=float32)
    """
    return VALUES["gelu_erf"](x, 0.0, 0.0)


@operator(forward="gelu", support=IN_GRAPHS, onnx=OnnxName("GeluGrad"), **elements("dx", "dy"))
def gelu_grad(dy: X, x: Saved, *, out: Array | None = None) -> Array:
    """Gradient of gelu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: the input of gelu (not its output), of the shape and dtype of dy.
    Returns dx, of the shape and dtype of dy; the limits dy and 0 at infinite x are not taken: they give NaN.

    Formula: P = (1 + erf(x / sqrt(2))) / 2; p = exp(-x * x / 2) / sqrt(2 pi); dx = dy * (P + x * p).
    Source: com.microsoft GeluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.gelu_grad(dy, x)
    array([-0.0852,  0.1325, -0.5   ,  2.2549], dtype=float32)
    """
    return dy * SLOPES["gelu_erf"](x, 0.0, 0.0)


@operator(support=IN_GRAPHS, **elements("y", "x"))
def fast_gelu(x: X, *, out: Array | None = None) -> Array:
    """Gelu approximated by tanh.

    x: any shape; float32, float64, float16 or bfloat16.
    Returns y, of the shape and dtype of x; the limit -0 at -inf is not taken: -inf gives NaN.

    Formula: y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))), also accurate where x is far below 0.
    Source: com.microsoft FastGelu, which onnxruntime has.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.fast_gelu(x)
    array([-0.0454, -0.1543,  0.    ,  1.3996], dtype=float32)
    """
    return VALUES["gelu_tanh"](x, 0.0, 0.0)


@operator(forward="fast_gelu", support=IN_GRAPHS, onnx=OnnxName("FastGeluGrad"), **elements("dx", "dy"))
def fast_gelu_grad(dy: X, x: Saved, *, out: Array | None = None) -> Array:
    """Gradient of fast_gelu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: the input of fast_gelu (not its output), of the shape and dtype of dy.
    Returns dx, of the shape and dtype of dy; the limits dy and 0 at infinite x are not taken: they give NaN.

    Formula: u = sqrt(2 / pi) * (x + 0.044715 * x**3); u' = sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x);
    s = (1 + tanh(u)) / 2; dx = dy * (s + 2 * x * u' * s * (1 - s)). Source: com.microsoft FastGeluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.fast_gelu_grad(dy, x)
    array([-0.0861,  0.1326, -0.5   ,  2.2554], dtype=float32)
    """
    return dy * SLOPES["gelu_tanh"](x, 0.0, 0.0)


@operator(support=IN_GRAPHS, results={"dx": like("dy")}, in_place={"dx": ("dy",)}, onnx=OnnxName("BiasGeluGrad_dX"))
def bias_gelu_grad_dx(dy: Whole, x: Saved, bias: Bias, *, out: Array | None = None) -> Array:
    """Gradient of gelu(x + bias) with respect to x; its sums over all axes but the last are that of bias.

    dy: gradient with respect to the output, of at least one dimension; float32, float64, float16 or bfloat16.
    x: what the bias was added to, of the shape and dtype of dy.
    bias: shape dy.shape[-1:], of the dtype of dy.
    Returns dx, of the shape and dtype of dy; NaN where x + bias is infinite.

    Formula: dx = gelu_grad(dy, x + bias). Source: com.microsoft BiasGeluGrad_dX.

    Example:
    >>> x = np.array([[-2.0, -0.5], [0.0, 1.5]], np.float32)
    >>> bias = np.array([0.5, -0.5], np.float32)
    >>> opgrad.bias_gelu_grad_dx(np.ones_like(x), x, bias)
    array([[-0.1275, -0.0833],
           [ 0.8675,  1.0833]], dtype=float32)
    """
    return dy * SLOPES["gelu_erf"](x + bias, 0.0, 0.0)


@operator(support=IN_GRAPHS, results={"dx": like("dy")}, in_place={"dx": ("dy",)}, onnx=OnnxName("BiasFastGeluGrad_dX"))
def bias_fast_gelu_grad_dx(dy: Whole, x: Saved, bias: Bias, *, out: Array | None = None) -> Array:
    """Gradient of fast_gelu(x + bias) with respect to x; its sums over all axes but the last are that of bias.

    dy: gradient with respect to the output, of at least one dimension; float32, float64, float16 or bfloat16.
    x: what the bias was added to, of the shape and dtype of dy.
    bias: shape dy.shape[-1:], of the dtype of dy.
    Returns dx, of the shape and dtype of dy; NaN where x + bias is infinite.

    Formula: dx = fast_gelu_grad(dy, x + bias). Source: com.microsoft BiasFastGeluGrad_dX.

    Example:
    >>> x = np.array([[-2.0, -0.5], [0.0, 1.5]], np.float32)
    >>> bias = np.array([0.5, -0.5], np.float32)
    >>> opgrad.bias_fast_gelu_grad_dx(np.ones_like(x), x, bias)
    array([[-0.1277, -0.083 ],
           [ 0.8674,  1.083 ]], dtype=float32)
    """
    return dy * SLOPES["gelu_tanh"](x + bias, 0.0, 0.0)


# By name the post-op whose formula the activation has, and its first number.
ACTIVATIONS = {"silu": ("swish", 1.0), "gelu": ("gelu_erf", 0.0), "gelu_tanh": ("gelu_tanh", 0.0)}

Gate = Annotated[Array, Tensor(FLOATS)]
Up = Annotated[Array, like("gate")]
Activation = Annotated[str, one_of(*ACTIVATIONS)]


@operator(kind="elements", support=IN_GRAPHS, results={"y": like("gate")}, in_place={"y": ("gate", "up")})
def gated_linear_unit(gate: Gate, up: Up, activation: Activation = "silu", *, out: Array | None = None) -> Array:
    """An activation of one array times another, as the gated layers of language models have it: SwiGLU, GEGLU.

    gate: any shape; float32, float64, float16 or bfloat16. up: of the shape and dtype of gate.
    activation: "silu" (SwiGLU), "gelu", or "gelu_tanh", its approximation by tanh.

    Formula: y = activation(gate) * up; silu(x) = x / (1 + exp(-x)).
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
    >>> gate, up = np.array([-1.0, 0.0, 2.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    >>> opgrad.gated_linear_unit(gate, up)
    array([-0.2689,  0.    ,  5.2848], dtype=float32)
    """
    name, alpha = ACTIVATIONS[activation]
    return VALUES[name](gate, alpha, 0.0) * up


@operator(
    forward="gated_linear_unit",
    support=IN_GRAPHS,
    results={"dgate": like("dy"), "dup": like("dy")},
    in_place={"dgate": ("gate",), "dup": ("up",)},
)
def gated_linear_unit_grad(
    dy: Gate, gate: Saved, up: Saved, activation: Activation = "silu", *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Gradients of gated_linear_unit with respect to gate and up, in one pass.

    dy: gradient with respect to y, any shape; float32, float64, float16 or bfloat16.
    gate, up: as given to gated_linear_unit, of the shape and dtype of dy. activation: likewise.

    Returns (dgate, dup), of the shape and dtype of dy.

    Formula: dgate = dy * up * activation'(gate); dup = dy * activation(gate). Source: that of gated_linear_unit.

    Example:
    >>> gate, up = np.array([-1.0, 0.0, 2.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    >>> opgrad.gated_linear_unit_grad(np.ones_like(up), gate, up)
    (array([0.0723, 1.    , 3.2724], dtype=float32), array([-0.2689,  0.    ,  1.7616], dtype=float32))
    """
    name, alpha = ACTIVATIONS[activation]
    return dy * up * SLOPES[name](gate, alpha, 0.0), dy * VALUES[name](gate, alpha, 0.0)
