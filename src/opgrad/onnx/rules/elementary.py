"""Functions of one value, element by element."""

import math

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import FLOATS
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantization import scale_of
from opgrad.onnx.rules.registry import formula, gradient

formula("Identity", "dx = dy.", lambda n: n.dy, integers=True)


@gradient("Cast", "CastLike", constant=(1,), integers=True)
def cast(node: Node) -> Value:
    """dx = dy, in the type of x; of integers that stand for floats dx = dy / scale."""
    dtype = node.x.element_type
    if dtype in (None, *FLOATS):
        return node.dy if dtype in (None, node.y.element_type) else node.dy.cast(dtype or 0)
    scale = scale_of(node, 0) if node.y.element_type in (None, *FLOATS) else None
    return node.dy if scale is None else node.dy / scale.like(node.dy)


formula("Neg", "dx = -dy.", lambda n: -n.dy)
formula("Abs", "dx = dy * sign(x).", lambda n: n.dy * n.x.apply("Sign"))
formula("Reciprocal", "dx = -dy * y * y.", lambda n: -(n.dy * n.y * n.y))
formula("Sqrt", "dx = dy / (2 * y).", lambda n: n.dy * (0.5 / n.y))
formula("Exp", "dx = dy * y.", lambda n: n.dy * n.y)
formula("Log", "dx = dy / x.", lambda n: n.dy / n.x)


@gradient("Erf")
def erf(node: Node) -> Value:
    """dx = dy * 2 / sqrt(pi) * exp(-x * x)."""
    return node.dy * (-(node.x * node.x)).apply("Exp") * (2 / math.sqrt(math.pi))


formula("Sin", "dx = dy * cos(x).", lambda n: n.dy * n.x.apply("Cos"))
formula("Cos", "dx = -dy * sin(x).", lambda n: -(n.dy * n.x.apply("Sin")))
formula("Tan", "dx = dy * (1 + y * y).", lambda n: n.dy * (1 + n.y * n.y))
formula("Asin", "dx = dy / sqrt(1 - x * x).", lambda n: n.dy / (1 - n.x * n.x).apply("Sqrt"))
formula("Acos", "dx = -dy / sqrt(1 - x * x).", lambda n: -(n.dy / (1 - n.x * n.x).apply("Sqrt")))
formula("Atan", "dx = dy / (1 + x * x).", lambda n: n.dy / (1 + n.x * n.x))
formula("Sinh", "dx = dy * cosh(x).", lambda n: n.dy * n.x.apply("Cosh"))
formula("Cosh", "dx = dy * sinh(x).", lambda n: n.dy * n.x.apply("Sinh"))
formula("Tanh", "dx = dy * (1 - y * y).", lambda n: n.microsoft("TanhGrad", n.dy, n.y))
formula("Asinh", "dx = dy / sqrt(x * x + 1).", lambda n: n.dy / (n.x * n.x + 1).apply("Sqrt"))
formula("Acosh", "dx = dy / sqrt(x * x - 1).", lambda n: n.dy / (n.x * n.x - 1).apply("Sqrt"))
formula("Atanh", "dx = dy / (1 - x * x).", lambda n: n.dy / (1 - n.x * n.x))
