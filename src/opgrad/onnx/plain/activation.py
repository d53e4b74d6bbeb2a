"""Gradients of activations, element by element."""

import math

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.registry import Call, lowers


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


def _gelu_slope(x: Value) -> Value:
    """The derivative of x * cdf(x): cdf(x) + x * pdf(x) of the normal distribution."""
    cdf = 0.5 * (1 + (x * math.sqrt(0.5)).apply("Erf"))
    return cdf + x * (x * x * -0.5).apply("Exp") * (1 / math.sqrt(2 * math.pi))


def _fast_gelu_slope(x: Value) -> Value:
    """The derivative of x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3)."""
    factor, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    t = (factor * x * (1 + cubic * square)).apply("Tanh")
    slope = factor * (1 + 3 * cubic * square)
    return 0.5 * (1 + t + x * (1 - t * t) * slope)


@lowers("GeluGrad")
def gelu_grad(call: Call) -> Value:
    """dx = dy * gelu'(x)."""
    dy, x = call.operands(2)
    return dy * _gelu_slope(x)


@lowers("FastGeluGrad")
def fast_gelu_grad(call: Call) -> Value:
    """dx = dy * fast_gelu'(x)."""
    dy, x = call.operands(2)
    return dy * _fast_gelu_slope(x)


@lowers("BiasGeluGrad_dX")
def bias_gelu_grad(call: Call) -> Value:
    """dx = dy * gelu'(x + bias)."""
    dy, x, bias = call.operands(3)
    return dy * _gelu_slope(x + bias)


@lowers("BiasFastGeluGrad_dX")
def bias_fast_gelu_grad(call: Call) -> Value:
    """dx = dy * fast_gelu'(x + bias)."""
    dy, x, bias = call.operands(3)
    return dy * _fast_gelu_slope(x + bias)
