"""Activations, element by element, and their gradients."""

import math

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.registry import Call, lowers

SQRT_2_PI, CUBIC = math.sqrt(2 / math.pi), 0.044715  # of the tanh approximation of Gelu


@lowers("ReluGrad")
def relu_grad(call: Call) -> Value:
    """dx = dy where x > 0."""
    dy, x = call.operands(2)
    return call.body.where(x > 0, dy, 0)


@lowers("LeakyReluGrad")
def leaky_relu_grad(call: Call) -> Value:
    """dx = dy where y > 0, else alpha * dy."""
    dy, y = call.operands(2)
    return call.body.where(y > 0, dy, dy * call.get("alpha", 0.01))


@lowers("SigmoidGrad")
def sigmoid_grad(call: Call) -> Value:
    """dx = dy * y * (1 - y)."""
    dy, y = call.operands(2)
    return dy * y * (1 - y)


@lowers("TanhGrad")
def tanh_grad(call: Call) -> Value:
    """dx = dy * (1 - y * y)."""
    dy, y = call.operands(2)
    return dy * (1 - y * y)


@lowers("QuickGelu")
def quick_gelu(call: Call) -> Value:
    """y = x * sigmoid(alpha * x)."""
    (x,) = call.operands(1)
    return x * (x * call.get("alpha", 1.702)).apply("Sigmoid")


@lowers("QuickGeluGrad")
def quick_gelu_grad(call: Call) -> Value:
    """dx = dy * s * (1 + v * (1 - s)) with v = alpha * x, s = sigmoid(v)."""
    dy, x = call.operands(2)
    v = x * call.get("alpha", 1.702)
    s = v.apply("Sigmoid")
    return dy * s * (1 + v * (1 - s))


def _biased(call: Call, index: int) -> Value:
    """An input plus the bias behind it, if there is one."""
    x, bias = call.required(index), call.input(index + 1)
    return x if bias is None else x + bias


@lowers("Gelu", "BiasGelu")
def gelu(call: Call) -> Value:
    """y = x * cdf(x) of the normal distribution, or of x + bias."""
    x = _biased(call, 0)
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).apply("Erf"))


@lowers("GeluGrad", "BiasGeluGrad_dX")
def gelu_grad(call: Call) -> Value:
    """dx = dy * (cdf(x) + x * pdf(x)) of the normal distribution, or of x + bias."""
    x = _biased(call, 1)
    cdf = 0.5 * (1 + (x * math.sqrt(0.5)).apply("Erf"))
    return call.required(0) * (cdf + x * (x * x * -0.5).apply("Exp") * (1 / math.sqrt(2 * math.pi)))


@lowers("FastGelu")
def fast_gelu(call: Call) -> Value:
    """y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2, or of x + bias."""
    x = _biased(call, 0)
    return 0.5 * x * (1 + (x * SQRT_2_PI * (1 + x * x * CUBIC)).apply("Tanh"))


@lowers("FastGeluGrad", "BiasFastGeluGrad_dX")
def fast_gelu_grad(call: Call) -> Value:
    """dx = dy * fast_gelu'(x), or of x + bias."""
    x = _biased(call, 1)
    square = x * x
    t = (SQRT_2_PI * x * (1 + CUBIC * square)).apply("Tanh")
    slope = SQRT_2_PI * (1 + 3 * CUBIC * square)
    return call.required(0) * (0.5 * (1 + t + x * (1 - t * t) * slope))
