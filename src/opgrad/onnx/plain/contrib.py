"""Operators beyond ai.onnx that stock onnxruntime has, and other runtimes have not."""

import math

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.node_view import fused_product
from opgrad.onnx.plain.registry import Call, NoForm, Results, lowers

CUBIC = 0.044715  # of the tanh approximation of Gelu


def _gelu(x: Value) -> Value:
    """x * cdf(x) of the normal distribution."""
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).apply("Erf"))


@lowers("Gelu")
def gelu(call: Call) -> Value:
    """y = x * cdf(x)."""
    (x,) = call.operands(1)
    return _gelu(x)


@lowers("BiasGelu")
def bias_gelu(call: Call) -> Value:
    """y = gelu(x + bias)."""
    x, bias = call.operands(2)
    return _gelu(x + bias)


@lowers("FastGelu")
def fast_gelu(call: Call) -> Value:
    """y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2, of x + bias where there is one."""
    (x,) = call.operands(1)
    bias = call.input(1)
    x = x if bias is None else x + bias
    return 0.5 * x * (1 + (x * math.sqrt(2 / math.pi) * (1 + x * x * CUBIC)).apply("Tanh"))


@lowers("FusedMatMul")
def fused_matmul(call: Call) -> Value:
    """y = alpha * a @ b, either of them transposed."""
    return fused_product(call)


@lowers("SimplifiedLayerNormalization", domain="")
def simplified_layer_normalization(call: Call) -> Results:
    """y = x * inv_std * scale, and inv_std = 1 / sqrt(mean(x²) + epsilon) over the axes from `axis` on, in float32."""
    x, scale = call.operands(2)
    axis, sizes = call.get("axis", -1), call.input_shapes[0]
    if axis >= 0 and sizes is None:
        raise NoForm("the graph does not tell the rank of its input")
    axes = range(axis if sizes is None or axis < 0 else axis - len(sizes), 0)
    wide = x.cast(call.get("stash_type", 1))
    inv_std = 1 / ((wide * wide).mean(*axes) + call.get("epsilon", 1e-5)).apply("Sqrt")
    return (wide * inv_std).like(scale) * scale, inv_std
