"""Normalizations."""

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.conversion import trains
from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.sizes import are_equal, known
from opgrad.onnx.rules.node import (
    Gradients,
    Node,
    NoGradient,
    gradient,
    numbers_of,
    ratio,
    reshape_like,
    sizes_of,
    unbroadcast,
)


def _gradients(node: Node, op: str, *statistics: Value) -> list[Value]:
    """The gradients of x, scale and bias by an operator, which takes a scale in the shape of the normalized axes.

    ONNX allows any scale that broadcasts to this shape.
    """
    axis, given = node.get("axis", -1) % node.rank(), [each for each in node.inputs[1:] if each is not None]
    scale, sizes, own = given[0], sizes_of(node.x)[axis:], known(given[0].sizes)
    if max(len(each.sizes or ()) for each in given) > len(sizes):
        dx, *sums = _gradients_by_rows(node.wide(), op, axis, scale, *statistics)
        sizes = sizes_of(node.x)
    else:
        if are_equal(scale.sizes, sizes) or (own is not None and len(own) == len(sizes) and 1 not in own):
            sizes = scale.sizes or ()
        else:
            scale = scale.expand(node.x.shape(axis))
        dx, *sums = node.results(op, 1 + len(statistics), node.dy, node.x, scale, *statistics, axis=axis)
    pairs = zip(sums, given, strict=False)  # RMS normalization has no bias
    return [dx, *(unbroadcast(each, node.with_sizes(each, sizes), target) for each, target in pairs)]


def _gradients_by_rows(node: Node, op: str, axis: int, scale: Value, *statistics: Value) -> list[Value]:
    """Those where scale and bias have further axes, before they are summed: y = n * scale + bias, n by a scale of 1."""
    ones, axes = node.body.full(node.x.shape(axis), 1, node.x), range(axis, node.rank())
    dn = node.dy * scale.like(node.dy)
    dx, *_ = node.results(op, 1 + len(statistics), dn, node.x, ones, *statistics, axis=axis)
    n = node.x - node.x.mean(*axes) if len(statistics) > 1 else node.x  # the node's statistics have various types
    n = n / ((n * n).mean(*axes) + node.get("epsilon", 1e-5)).apply("Sqrt")
    return [dx, node.dy * n, node.dy]


@gradient("LayerNormalization")
def layer_normalization(node: Node) -> Gradients:
    """dx = inv_std * (g - mean(g) - n * mean(g * n)), g = dy * scale, n the normalized x."""
    dtype = node.get("stash_type", TensorProto.FLOAT) if node.x.element_type != TensorProto.DOUBLE else None
    mean, inv_std = (node.output(index, suffix, dtype) for index, suffix in ((1, "_mean"), (2, "_inv_std")))
    dx, *others = _gradients(node, "LayerNormalizationGrad", mean, inv_std)
    return [_with_statistics(node, dx, 1, 2), *others]


def _with_statistics(node: Node, dx: Value, *places: int) -> Value:
    """dx plus the gradients that come through the outputs inv_std and mean. places: [mean,] inv_std."""
    *means, d_inv_std = [node.dys[index] if index < len(node.dys) else None for index in places]
    if d_inv_std is None and means in ([], [None]):
        return dx
    dx, node = widened(dx), node.wide()
    share = ratio(node.output(places[-1]), node.y, dx)
    for d_mean in means:
        dx = dx if d_mean is None else dx + d_mean.like(dx) * share
    if d_inv_std is None:
        return dx
    inv_std = node.output(places[-1]).like(dx)
    centred = node.x - node.output(places[0]).like(dx) if len(places) > 1 else node.x
    return dx - d_inv_std.like(dx) * inv_std * inv_std * inv_std * centred * share


@gradient("SimplifiedLayerNormalization")
def simplified_layer_normalization(node: Node) -> Gradients:
    """dx = inv_std * (g - n * mean(g * n)), g = dy * scale, n = x * inv_std."""
    inv_std = node.output(1, "_inv_std", TensorProto.FLOAT)
    dx, dscale = _gradients(node, "SimplifiedLayerNormalizationGrad", inv_std)
    return [_with_statistics(node, dx, 1), dscale]


@gradient("RMSNormalization")
def rms_normalization(node: Node) -> Gradients:
    """dx = inv_std * (g - n * mean(g * n)), n = x * inv_std, inv_std = 1 / sqrt(mean(x * x) + epsilon)."""
    axis = node.get("axis", -1) % node.rank()
    wide = node.wide().x
    inv_std = 1 / ((wide * wide).mean(*range(axis, node.rank())) + node.get("epsilon", 1e-5)).apply("Sqrt")
    return _gradients(node, "SimplifiedLayerNormalizationGrad", inv_std)


@gradient("LpNormalization")
def lp_normalization(node: Node) -> Value:
    """dx = (dy - s * sum(dy * y)) / norm, s = y for p = 2 and sign(x) for p = 1; 0 where the norm is 0."""
    node = node.wide()
    axis, p = node.get("axis", -1), node.get("p", 2)
    norm = node.x.along("ReduceL2" if p == 2 else "ReduceL1", [axis % node.rank()], keepdims=1)
    zero = norm.equals(0)
    y = node.where(zero, 0, node.x / node.where(zero, 1, norm))
    dx = node.dy - (y if p == 2 else node.x.apply("Sign")) * (node.dy * y).sum([axis % node.rank()])
    return node.where(zero, 0, dx / node.where(zero, 1, norm))


@gradient("MeanVarianceNormalization")
def mean_variance_normalization(node: Node) -> Value:
    """dx = (dy - mean(dy) - c * mean(dy * c) / (s * (s + 1e-9))) / (s + 1e-9), c = x - mean(x), s its deviation."""
    node = node.wide()
    axes = [axis % node.rank() for axis in node.get("axes") or (0, 2, 3)]
    c = node.x - node.x.mean(*axes)
    s = (c * c).mean(*axes).apply("Sqrt")
    bottom = s + 1e-9
    through = c * ((node.dy * c).mean(*axes) / (node.where(s > 0, s, 1) * bottom))
    return (node.dy - node.dy.mean(*axes) - through) / bottom


def _normalized(node: Node, x: Value, axes: Sequence[int]) -> tuple[Value, Callable[[Value], Value]]:
    """n, x without its mean, divided by its deviation along axes; and its gradient, a function of that of n."""
    centred = x - x.mean(*axes)
    inv_std = 1 / ((centred * centred).mean(*axes) + node.get("epsilon", 1e-5)).apply("Sqrt")
    n = centred * inv_std
    return n, lambda g: inv_std * (g - g.mean(*axes) - n * (g * n).mean(*axes))


@gradient("InstanceNormalization")
def instance_normalization(node: Node) -> Gradients:
    """dx = inv_std * (g - mean(g) - n * mean(g * n)), g = dy * scale, the means over each channel of each row."""
    node = node.wide()
    x, dy = node.x, node.dy
    axes = list(range(2, node.rank()))
    column = node.required(1).reshape([-1, *(1 for _ in axes)])
    n, gradient_of = _normalized(node, x, axes)
    return [gradient_of(dy * column), *(each.sum([0, *axes], keepdims=False) for each in (dy * n, dy))]


@gradient("GroupNormalization")
def group_normalization(node: Node) -> Gradients:
    """dx = inv_std * (g - mean(g) - n * mean(g * n)), g = dy * scale of groups (opset 18) or channels (21)."""
    node = node.wide()
    x, groups = node.x, node.get("num_groups")
    if groups is None:
        raise NoGradient("it has no attribute num_groups")
    scale = node.required(1)
    n, gradient_of = _normalized(node, x.reshape([0, groups, -1]), [2])
    parts = numbers_of(x, 1)[0] // groups  # how many channels a group has
    dy, n4 = (each.reshape([0, groups, parts, -1]) for each in (node.dy, n))
    g = (dy * scale.reshape([1, groups, -1, 1])).reshape([0, groups, -1])
    axes = [0, 3] if sizes_of(scale)[0] != groups or parts == 1 else [0, 2, 3]
    sums = (reshape_like(each.sum(axes, keepdims=False), scale) for each in (dy * n4, dy))
    return [reshape_like(gradient_of(g), x), *sums]


@gradient("LRN")
def lrn(node: Node) -> Value:
    """dx = dy * d**-beta - 2 * alpha * beta / size * x * window(dy * x * d**(-beta - 1)), d as in y = x * d**-beta."""
    node = node.wide()
    x, dy, size = node.x, node.dy, node.get("size")
    alpha, beta, bias = node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    below, above = (size - 1) // 2, size // 2
    d = _window_mean(x * x, node, below, above) * alpha + bias
    inner = dy * x * d ** (-beta - 1)
    return dy * d ** (-beta) - x * _window_mean(inner, node, above, below) * (2 * alpha * beta)


def _window_mean(values: Value, node: Node, below: int, above: int) -> Value:
    """For each channel the sum over the channels from `below` before to `above` behind it, divided by `size`."""
    body, size = node.body, node.get("size")
    columns = values.in_shape(body.concat(node.x.shape(0, 2), node.x.shape(2).product()))
    image = columns.unsqueeze(1)
    pooled = body.node("AveragePool", image, kernel_shape=[size, 1], pads=[below, 0, above, 0], count_include_pad=1)
    return reshape_like(pooled, node.x)


@gradient("BatchNormalization", constant=(3, 4))
def batch_normalization(node: Node) -> Gradients:
    """dx = scale * inv_std * (dy - mean(dy) - n * mean(dy * n)); with given statistics dx = dy * scale * inv_std."""
    if not trains(node.proto, node.opset):
        return _of_given_statistics(node)
    epsilon, momentum = node.get("epsilon", 1e-5), node.get("momentum", 0.9)
    node.become("BatchNormInternal", MICROSOFT, epsilon=epsilon, momentum=momentum, training_mode=1)
    return batch_norm_internal(node)


@gradient("BatchNormInternal", "BatchNormTraining", domain=MICROSOFT, constant=(3, 4))
def batch_norm_internal(node: Node) -> Gradients:
    """dx = scale * inv_std * (dy - mean(dy) - n * mean(dy * n)), n = (x - mean) * inv_std."""
    if not node.get("training_mode", 1):
        return _of_given_statistics(node)
    if any(dy is not None for dy in node.dys[1:]):
        raise NoGradient("what is differentiated depends on its running statistics, expected on its first output alone")
    dtype = node.required(3).element_type
    suffixes = ("_running_mean", "_running_var", "_saved_mean", "_saved_inv_std")
    mean, inv_std = [node.output(index, suffix, dtype) for index, suffix in enumerate(suffixes, 1)][2:]
    epsilon = node.get("epsilon", 1e-5)
    return node.results("BatchNormalizationGrad", 3, node.dy, node.x, node.required(1), mean, inv_std, epsilon=epsilon)


def _of_given_statistics(node: Node) -> Gradients:
    node = node.wide()
    x, scale, _, mean, variance = (node.required(index) for index in range(5))
    shape = [1, -1, *(1 for _ in range(node.rank() - 2))]
    axes = [axis for axis in range(node.rank()) if axis != 1]
    mean, variance, factor = (each.like(x) for each in (mean, variance, scale))
    inv_std = 1 / (variance + node.get("epsilon", 1e-5)).apply("Sqrt")
    n = (x - mean.reshape(shape)) * inv_std.reshape(shape)
    dscale, dbias = (each.sum(axes, keepdims=False) for each in (node.dy * n, node.dy))
    return [node.dy * (factor * inv_std).reshape(shape), dscale, dbias]


@gradient("Dropout", constant=(1, 2))
def dropout(node: Node) -> Value:
    """dx = dy / (1 - ratio) where kept; dy if it does not train."""
    training = node.constant(2)
    if node.input(2) is None or (training is not None and not np.any(training)):
        return node.dy
    mask = node.output(1, "_mask", TensorProto.BOOL)
    return node.microsoft("DropoutGrad", node.dy, mask, node.input(1), node.input(2))


@gradient("DropoutTraining", domain=MICROSOFT, constant=(1, 2, 3))
def dropout_training(node: Node) -> Value:
    """dx = dy / (1 - ratio) where kept."""
    mask = node.output(1, "_mask", TensorProto.BOOL)
    return node.microsoft("DropoutGrad", node.dy, mask, node.input(2), node.input(3))
