"""Windows: convolution, transposed convolution, pooling, and blocks of an image."""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.sizes import known
from opgrad.onnx.rules.node import Gradients, Node, NoGradient, gradient, reshape_like

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


def _open_shape(node: Node) -> Value | None:
    """The shape of x, where the graph does not tell its sizes behind batch and channels; None where it does."""
    return node.x.shape() if known((node.x.sizes or [None] * 3)[2:]) is None else None


@gradient("MaxPool", integers=True)
def max_pool(node: Node) -> Value:
    """dx = 0; dx[indices] += dy."""
    if node.get("storage_order", 0):  # the indices of this order count along columns
        attributes = {**node.attributes, "storage_order": 0}
        indices = node.body.nodes_of("MaxPool", 2, node.x, **attributes)[1]
    else:
        indices = node.output(1, "_mask", TensorProto.INT64)
    return node.body.node("MaxPoolGrad", node.dy, indices, _open_shape(node))


@gradient("AveragePool")
def average_pool(node: Node) -> Value:
    """dx[i] = the sum of dy[o] / (elements of window o) over the windows o that i is in."""
    attributes = node.given(*WINDOW, "ceil_mode", "count_include_pad")
    return node.body.node("AveragePoolGrad", node.dy, _open_shape(node), **attributes)


@gradient("Col2Im", constant=(1, 2))
def col2im(node: Node) -> Value:
    """dx = the blocks of dy: its convolution with filters that each pick one place of a block."""
    block, image = node.constant(2), node.required(1)
    if block is None:
        raise NoGradient("the size of its blocks is known at run time alone")
    count, body = int(block.prod()), node.body
    given = node.given("dilations", "pads", "strides")
    filters = body.constant(np.eye(count).reshape(count, 1, *block.tolist())).like(node.dy)
    channels = node.dy.reshape(body.concat(body.ints([-1, 1]), image))
    return reshape_like(body.node("Conv", channels, filters, **given), node.x)
