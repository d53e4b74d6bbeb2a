"""Convolution and transposed convolution."""

from typing import Any

from opgrad.gradients.node import Node
from opgrad.gradients.registry import Gradients, NoGradient, gradient
from opgrad.gradients.shaping import sizes_of
from opgrad.onnxruntime.bodies.build import Value


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
    """Padding of these lengths, one half on either side, the greater one as auto_pad says."""
    less, more = [each // 2 for each in totals], [each - each // 2 for each in totals]
    return [*less, *more] if auto_pad != "SAME_LOWER" else [*more, *less]


@gradient("Conv")
def conv(node: Node) -> Gradients:
    """dx = the transposed convolution of dy with w, dw = the convolution of x with dy, db = sum(dy)."""
    attributes = window_attributes(node, node.rank() - 2)
    return node.results("ConvGrad", 3, node.dy, node.x, node.required(1), **attributes)


@gradient("ConvTranspose")
def conv_transpose(node: Node) -> Gradients:
    """dx = the convolution of dy with w; dw that of a convolution from y to x; db = sum(dy)."""
    x, w, dy = node.x, node.required(1), node.dy
    spatial = node.rank() - 2
    names = ("kernel_shape", "strides", "dilations", "group")
    attributes = {name: node.get(name) for name in names if node.get(name) is not None}
    attributes["pads"] = _transposed_pads(node, spatial)
    dx = node.body.node("Conv", dy, w, **attributes)
    dw = node.results("ConvGrad", 3, x, dy, w, **attributes)[1]
    return [dx, dw, dy.sum([0, *range(2, 2 + spatial)], keepdims=False)]


def _transposed_pads(node: Node, spatial: int) -> list[int]:
    """The padding, which auto_pad and output_shape leave to the sizes."""
    auto_pad = node.get("auto_pad", "NOTSET") or "NOTSET"
    output = node.get("output_shape")
    if auto_pad in ("NOTSET", "VALID") and not output:
        return list(node.get("pads") or [0] * 2 * spatial) if auto_pad == "NOTSET" else [0] * 2 * spatial
    sizes, kernel = _spatial(node.x), node.get("kernel_shape") or _spatial(node.required(1))
    if sizes is None or not kernel:
        raise NoGradient("its padding depends on the sizes of its input, which the graph does not tell")
    strides, dilations = (node.get(name) or [1] * spatial for name in ("strides", "dilations"))
    extra = node.get("output_padding") or [0] * spatial
    whole = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, s, e, k, d in zip(sizes, strides, extra, kernel, dilations, strict=True)
    ]
    wanted = list(output)[-spatial:] if output else [n * s for n, s in zip(sizes, strides, strict=True)]
    totals = [max(each - size, 0) for each, size in zip(whole, wanted, strict=True)]
    return split_pads(totals, "SAME_UPPER" if auto_pad == "SAME_UPPER" else "SAME_LOWER")
