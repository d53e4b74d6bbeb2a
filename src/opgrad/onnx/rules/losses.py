"""Losses."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, NoGradient, gradient


@gradient("SoftmaxCrossEntropyLoss", constant=(1, 2))
def softmax_cross_entropy_loss(node: Node) -> Gradients:
    """dscores = weight * dy * (exp(log_prob) - onehot(label)) / sum of weights, and what log_prob's gradient gives."""
    log_prob = node.output(1, "_log_prob")
    given = {name: value for name, value in node.attributes.items() if name in ("reduction", "ignore_index")}
    dx = None
    if node.dys[0] is not None:
        dx = node.microsoft("SoftmaxCrossEntropyLossGrad", node.dy, log_prob, node.required(1), node.input(2), **given)
    return _with_log_prob(node, dx, log_prob)


@gradient("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT, constant=(1, 2, 3))
def softmax_cross_entropy_loss_internal(node: Node) -> Gradients:
    """dscores as of SoftmaxCrossEntropyLoss; the class to ignore is an input, the results may have another type."""
    log_prob, dx = node.output(1, "_log_prob"), None
    dtype = {"output_type": node.x.element_type or TensorProto.FLOAT} if "output_type" in node.attributes else {}
    if node.dys[0] is not None:
        op, reduction = "SoftmaxCrossEntropyLossInternalGrad", node.get("reduction", "mean")
        dx = node.microsoft(op, node.dy, log_prob, *node.inputs[1:], reduction=reduction, **dtype)
    return _with_log_prob(node, dx, log_prob)


@gradient("LinearCrossEntropyLoss", domain=MICROSOFT, constant=(2, 3, 4, 5))
def linear_cross_entropy_loss(node: Node) -> Gradients:
    """dx = dy times the gradient that the forward node leaves, so that no logits are computed a second time."""
    if node.needed != {0}:
        raise NoGradient("its weights are trained; write it as a product and SoftmaxCrossEntropyLoss")
    node.become("LinearCrossEntropyLossAndGrad", MICROSOFT, **node.attributes)
    dx = node.output(1, "_dx", node.x.element_type)
    node.forward.declare(dx.name, node.x.element_type or TensorProto.FLOAT, node.x.sizes)
    dy = node.dy.like(dx)
    return [dx * (dy.unsqueeze(-1) if node.get("reduction", "mean") == "none" else dy)]


@gradient("SoftmaxCrossEntropy", domain=MICROSOFT, constant=(1,))
def softmax_cross_entropy(node: Node) -> Value:
    """dlogits = dy * (exp(log_prob) - labels) / number of samples, for labels that are probabilities."""
    return _of_rows(node, node.required(1))


@gradient("SparseSoftmaxCrossEntropy", constant=(1, 2))
def sparse_softmax_cross_entropy(node: Node) -> Value:
    """dlogits = weight * dy * (exp(log_prob) - onehot(label)) / sum of weights."""
    return _of_rows(node, node.required(1), node.input(2))


def _of_rows(node: Node, *given: Value | None) -> Value:
    """The gradient of a loss over the last axis; given: labels and weights."""
    if node.dys[1:] != [None] * len(node.dys[1:]):
        raise NoGradient("what is differentiated depends on its second output")
    op, reduction = f"{node.proto.op_type}Grad", node.get("reduction", "mean")
    log_prob = node.output(1, "_log_prob")
    return node.body.node(op, node.dy, log_prob, *given, reduction=reduction, domain=node.proto.domain)


def _with_log_prob(node: Node, dx: Value | None, log_prob: Value) -> Value | None:
    """dx plus the gradient that comes through the second result, the log-probabilities along axis 1."""
    d_log_prob = node.dys[1] if len(node.dys) > 1 else None
    if d_log_prob is None:
        return dx
    through = node.microsoft("LogSoftmaxGrad_13", d_log_prob, log_prob, axis=1)
    return through if dx is None else dx + through
