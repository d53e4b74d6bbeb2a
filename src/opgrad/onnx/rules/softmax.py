"""Softmax and log-softmax."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import gradient

ONE_AXIS_FROM = 13  # before, the axes from `axis` on were one row


@gradient("Softmax", "LogSoftmax")
def softmax(node: Node) -> Value:
    """dx = y * (dy - sum(y * dy)), of the logarithm dx = dy - exp(y) * sum(dy)."""
    op, y = f"{node.proto.op_type}Grad", node.y
    # A row in which every element is masked is NaN, and exporters write IsNaN and Where behind softmax to replace it by
    # 0. Its gradient must be 0 then, but NaN times 0 would be NaN.
    masked_rows_are_replaced = node.leads_to("Where", "IsNaN")
    if masked_rows_are_replaced:
        y = node.where(y.apply("IsNaN"), 0, y)
    if node.opset < ONE_AXIS_FROM:
        return node.microsoft(op, node.dy, y, axis=node.get("axis", 1))
    return node.microsoft(f"{op}_13", node.dy, y, axis=node.get("axis", -1))
