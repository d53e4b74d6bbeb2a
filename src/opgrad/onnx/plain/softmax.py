"""Gradients of softmax, log-softmax and dropout, softmax with a bias, and dropout behind softmax.

Masks of dropout are those that the forward graph has drawn.
"""

import numpy as np

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.node_view import biased_softmax
from opgrad.onnx.plain.registry import Call, Results, lowers

RATIO = 0.5  # where the node has no ratio


def _softmax_grad(dy: Value, y: Value, axis: int) -> Value:
    """y * (dy - sum(y * dy)), along one axis."""
    return y * (dy - (y * dy).sum([axis]))


def _log_softmax_grad(dy: Value, y: Value, axis: int) -> Value:
    return dy - y.apply("Exp") * dy.sum([axis])


@lowers("SoftmaxGrad_13")
def softmax_grad_13(call: Call) -> Value:
    """dx = y * (dy - sum(y * dy)), along one axis."""
    dy, y = call.operands(2)
    return _softmax_grad(dy, y, call.get("axis", -1))


@lowers("LogSoftmaxGrad_13")
def log_softmax_grad_13(call: Call) -> Value:
    """dx = dy - exp(y) * sum(dy), along one axis."""
    dy, y = call.operands(2)
    return _log_softmax_grad(dy, y, call.get("axis", -1))


@lowers("SoftmaxGrad")
def softmax_grad(call: Call) -> Value:
    """dx = y * (dy - sum(y * dy)), over the axes from `axis` on."""
    dy, y = call.operands(2)
    axis = call.get("axis", 1)
    return _softmax_grad(dy.flatten(axis), y.flatten(axis), 1).reshape(dy.shape())


@lowers("LogSoftmaxGrad")
def log_softmax_grad(call: Call) -> Value:
    """dx = dy - exp(y) * sum(dy), over the axes from `axis` on."""
    dy, y = call.operands(2)
    axis = call.get("axis", 1)
    return _log_softmax_grad(dy.flatten(axis), y.flatten(axis), 1).reshape(dy.shape())


@lowers("BiasSoftmax")
def bias_softmax(call: Call) -> Value:
    """y = softmax(x + bias), over the axes from `axis` on."""
    return biased_softmax(call)


# --- dropout ---


def _through_mask(call: Call, dy: Value, mask: Value, ratio: Value | None) -> Value:
    """dy / (1 - ratio) where the element was kept, which all were if the ratio is 0."""
    if ratio is None:
        return call.body.where(mask, dy / (1 - RATIO), 0)
    ratio = ratio.scalar()
    return call.body.where(mask | ratio.equals(0), dy / (1 - ratio.like(dy)), 0)


@lowers("DropoutGrad")
def dropout_grad(call: Call) -> Value:
    """dx = dy / (1 - ratio) where kept; dy itself if the forward node was not training."""
    dy, mask = call.operands(2)
    dx = _through_mask(call, dy, mask, call.input(2))
    training = call.input(3)
    return dx if training is None else call.body.where(training.scalar(), dx, dy)


@lowers("BiasSoftmaxDropout")
def bias_softmax_dropout(call: Call) -> Results:
    """dropout(y), its mask, and y = softmax(x + bias) over the axes from `axis` on."""
    x, bias = call.operands(2)
    y = (x + bias).flatten(call.get("axis", 1)).apply("Softmax", axis=1).reshape(x.shape())
    seed = {"seed": call.get("seed")} if call.get("seed") is not None else {}
    ratio, training = call.input(2), call.body.constant(np.array(True))
    rate = None if ratio is None else ratio.scalar()
    dropped, mask = call.body.nodes_of("Dropout", 2, y, rate, training, **seed)
    return dropped, mask, y


@lowers("SoftmaxDropoutGrad")
def softmax_dropout_grad(call: Call) -> Value:
    """The gradient of dropout(softmax(x)), the softmax over the axes from `axis` on."""
    dy, mask, y = call.operands(3)
    axis = call.get("axis", 1)
    inner = _through_mask(call, dy, mask, call.input(3))
    return _softmax_grad(inner.flatten(axis), y.flatten(axis), 1).reshape(dy.shape())
