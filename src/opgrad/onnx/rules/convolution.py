"""Convolution and transposed convolution."""

from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, gradient

WINDOW = ("kernel_shape", "strides", "dilations", "group", "pads", "auto_pad")


@gradient("Conv")
def conv(node: Node) -> Gradients:
    """dx = the transposed convolution of dy with w, dw = the convolution of x with dy, db = sum(dy)."""
    return node.results("ConvGrad", 3, node.dy, node.x, node.required(1), **node.given(*WINDOW))


@gradient("ConvTranspose")
def conv_transpose(node: Node) -> Gradients:
    """dx = the convolution of dy with w, dw = that of dy with x, db = sum(dy)."""
    attributes = node.given(*WINDOW, "output_padding", "output_shape")
    return node.results("ConvTransposeGrad", 3, node.dy, node.x, node.required(1), **attributes)
