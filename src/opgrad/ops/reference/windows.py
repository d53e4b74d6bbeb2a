"""The windows of pooling and convolution along the axes behind batch and channel, from ONNX's attributes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opgrad.contract.attributes import shown

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
MOST_AXES = 3


@dataclass(frozen=True)
class WindowAxis:
    """One axis of `size` elements with `count` windows of `kernel` elements each.

    Window o has its elements at o * stride - begin + k * dilation for k in [0, kernel); `begin` and `end` are the
    elements of padding before and behind the axis.
    """

    size: int
    count: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    begin: int = 0
    end: int = 0

    def elements(self, window: int) -> list[int]:
        """The window's elements that lie on the axis."""
        first = window * self.stride - self.begin
        every = (first + k * self.dilation for k in range(self.kernel))
        return [i for i in every if 0 <= i < self.size]

    def padded(self, window: int) -> int:
        """How many of the window's elements lie on the axis or its padding."""
        room = self.size + self.end + self.begin - window * self.stride
        return min(self.kernel, -(-room // self.dilation))


def axes(
    operator: str, sizes: Sequence[int], kernel_shape: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    pads: Sequence[int], auto_pad: str, ceil_mode: bool = False,
) -> tuple[WindowAxis, ...]:  # fmt: skip
    """The axes of these sizes; empty strides, dilations and pads stand for ones, ones and zeros.

    Raises the operator's ValueError for attributes that cannot be.
    """
    rank = len(sizes)
    if not isinstance(auto_pad, str) or auto_pad not in AUTO_PADS:
        raise ValueError(f"{operator}: auto_pad is {shown(auto_pad)}, expected one of {', '.join(AUTO_PADS)}")
    kernel_shape = _list(operator, "kernel_shape", kernel_shape, rank, least=1)
    strides = _list(operator, "strides", strides or (1,) * rank, rank, least=1)
    dilations = _list(operator, "dilations", dilations or (1,) * rank, rank, least=1)
    pads = _list(operator, "pads", pads or (0,) * (2 * rank), 2 * rank, least=0)
    given = zip(sizes, kernel_shape, strides, dilations, pads[:rank], pads[rank:], strict=True)
    return tuple(_axis(WindowAxis(n, 0, k, s, d, a, b), auto_pad, ceil_mode) for n, k, s, d, a, b in given)


def _list(operator: str, name: str, values: Sequence[int], length: int, least: int) -> Sequence[int]:
    if len(values) != length:
        raise ValueError(f"{operator}: {name} is {tuple(values)}, expected {length} numbers")
    if any(value < least for value in values):
        raise ValueError(f"{operator}: {name} is {tuple(values)}, expected numbers of at least {least}")
    return values


def _axis(axis: WindowAxis, auto_pad: str, ceil_mode: bool) -> WindowAxis:
    """The axis with its number of windows and, where auto_pad gives it, its padding."""
    span, stride = (axis.kernel - 1) * axis.dilation + 1, axis.stride
    if auto_pad.startswith("SAME"):
        count = -(-axis.size // stride)
        both = max((count - 1) * stride + span - axis.size, 0)
        begin = both // 2 if auto_pad == "SAME_UPPER" else both - both // 2
        return replace(axis, count=count, begin=begin, end=both - begin)
    if auto_pad == "VALID":
        axis = replace(axis, begin=0, end=0)
    room = axis.size + axis.begin + axis.end - span
    if room < 0:
        return axis
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= axis.size + axis.begin:
        count -= 1  # the last window would begin in the padding behind the axis
    return replace(axis, count=count)


def average_pool_axes(attributes: Mapping[str, Any]) -> tuple[WindowAxis, ...]:
    """The axes of x with the windows of average_pool_grad; ValueError for attributes that cannot be."""
    names = ("kernel_shape", "strides", "dilations", "pads", "auto_pad", "ceil_mode")
    return axes("average_pool_grad", attributes["shape"][2:], *(attributes[name] for name in names))


def convolution_axes(
    shapes: Mapping[str, tuple[int, ...]], attributes: Mapping[str, Any], operator: str = "conv_grad"
) -> tuple[WindowAxis, ...]:
    """The axes of x with windows of the size of the filters w; ValueError for attributes that cannot be."""
    kernel_shape = shapes["w"][2:]
    given = attributes["kernel_shape"] or kernel_shape
    if given != kernel_shape:
        raise ValueError(f"{operator}: kernel_shape is {given}, expected {kernel_shape}, as w has")
    names = ("strides", "dilations", "pads", "auto_pad")
    return axes(operator, shapes["x"][2:], kernel_shape, *(attributes[name] for name in names))


def transposed_axes(shapes: Mapping[str, tuple[int, ...]], attributes: Mapping[str, Any]) -> tuple[WindowAxis, ...]:
    """The axes of y with the windows of conv_transpose_grad, one for each element of x; ValueError as above."""
    operator, rank = "conv_transpose_grad", len(shapes["x"]) - 2
    along = convolution_axes(shapes, attributes, operator)
    more = _list(operator, "output_padding", attributes["output_padding"] or (0,) * rank, rank, least=0)
    given, auto_pad = attributes["output_shape"], attributes["auto_pad"]
    given = given[2:] if len(given) == rank + 2 else given  # it may have the batch and the channels before the axes
    wanted = _list(operator, "output_shape", given, rank, least=0) if given else (None,) * rank
    each = zip(along, more, wanted, strict=True)
    return tuple(_transposed(axis, extra, size, auto_pad) for axis, extra, size in each)


def _transposed(x: WindowAxis, more: int, wanted: int | None, auto_pad: str) -> WindowAxis:
    """The axis of y whose windows are the elements of one of x, of the size `wanted` if that is given."""
    whole = (x.size - 1) * x.stride + (x.kernel - 1) * x.dilation + 1 + more
    if wanted is None and not auto_pad.startswith("SAME"):
        return replace(x, size=max(whole - x.begin - x.end, 0), count=x.size)
    size = min(whole, x.size * x.stride) if wanted is None else wanted
    both = max(whole - size, 0)
    begin = both // 2 if auto_pad == "SAME_UPPER" else both - both // 2
    return replace(x, size=size, count=x.size, begin=begin, end=both - begin)
