"""Softmax and log-softmax."""

from opgrad.gradients.node import Node
from opgrad.gradients.registry import gradient
from opgrad.onnxruntime.bodies.build import Value

ONE_AXIS_FROM = 13  # before, the axes from `axis` on were one row


@gradient("Softmax", "LogSoftmax")
def softmax(node: Node) -> Value:
    """dx = y * (dy - sum(y * dy)), of the logarithm dx = dy - exp(y) * sum(dy)."""
    op = f"{node.proto.op_type}Grad"
    if node.opset < ONE_AXIS_FROM:
        return node.microsoft(op, node.dy, node.y, axis=node.get("axis", 1))
    return node.microsoft(f"{op}_13", node.dy, node.y, axis=node.get("axis", -1))
