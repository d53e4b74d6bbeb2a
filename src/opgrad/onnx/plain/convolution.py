"""Gradients of pooling, convolution, transposed convolution and resizing, as convolutions and products.

dX is the transposed convolution of dY with the weights. dW is the convolution of X with dY as its kernel: the batch
takes the place of the channels, and strides and dilations change places. Resizing is a linear map along each axis;
applying Resize to unit vectors gives its matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Body, NodeView, Value
from opgrad.onnx.graph.sizes import Sizes, known
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers
from opgrad.ops.pooling import ATTRIBUTES, resized_axes
from opgrad.ops.reference.windows import axes


class Window:
    """The sliding window of a convolution or pooling node.

    kernel, strides, dilations: one number for each spatial axis. widths: what the window spans along each.
    along: the axes of X with their windows; of some size where that is not known.
    begin, end: the padding on either side; None where auto_pad leaves it to sizes of X that are not known.
    """

    def __init__(self, node: NodeView, kernel: Sequence[int], shape: Sizes | None = None):
        """shape: of X."""
        self.kernel, self.axes = list(kernel), len(kernel)
        self.strides = list(node.get("strides") or [1] * self.axes)
        self.dilations = list(node.get("dilations") or [1] * self.axes)
        self.widths = [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]
        self.auto_pad = node.get("auto_pad", "NOTSET") or "NOTSET"
        sizes, given = known(list(shape or [])[2:]), (self.kernel, self.strides, self.dilations, node.get("pads") or ())
        self.along = axes("a window", sizes or [1] * self.axes, *given, self.auto_pad, bool(node.get("ceil_mode", 0)))
        self.begin: list[int] | None = [each.begin for each in self.along]
        self.end: list[int] | None = [each.end for each in self.along]
        if self.auto_pad.startswith("SAME") and not sizes and max(self.strides) > 1:
            self.begin = self.end = None

    def pads_before(self, x_sizes: Value, y_sizes: Value) -> Value:
        """The padding before X along each spatial axis, an array of int64."""
        body = x_sizes.body
        if self.begin is not None:
            return body.ints(self.begin)
        total = (y_sizes - 1) * body.ints(self.strides) + body.ints(self.widths) - x_sizes
        total = body.node("Max", total, body.ints([0]))
        return (total if self.auto_pad == "SAME_UPPER" else total + 1) / 2

    def attributes(self) -> dict[str, list[int]]:
        """Strides and dilations, as the transposed convolution takes them."""
        return {"strides": self.strides, "dilations": self.dilations, "kernel_shape": self.kernel}

    def transposed(self, dy: Value, weights: Value, x_sizes: Value, group: int, reaches: bool = True) -> Value:
        """The transposed convolution, of the spatial sizes of X.

        It is as long as the windows reach; what they never reached, behind a stride, is padded with 0.
        reaches: whether windows with a stride of 1 end where X does, as they do unless X or dY is empty.
        """
        body = dy.body
        if reaches and self.begin is not None and self.end is not None and all(stride == 1 for stride in self.strides):
            pads = [*self.begin, *self.end]
            return body.node("ConvTranspose", dy, weights, group=group, pads=pads, **self.attributes())
        whole = body.node("ConvTranspose", dy, weights, group=group, **self.attributes())
        before = self.pads_before(x_sizes, dy.shape(2))
        missing = body.node("Max", before + x_sizes - whole.shape(2), body.ints([0]))
        long_enough = body.node("Pad", whole, body.concat(body.ints([0] * (self.axes + 4)), missing))
        return body.node("Slice", long_enough, before, before + x_sizes, body.ints(range(2, 2 + self.axes)))

    def padded(self, x: Value, y_sizes: Value) -> tuple[Value, dict[str, list[int]]]:
        """X, and the padding for a convolution with it; padded by itself where auto_pad decides."""
        body = x.body
        if self.begin is not None and self.end is not None:
            return x, {"pads": [*self.begin, *self.end]}
        before = self.pads_before(x.shape(2), y_sizes)
        reach = (y_sizes - 1) * body.ints(self.strides) + body.ints(self.widths)
        behind = body.node("Max", reach - before - x.shape(2), body.ints([0]))
        none = body.ints([0, 0])
        return body.node("Pad", x, body.concat(none, before, none, behind)), {}


def _kernel(call: Call) -> list[int]:
    """The kernel's spatial sizes."""
    kernel = call.get("kernel_shape") or (call.input_shapes[2] or ())[2:]
    if not kernel or None in kernel:
        raise NoForm("it has no attribute kernel_shape, and the graph does not tell the shape of the weights")
    return list(kernel)


@lowers("ConvGrad")
def conv_grad(call: Call, dy: Value, x: Value, w: Value) -> Results:
    """dx, dw and db of a convolution of one to three (or more) spatial axes."""
    window, group = Window(call, _kernel(call), call.input_shapes[1]), call.get("group", 1)
    db = dy.sum([0, *range(2, 2 + window.axes)], keepdims=False)
    long_x, windows = _filled(call, window, x, dy)
    dx = window.transposed(windows, w, x.shape(2), group, reaches=windows is dy)
    return dx, _weights_grad(window, windows, long_x, group), db


@lowers("ConvTransposeGrad")
def conv_transpose_grad(call: Call, dy: Value, x: Value, w: Value) -> Results:
    """dx, dw and db of a transposed convolution: X and dY change places."""
    window, group = Window(call, _kernel(call)), call.get("group", 1)
    db = dy.sum([0, *range(2, 2 + window.axes)], keepdims=False)
    more = list(call.get("output_padding") or [0] * window.axes)
    has_pads = window.auto_pad in ("NOTSET", "VALID") and not call.get("output_shape")
    if not has_pads or any(extra >= stride for extra, stride in zip(more, window.strides, strict=True)):
        # What the windows of X stand on: dY with its padding, no longer than they reach.
        body, none = call.body, call.body.ints([0, 0])
        reach = (x.shape(2) - 1) * body.ints(window.strides) + body.ints(window.widths)
        if has_pads:
            before = body.ints(window.begin or [])
        else:
            total = body.node("Max", reach + body.ints(more) - dy.shape(2), body.ints([0]))
            before = (total if window.auto_pad == "SAME_UPPER" else total + 1) / 2
        behind = body.node("Max", reach - before - dy.shape(2), body.ints([0]))
        padded = body.node("Pad", dy, body.concat(none, before, none, behind))
        dy = body.node("Slice", padded, body.ints([0] * window.axes), reach, body.ints(range(2, 2 + window.axes)))
        window.begin = window.end = [0] * window.axes
    pads = [*(window.begin or []), *(window.end or [])]
    long_dy, windows = _filled(call, window, dy, x)
    dx = call.body.node("Conv", long_dy, w, group=group, pads=pads, **window.attributes())
    if windows is not x:
        body, axes = call.body, range(2, 2 + window.axes)
        dx = body.node("Slice", dx, body.ints([0] * window.axes), x.shape(2), body.ints(axes))
    return dx, _weights_grad(window, windows, long_dy, group), db


def _filled(call: Call, window: Window, x: Value, windows: Value) -> tuple[Value, Value]:
    """What a window slides over and what it finds at each place, with zeros behind a spatial axis that may be empty.

    Convolutions of onnxruntime refuse empty axes, and never return from an empty kernel. The same values where the
    graph tells that no axis is empty.
    """
    if all(sizes and all(sizes[2:]) for sizes in call.input_shapes[:2]):
        return x, windows
    body, none = x.body, call.body.ints([0] * (4 + window.axes))
    are_empty = [each.shape(2).equals(0) for each in (x, windows)]
    place = are_empty[1].cast(TensorProto.INT64)
    width = (are_empty[0] | are_empty[1]).cast(TensorProto.INT64) * body.ints(window.widths)
    return body.node("Pad", x, body.concat(none, width)), body.node("Pad", windows, body.concat(none, place))


def _weights_grad(window: Window, dy: Value, x: Value, group: int) -> Value:
    """dw[o, i, k] = sum over n and p of dy[n, o, p] * x[n, i, p * stride + k * dilation - pad]."""
    body, spatial = dy.body, range(2, 2 + window.axes)
    x, pads = window.padded(x, dy.shape(2))
    if group > 1:  # [N, G * I, …] to [I, G * N, …]
        rest = range(3, 3 + window.axes)
        of_group = body.ints([group])
        sizes = body.concat(x.shape(0, 1), of_group, x.shape(1, 2) / of_group, x.shape(2))
        rows = body.concat(x.shape(1, 2) / of_group, x.shape(0, 1) * of_group, x.shape(2))
        x = x.reshape(sizes).transpose(2, 1, 0, *rest).in_shape(rows)
    else:
        x = x.transpose(1, 0, *spatial)
    kernel = dy.transpose(1, 0, *spatial)
    dw = body.node(
        "Conv", x, kernel, group=group, strides=window.dilations, dilations=window.strides, **pads
    ).transpose(1, 0, *spatial)
    # Where the stride leaves a remainder of X, there is more than the kernel.
    axes = body.ints(spatial)
    return body.node("Slice", dw, body.ints([0] * window.axes), body.ints(window.kernel), axes)


LARGEST_WINDOW = 2**22  # elements that are counted one by one, when the form is written


@lowers("MaxPoolGrad", domain="")
@in_float32(0)
def max_pool_grad(call: Call, dy: Value, indices: Value) -> Value:
    """dx.flat[indices] += dy."""
    given = call.input(2)
    if call.get("storage_order", 0):
        raise NoForm("storage_order is 1, for which the indices count in another order than the elements lie")
    body, sizes = call.body, known(call.output_shapes[0])
    if given is None and call.forward is None and sizes is None:
        raise NoForm("the graph tells neither the shape of its output nor the forward node")
    shape = given or (call.forward.shape() if call.forward is not None else body.ints(sizes or []))
    zeros = body.full(shape.product(), 0, dy)
    flat = indices.reshape([-1]), dy.reshape([-1])
    return body.node("ScatterElements", zeros, *flat, axis=0, reduction="add").in_shape(shape)


@lowers("AveragePoolGrad", domain="")
@in_float32(0)
def average_pool_grad(call: Call) -> Value:
    """Each window's dy, divided by the number of its elements, added to them all."""
    (dy,), shape, body = call.operands(1), call.input(1), call.body
    kernel = list(call.get("kernel_shape") or ())
    spatial = [each for each in (call.output_shapes[0] or ())[2:] if each is not None]
    if math.prod(kernel) > LARGEST_WINDOW:
        raise NoForm(f"its windows {tuple(kernel)} have more than {LARGEST_WINDOW} elements")
    known = len(spatial) == len(kernel)
    if not kernel or not (known or shape is not None):
        raise NoForm("the graph does not tell the spatial sizes of its output, which its inputs do not tell either")
    window, sizes = Window(call, kernel, [None, None, *spatial] if known else None), body.ints(spatial)
    if not known and shape is not None:
        sizes = shape.slice(2, LAST)
    known &= all((each.begin + each.size + each.end) * each.kernel <= LARGEST_WINDOW for each in window.along)
    share = dy
    for axis, along in enumerate(window.along):
        column = [-1 if other == axis else 1 for other in range(window.axes)]
        if known:  # what a window has beyond the padding, with ceil_mode, does not count
            with_padding = call.get("count_include_pad", 0)
            own = [along.padded(each) if with_padding else len(along.elements(each)) for each in range(along.count)]
            counts = body.constant(np.array(own, np.float64))
        else:
            counts = _open_counts(call, window, axis, sizes, dy)
        share = share / counts.reshape(column).like(dy)
    # Every channel of every row is treated as a separate image.
    images = share.reshape(body.concat(body.ints([-1, 1]), dy.shape(2)))
    ones = body.constant(np.ones((1, 1, *kernel))).like(dy)
    dx = window.transposed(images, ones, sizes, group=1)
    return dx.reshape(body.concat(dy.shape(0, 2), sizes))


def _open_counts(call: Call, window: Window, axis: int, sizes: Value, dy: Value) -> Value:
    """By what each window along an axis divides, of sizes that are only known when the graph runs."""
    body, here = call.body, (axis, axis + 1)
    begin = window.pads_before(sizes, dy.shape(2)).slice(*here)
    starts = body.range(dy.shape(2 + axis, 3 + axis).squeeze(0)) * window.strides[axis] - begin
    places = starts.unsqueeze(1) + body.ints(range(0, window.widths[axis], window.dilations[axis]))
    size = sizes.slice(*here)
    if not call.get("count_include_pad", 0):
        inside = (places < size) & ~(places < 0)
    elif window.end is None:  # the padding ends with the last window
        inside = places < places + 1
    else:
        inside = places < size + window.end[axis]
    return inside.cast(TensorProto.FLOAT).sum([1], keepdims=False)


ROI, SCALES = 2, 3  # indices of inputs
FORM = [name for name in ATTRIBUTES if name not in ("axes", "keep_aspect_ratio_policy")]  # of one axis
ANTIALIAS_FROM = 18  # the first opset whose Resize has it


@lowers("ResizeGrad")
def resize_grad(call: Call, dx: Value, x: Value) -> Results:
    """dx = matrix @ dy along each axis."""
    rank = len(call.input_shapes[1] or call.input_shapes[0] or ())
    if not rank:
        raise NoForm("the graph does not tell the rank of its input X")
    axes = [axis % rank for axis in call.get("axes") or range(rank)]
    for axis in sorted(axes, reverse=True):
        dx = _resized(call, dx, axes, axis, rank)
    return dx


def _resized(call: Call, dx: Value, axes: list[int], axis: int, rank: int) -> Value:
    """The product along one axis, whose matrix is a constant if the graph tells sizes, scales and region."""
    body, place, count = call.body, axes.index(axis), len(axes)
    attributes = {name: call.get(name, default) for name, default in ATTRIBUTES.items() if name != "axes"}
    new, size = (shape[axis] if shape else None for shape in call.input_shapes[:2])
    scales, roi = (_told(call, index) for index in (SCALES, ROI))
    if new is not None and size is not None and scales is not None and roi is not None:
        given = {"scales": scales[place : place + 1], "roi": (*roi[place : place + 1], *roi[place + count :][:1])}
        found = resized_axes("ResizeGrad", (size,), (new,), {**attributes, **given, "axes": ()})
        matrix = body.constant(found[0].matrix().T).like(dx) if found else None
        return dx if matrix is None else _along(dx, matrix, call.required(1), axis, rank)
    if scales and scales[place] == 1:
        return dx
    if attributes["keep_aspect_ratio_policy"] != "stretch":
        raise NoForm("with its keep_aspect_ratio_policy it needs sizes that the graph tells")
    if TensorProto.DOUBLE in call.input_types[:2] and attributes["mode"] != "nearest":
        raise NoForm("in float64 it needs sizes that the graph tells, because runtimes resize in float32")

    def resized(inner: Body, value: Value) -> list[Value]:
        own = replace(call, body=inner, inputs=[each and inner.outer(each) for each in call.inputs])
        return [_along(value, _at_run_time(own, axes, axis), own.required(1), axis, rank)]

    if scales:
        return resized(body, dx)[0]
    # A loop of one iteration or none: an axis that is not resized, such as that of images, costs no product.
    before, after = (each.shape(axis, axis + 1) for each in call.operands(2))
    same = before.equals(after)
    if scales is None:
        same = same & call.required(SCALES).slice(place, place + 1).equals(1)
    return body.loop((~same).cast(TensorProto.INT64).scalar(), [dx], resized)[0]


def _told(call: Call, index: int) -> tuple[float, ...] | None:
    """The scales or the region; () if there are none or they are not read, None if they are computed at run time."""
    if call.input(index) is None or (index == ROI and not _crops(call)):
        return ()
    known = call.constant(index)
    return () if 0 in (call.input_shapes[index] or [1]) else None if known is None else tuple(known.tolist())


def _crops(call: Call) -> bool:
    """Whether the region of interest is read."""
    return bool(call.get("coordinate_transformation_mode", "") == "tf_crop_and_resize")


def _at_run_time(call: Call, axes: list[int], axis: int) -> Value:
    """The matrix for a size that is known when the graph runs: the operator there, applied to unit vectors.

    These are images of one row, which becomes two: onnxruntime copies what keeps its shape, whatever the scales are.
    """
    dy, x = call.operands(2)
    body, place, count = call.body, axes.index(axis), len(axes)
    size, new = x.shape(axis, axis + 1), dy.shape(axis, axis + 1)
    low, high, row = (body.constant(np.array(each, np.float32)) for each in ([0] * 3, [1] * 3, [1, 1, 2]))
    first, last = low.slice(0, 1), high.slice(0, 1)
    if (roi := call.input(ROI)) is not None and _crops(call):
        first, last = (roi.slice(each, each + 1).cast(TensorProto.FLOAT) for each in (place, place + count))
    targets: list[Value | None] = [None, body.concat(size, body.ints([1, 2]), new)]
    if (scales := call.input(SCALES)) is not None and _told(call, SCALES) != ():
        targets = [body.concat(row, scales.slice(place, place + 1)), None]
    one = body.constant(np.ones((), np.float32))  # of a type in which every runtime has the operator
    units = one.expand(body.concat(size, size)).apply("EyeLike").unsqueeze(1, 2)
    form = {name: each for name, each in call.given(*FORM).items() if each != ATTRIBUTES[name]}
    if "antialias" in form and body.opset < ANTIALIAS_FROM:
        raise NoForm(f"antialias needs opset {ANTIALIAS_FROM} of ai.onnx where the graph tells no sizes")
    rows = body.node("Resize", units, body.concat(low, first, high, last), *targets, **form)
    return rows.slice(0, 1, 2).squeeze(1, 2).like(dy)


def _along(value: Value, matrix: Value, x: Value, axis: int, rank: int) -> Value:
    """matrix @ value, along one axis; what lies behind it has the sizes of x already."""
    body = value.body
    if axis == rank - 1:
        return body.node("MatMul", value, matrix.transpose(1, 0))
    if axis == rank - 2:
        return body.node("MatMul", matrix, value)
    new = matrix.shape(1, 2)
    flat = value.reshape(body.concat(body.ints([-1]), new, x.shape(axis + 1).product()))
    before = [value.shape(0, axis)] if axis else []
    return body.node("MatMul", matrix, flat).reshape(body.concat(*before, x.shape(axis)))
