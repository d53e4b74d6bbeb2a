"""Convolution and transposed convolution."""

from typing import Any

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, gradient
from opgrad.onnx.rules.shaping import sizes_of


def window_attributes(node: Node, spatial: int) -> dict[str, Any]:
    """Kernel, strides, dilations, pads and group, with auto_pad resolved where the sizes are known."""
    names = ("kernel_shape", "strides", "dilations", "group", "pads")
    given = {name: node.get(name) for name in names if node.get(name) is not None}
    auto_pad = node.get("auto_pad", "NOTSET") or "NOTSET"
    if auto_pad == "NOTSET":
        return given
    pads = _resolved_pads(node, auto_pad, spatial)
    return {**given, "pads": pads} if pads is not None else {**given, "auto_pad": auto_pad}


def _resolved_pads(node: Node, auto_pad: str, spatial: int) -> list[int] | None:
    """The padding that auto_pad means, None where the sizes are not known."""
    if auto_pad == "VALID":
        return [0] * 2 * spatial
    x, y = _spatial(node.x), _spatial(node.y)
    kernel = node.get("kernel_shape") or _spatial(node.required(1))
    if x is None or y is None or kernel is None:
        return None
    strides, dilations = (node.get(name) or [1] * spatial for name in ("strides", "dilations"))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    each = zip(x, y, strides, reach, strict=True)
    totals = [max((count - 1) * stride + width - size, 0) for size, count, stride, width in each]
    return split_pads(totals, auto_pad)


def _spatial(value: Value) -> list[int] | None:
    """The sizes behind rows and channels, None if some of them are not known."""
    sizes = [size for size in sizes_of(value)[2:] if isinstance(size, int)]
    return sizes if len(sizes) == len(sizes_of(value)) - 2 else None


def split_pads(totals: list[int], auto_pad: str) -> list[int]:
    """The padding before and behind each axis: one half of each total; auto_pad says where the larger half goes."""
    less, more = [each // 2 for each in totals], [each - each // 2 for each in totals]
    return [*less, *more] if auto_pad != "SAME_LOWER" else [*more, *less]


@gradient("Conv")
def conv(node: Node) -> Gradients:
    """dx = the transposed convolution of dy with w, dw = the convolution of x with dy, db = sum(dy)."""
    attributes = window_attributes(node, node.rank(1) - 2)
    return node.results("ConvGrad", 3, node.dy, node.x, node.required(1), **attributes)


@gradient("ConvTranspose")
def conv_transpose(node: Node) -> Gradients:
    """dx = the convolution of dy with w, dw = that of dy with x, db = sum(dy)."""
    names = ("kernel_shape", "strides", "dilations", "group", "pads", "auto_pad", "output_padding", "output_shape")
    attributes = {name: node.get(name) for name in names if node.get(name) is not None}
    return node.results("ConvTransposeGrad", 3, node.dy, node.x, node.required(1), **attributes)
