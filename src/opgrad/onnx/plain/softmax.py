"""Gradients of softmax and log-softmax, and softmax with a bias."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.node_view import biased_softmax
from opgrad.onnx.plain.registry import Call, lowers


def softmax_grad_along(dy: Value, y: Value, axis: int) -> Value:
    """y * (dy - sum(y * dy)), along one axis."""
    return y * (dy - (y * dy).sum([axis]))


def _log_softmax_grad(dy: Value, y: Value, axis: int) -> Value:
    return dy - y.apply("Exp") * dy.sum([axis])


@lowers("SoftmaxGrad_13")
def softmax_grad_13(call: Call) -> Value:
    """dx = y * (dy - sum(y * dy)), along one axis."""
    dy, y = call.operands(2)
    return softmax_grad_along(dy, y, call.get("axis", -1))


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
    return softmax_grad_along(dy.flatten(axis), y.flatten(axis), 1).reshape(dy.shape())


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


def softmax_from(x: Value, axis: int) -> Value:
    """Softmax over the axes from `axis` on; the result has two axes."""
    return x.flatten(axis).apply("Softmax", axis=1)
