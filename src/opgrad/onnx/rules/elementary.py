"""Functions of one value, element by element."""

import math

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import FLOATS
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantization import scale_of
from opgrad.onnx.rules.registry import gradient


@gradient("Identity", integers=True)
def identity(node: Node) -> Value:
    """dx = dy."""
    return node.dy


@gradient("Cast", "CastLike", constant=(1,), integers=True)
def cast(node: Node) -> Value:
    """dx = dy, in the type of x; of integers that stand for floats dx = dy / scale."""
    dtype = node.x.element_type
    if dtype in (None, *FLOATS):
        return node.dy if dtype in (None, node.y.element_type) else node.dy.cast(dtype or 0)
    scale = scale_of(node, 0) if node.y.element_type in (None, *FLOATS) else None
    return node.dy if scale is None else node.dy / scale.like(node.dy)


@gradient("Neg")
def neg(node: Node) -> Value:
    """dx = -dy."""
    return -node.dy


@gradient("Abs")
def absolute(node: Node) -> Value:
    """dx = dy * sign(x)."""
    return node.dy * node.x.apply("Sign")


@gradient("Reciprocal")
def reciprocal(node: Node) -> Value:
    """dx = -dy * y * y."""
    return -(node.dy * node.y * node.y)


@gradient("Sqrt")
def sqrt(node: Node) -> Value:
    """dx = dy / (2 * y)."""
    return node.dy * (0.5 / node.y)


@gradient("Exp")
def exp(node: Node) -> Value:
    """dx = dy * y."""
    return node.dy * node.y


@gradient("Log")
def log(node: Node) -> Value:
    """dx = dy / x."""
    return node.dy / node.x


@gradient("Erf")
def erf(node: Node) -> Value:
    """dx = dy * 2 / sqrt(pi) * exp(-x * x)."""
    return node.dy * (-(node.x * node.x)).apply("Exp") * (2 / math.sqrt(math.pi))


@gradient("Sin")
def sin(node: Node) -> Value:
    """dx = dy * cos(x)."""
    return node.dy * node.x.apply("Cos")


@gradient("Cos")
def cos(node: Node) -> Value:
    """dx = -dy * sin(x)."""
    return -(node.dy * node.x.apply("Sin"))


@gradient("Tan")
def tan(node: Node) -> Value:
    """dx = dy * (1 + y * y)."""
    return node.dy * (1 + node.y * node.y)


@gradient("Asin")
def asin(node: Node) -> Value:
    """dx = dy / sqrt(1 - x * x)."""
    return node.dy / (1 - node.x * node.x).apply("Sqrt")


@gradient("Acos")
def acos(node: Node) -> Value:
    """dx = -dy / sqrt(1 - x * x)."""
    return -(node.dy / (1 - node.x * node.x).apply("Sqrt"))


@gradient("Atan")
def atan(node: Node) -> Value:
    """dx = dy / (1 + x * x)."""
    return node.dy / (1 + node.x * node.x)


@gradient("Sinh")
def sinh(node: Node) -> Value:
    """dx = dy * cosh(x)."""
    return node.dy * node.x.apply("Cosh")


@gradient("Cosh")
def cosh(node: Node) -> Value:
    """dx = dy * sinh(x)."""
    return node.dy * node.x.apply("Sinh")


@gradient("Tanh")
def tanh(node: Node) -> Value:
    """dx = dy * (1 - y * y)."""
    return node.microsoft("TanhGrad", node.dy, node.y)


@gradient("Asinh")
def asinh(node: Node) -> Value:
    """dx = dy / sqrt(x * x + 1)."""
    return node.dy / (node.x * node.x + 1).apply("Sqrt")


@gradient("Acosh")
def acosh(node: Node) -> Value:
    """dx = dy / sqrt(x * x - 1)."""
    return node.dy / (node.x * node.x - 1).apply("Sqrt")


@gradient("Atanh")
def atanh(node: Node) -> Value:
    """dx = dy / (1 - x * x)."""
    return node.dy / (1 - node.x * node.x)
