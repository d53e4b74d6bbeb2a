"""Softmax cross-entropy: recognized in a graph, joined with its gradient, and written as opgrad's operator."""

import onnx
from onnx import helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, declared_types, domain_of, import_microsoft
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.passes.patterns import at_each

ONE_AXIS_FROM = 13  # before this opset LogSoftmax takes all axes from `axis` on together as one row
CLASSES = 1  # the axis of the classes
LOSS, LOSS_GRADIENT = "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad"
LOSS_AND_GRADIENT = "SoftmaxCrossEntropyLossAndGrad"
DEFAULTS = {"reduction": "mean", "ignore_index": -1}  # opgrad's defaults for the loss and for its gradient


# --- before differentiation ---


@at_each("NegativeLogLikelihoodLoss")
def fuse_cross_entropy(graph: Graph, node: onnx.NodeProto) -> bool:
    """Fuse LogSoftmax and NegativeLogLikelihoodLoss into SoftmaxCrossEntropyLoss.

    The result of LogSoftmax becomes the second result of the fused node.
    """
    softmax = graph.maker(node.input[0], "LogSoftmax")
    if softmax is None or not _is_over_classes(graph, softmax) or len(graph.readers[softmax.output[0]]) > 1:
        return False  # of another axis, or another node reads the log-probabilities, too
    _write(graph, softmax, node)
    return True


def _is_over_classes(graph: Graph, softmax: onnx.NodeProto) -> bool:
    sizes = graph.sizes(softmax.input[0])
    if sizes is None or len(sizes) < 2:
        return False
    early = graph.opset < ONE_AXIS_FROM
    axis = attributes_of(softmax).get("axis", 1 if early else -1) % len(sizes)
    return axis == CLASSES and (not early or len(sizes) == 2)


def _write(graph: Graph, softmax: onnx.NodeProto, node: onnx.NodeProto) -> None:
    inputs = [softmax.input[0], *list(node.input)[1:]]
    outputs = [node.output[0], softmax.output[0]]
    if softmax.output[0] not in graph.kept:
        outputs[1] = graph.free(f"{node.output[0]}_log_prob")
        graph.declare_like(outputs[1], softmax.output[0])
    else:
        graph.substitute(softmax, [])
    fused = helper.make_node(LOSS, inputs, outputs, node.name)
    fused.attribute.extend(node.attribute)
    graph.substitute(node, [fused])


# --- in training graphs ---


def fuse_with_gradient(graph: Graph, node: onnx.NodeProto) -> bool:
    """Fuse SoftmaxCrossEntropyLoss and its gradient into one node, which reads the logits once; whether it may be.

    Only that gradient may read the log-probabilities, and the gradient of the loss itself has to be 1.
    """
    gradient = _gradient(graph, node)
    if gradient is None:
        return False
    outputs = [node.output[0], gradient.output[0]]
    fused = graph.node(LOSS_AND_GRADIENT, list(node.input), outputs, MICROSOFT, **DEFAULTS | attributes_of(node))
    graph.substitute(gradient, [])
    graph.substitute(node, [fused])
    return True


def _gradient(graph: Graph, loss: onnx.NodeProto) -> onnx.NodeProto | None:
    """The gradient node of a loss, if it is the only reader of the log-probabilities and its dy is 1; else None."""
    log_prob = loss.output[1] if len(loss.output) > 1 else ""
    if not log_prob or not graph.inner(log_prob):
        return None
    (node,) = graph.readers[log_prob]
    named = node.op_type == LOSS_GRADIENT and domain_of(node) == MICROSOFT
    if not named or node.input[1] != log_prob or list(node.input)[2:] != list(loss.input)[1:]:
        return None
    alike = DEFAULTS | attributes_of(node) == DEFAULTS | attributes_of(loss)
    return node if alike and graph.scalar(node.input[0]) == 1.0 else None


def use_internal_losses(model: onnx.ModelProto) -> None:
    """Replace SoftmaxCrossEntropyLoss by SoftmaxCrossEntropyLossInternal, for which opgrad has a kernel.

    onnxruntime expands the node into ten others. If the node has no `ignore_index`, these take a label of -1 for the
    last class, whereas the original kernels and opgrad's, which compute the gradient, ignore it.
    """
    declared = declared_types(model.graph)
    for node in model.graph.node:
        is_loss = node.op_type == LOSS and not domain_of(node)
        if is_loss and node.output and node.output[0] in declared:
            _make_internal(model.graph, node, declared)
    import_microsoft(model)


def _make_internal(graph: onnx.GraphProto, node: onnx.NodeProto, declared: dict[str, onnx.TypeProto]) -> None:
    loss = node.output[0]
    if len(node.output) < 2 or not node.output[1]:
        del node.output[1:]
        node.output.append(f"{loss}.log_prob")
    log_prob = node.output[1]
    if log_prob not in declared:
        kind = declared[loss].tensor_type.elem_type
        graph.value_info.append(helper.make_tensor_value_info(log_prob, kind, None))
    for item in list(node.attribute):
        if item.name == "ignore_index":
            constant = helper.make_tensor(f"{loss}.ignore_index", onnx.TensorProto.INT64, (), [item.i])
            graph.initializer.append(constant)
            node.input.extend([""] * (3 - len(node.input)))
            node.input.append(constant.name)
            node.attribute.remove(item)
    node.op_type, node.domain = "SoftmaxCrossEntropyLossInternal", MICROSOFT
