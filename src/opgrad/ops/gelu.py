"""Gelu, its approximation by tanh, and their gradients, alone and behind the addition of a bias."""

from typing import Annotated

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, elements, like, operator
from opgrad.contract.attributes import FLOATS, Array
from opgrad.ops.reference.post_ops import SLOPES, VALUES

X = Annotated[Array, Tensor(FLOATS)]
Saved = Annotated[Array, like("dy")]

# Where a bias is added along the last axis, that axis counts: no other order of the axes will do.
Whole = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]
Bias = Annotated[Array, Tensor(FLOATS, lambda shapes, _: shapes["dy"][-1:], "the last dimension of dy", dtype_of="dy")]


@operator(
    "y = x / 2 * (1 + erf(x / sqrt(2)))",
    support=IN_GRAPHS,
    **elements("y", "x"),
)
def gelu(x: X, *, out: Array | None = None) -> Array:
    """Gaussian error linear unit: x times the probability that a normally distributed number is below x.

    x: any shape; float32, float64, float16 or bfloat16. out: where to write; may be x.
    Returns y, of the shape and dtype of x; the limit -0 at -inf is not taken: -inf gives NaN.
    Raises TypeError, ValueError.

    Formula: y = x / 2 * (1 + erf(x / sqrt(2))), also accurate where x is far below 0.
    Source: com.microsoft Gelu, which onnxruntime has.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.gelu(x)
    array([-0.0455, -0.1543,  0.    ,  1.3998], dtype=float32)
    """
    return VALUES["gelu_erf"](x, 0.0, 0.0)


@operator(
    "dx = dy * (P + x * p), P = (1 + erf(x / sqrt(2))) / 2, p = exp(-x * x / 2) / sqrt(2 pi)",
    forward="gelu",
    support=IN_GRAPHS,
    onnx=OnnxName("GeluGrad", ("dy", "x"), ("dx",)),
    **elements("dx", "dy"),
)
def gelu_grad(dy: X, x: Saved, *, out: Array | None = None) -> Array:
    """Gradient of gelu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: the input of gelu (not its output), of the shape and dtype of dy.
    out: where to write; may be dy.
    Returns dx, of the shape and dtype of dy; the limits dy and 0 at infinite x are not taken: they give NaN.
    Raises TypeError, ValueError.

    Formula: P = (1 + erf(x / sqrt(2))) / 2; p = exp(-x * x / 2) / sqrt(2 pi); dx = dy * (P + x * p).
    Source: com.microsoft GeluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.gelu_grad(dy, x)
    array([-0.0852,  0.1325, -0.5   ,  2.2549], dtype=float32)
    """
    return dy * SLOPES["gelu_erf"](x, 0.0, 0.0)


@operator(
    "y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
    support=IN_GRAPHS,
    **elements("y", "x"),
)
def fast_gelu(x: X, *, out: Array | None = None) -> Array:
    """Gelu approximated by tanh.

    x: any shape; float32, float64, float16 or bfloat16. out: where to write; may be x.
    Returns y, of the shape and dtype of x; the limit -0 at -inf is not taken: -inf gives NaN.
    Raises TypeError, ValueError.

    Formula: y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))), also accurate where x is far below 0.
    Source: com.microsoft FastGelu, which onnxruntime has.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> opgrad.fast_gelu(x)
    array([-0.0454, -0.1543,  0.    ,  1.3996], dtype=float32)
    """
    return VALUES["gelu_tanh"](x, 0.0, 0.0)


@operator(
    "dx = dy * s * (1 + 2 * x * u' * (1 - s)), s = sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x**3)",
    forward="fast_gelu",
    support=IN_GRAPHS,
    onnx=OnnxName("FastGeluGrad", ("dy", "x"), ("dx",)),
    **elements("dx", "dy"),
)
def fast_gelu_grad(dy: X, x: Saved, *, out: Array | None = None) -> Array:
    """Gradient of fast_gelu.

    dy: gradient with respect to the output; float32, float64, float16 or bfloat16.
    x: the input of fast_gelu (not its output), of the shape and dtype of dy.
    out: where to write; may be dy.
    Returns dx, of the shape and dtype of dy; the limits dy and 0 at infinite x are not taken: they give NaN.
    Raises TypeError, ValueError.

    Formula: u = sqrt(2 / pi) * (x + 0.044715 * x**3); u' = sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x);
    s = (1 + tanh(u)) / 2; dx = dy * (s + 2 * x * u' * s * (1 - s)). Source: com.microsoft FastGeluGrad.

    Example:
    >>> x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    >>> dy = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
    >>> opgrad.fast_gelu_grad(dy, x)
    array([-0.0861,  0.1326, -0.5   ,  2.2554], dtype=float32)
    """
    return dy * SLOPES["gelu_tanh"](x, 0.0, 0.0)


@operator(
    support=IN_GRAPHS,
    results={"dx": like("dy")},
    in_place={"dx": ("dy",)},
    onnx=OnnxName("BiasGeluGrad_dX", ("dy", "x", "bias"), ("dx",)),
)
def bias_gelu_grad_dx(dy: Whole, x: Saved, bias: Bias, *, out: Array | None = None) -> Array:
    """Gradient of gelu(x + bias) with respect to x; its sums over all axes but the last are that of bias.

    dy: gradient with respect to the output, of at least one dimension; float32, float64, float16 or bfloat16.
    x: what the bias was added to, of the shape and dtype of dy.
    bias: shape dy.shape[-1:], of the dtype of dy.
    out: where to write; may be dy.
    Returns dx, of the shape and dtype of dy; NaN where x + bias is infinite. Raises TypeError, ValueError.

    Formula: dx = gelu_grad(dy, x + bias). Source: com.microsoft BiasGeluGrad_dX.

    Example:
    >>> x = np.array([[-2.0, -0.5], [0.0, 1.5]], np.float32)
    >>> bias = np.array([0.5, -0.5], np.float32)
    >>> opgrad.bias_gelu_grad_dx(np.ones_like(x), x, bias)
    array([[-0.1275, -0.0833],
           [ 0.8675,  1.0833]], dtype=float32)
    """
    return dy * SLOPES["gelu_erf"](x + bias, 0.0, 0.0)


@operator(
    support=IN_GRAPHS,
    results={"dx": like("dy")},
    in_place={"dx": ("dy",)},
    onnx=OnnxName("BiasFastGeluGrad_dX", ("dy", "x", "bias"), ("dx",)),
)
def bias_fast_gelu_grad_dx(dy: Whole, x: Saved, bias: Bias, *, out: Array | None = None) -> Array:
    """Gradient of fast_gelu(x + bias) with respect to x; its sums over all axes but the last are that of bias.

    dy: gradient with respect to the output, of at least one dimension; float32, float64, float16 or bfloat16.
    x: what the bias was added to, of the shape and dtype of dy.
    bias: shape dy.shape[-1:], of the dtype of dy.
    out: where to write; may be dy.
    Returns dx, of the shape and dtype of dy; NaN where x + bias is infinite. Raises TypeError, ValueError.

    Formula: dx = fast_gelu_grad(dy, x + bias). Source: com.microsoft BiasFastGeluGrad_dX.

    Example:
    >>> x = np.array([[-2.0, -0.5], [0.0, 1.5]], np.float32)
    >>> bias = np.array([0.5, -0.5], np.float32)
    >>> opgrad.bias_fast_gelu_grad_dx(np.ones_like(x), x, bias)
    array([[-0.1277, -0.083 ],
           [ 0.8674,  1.083 ]], dtype=float32)
    """
    return dy * SLOPES["gelu_tanh"](x + bias, 0.0, 0.0)
