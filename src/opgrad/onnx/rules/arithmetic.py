"""Arithmetic of two or more values, which are broadcast to one shape."""

from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, formula, gradient


@gradient("Add", "Sum")
def add(node: Node) -> Gradients:
    """da = dy, db = dy, summed over what was broadcast."""
    return [node.unbroadcast(node.dy, index) for index in range(len(node.inputs))]


formula("Sub", "da = dy, db = -dy.", lambda n: [n.unbroadcast(n.dy, 0), -n.unbroadcast(n.dy, 1)])


@gradient("Mul")
def mul(node: Node) -> Gradients:
    """da = dy * b, db = dy * a."""
    a, b = node.x, node.required(1)
    return [node.unbroadcast(node.dy * b, 0), node.unbroadcast(node.dy * a, 1)]


@gradient("Div")
def div(node: Node) -> Gradients:
    """da = dy / b, db = -dy * a / b**2."""
    a, b = node.x, node.required(1)
    if 1 not in node.needed:
        return [node.unbroadcast(node.dy / b, 0)]
    return node.results("DivGrad", 2, node.dy, a, b)


@gradient("Mean")
def mean(node: Node) -> Gradients:
    """dx = dy / number of inputs."""
    dy = node.dy * (1 / len(node.inputs))
    return [node.unbroadcast(dy, index) for index in range(len(node.inputs))]


@gradient("Pow")
def power(node: Node) -> Gradients:
    """da = dy * b * a**(b - 1), db = dy * y * log(a), which is 0 where a is 0."""
    a, b = node.x, node.required(1)
    known = node.constant(1)
    if known is not None and 1 not in node.needed and (known == 2).all():
        return [node.unbroadcast(node.dy * (2 * a), 0)]
    if b.element_type != a.element_type and a.element_type is not None:
        b = b.cast(a.element_type)
    da = node.where(b.equals(0), 0, b * a ** (b - 1))
    if 1 not in node.needed:
        return [node.unbroadcast(node.dy * da, 0)]
    logarithm = node.where(a > 0, node.where(a > 0, a, 1).apply("Log"), 0)
    return [node.unbroadcast(node.dy * da, 0), node.unbroadcast(node.dy * node.y * logarithm, 1)]


@gradient("Mod")
def mod(node: Node) -> Gradients:
    """da = dy, db = -dy * (a - y) / b, which is a whole number."""
    a, b = node.x, node.required(1)
    whole = ((a - node.y) / b + 0.5).apply("Floor")  # rounded, which bfloat16 cannot be by one operator
    return [node.unbroadcast(node.dy, 0), -node.unbroadcast(node.dy * whole, 1)]


@gradient("Where", constant=(0,), integers=True)
def where(node: Node) -> Gradients:
    """da = dy where the condition holds, db = dy elsewhere."""
    condition = node.x
    return [
        None,
        node.unbroadcast(node.where(condition, node.dy, 0), 1),
        node.unbroadcast(node.where(condition, 0, node.dy), 2),
    ]


formula(
    "Expand", "dx = dy, summed over what was broadcast.", lambda n: n.unbroadcast(n.dy, 0), constant=(1,), integers=True
)
