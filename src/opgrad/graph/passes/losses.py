"""Recognition of softmax cross-entropy."""

import onnx
from onnx import helper

from opgrad.graph.graph import Graph
from opgrad.graph.messages import domain_of
from opgrad.graph.nodes import attributes_of

ONE_AXIS_FROM = 13  # before this opset LogSoftmax takes all axes from `axis` on together as one row
CLASSES = 1  # the axis of the classes


def fuse_cross_entropy(graph: Graph) -> bool:
    """Fuse LogSoftmax and NegativeLogLikelihoodLoss into SoftmaxCrossEntropyLoss.

    The result of LogSoftmax becomes the second result of the fused node.
    """
    changed = False
    for node in list(graph.nodes()):
        if domain_of(node) or node.op_type != "NegativeLogLikelihoodLoss":
            continue
        softmax = graph.maker(node.input[0], "LogSoftmax")
        if softmax is not None and _is_over_classes(graph, softmax) and _may_move(graph, softmax):
            _write(graph, softmax, node)
            changed = True
    return changed


def _is_over_classes(graph: Graph, softmax: onnx.NodeProto) -> bool:
    sizes = graph.sizes(softmax.input[0])
    if sizes is None or len(sizes) < 2:
        return False
    early = graph.opset < ONE_AXIS_FROM
    axis = attributes_of(softmax).get("axis", 1 if early else -1) % len(sizes)
    return axis == CLASSES and (not early or len(sizes) == 2)


def _may_move(graph: Graph, softmax: onnx.NodeProto) -> bool:
    """Whether the log-probabilities may be computed by the loss node: no node but the loss reads them."""
    readers = graph.readers[softmax.output[0]]
    return len(readers) == 1


def _write(graph: Graph, softmax: onnx.NodeProto, node: onnx.NodeProto) -> None:
    inputs = [softmax.input[0], *list(node.input)[1:]]
    outputs = [node.output[0], softmax.output[0]]
    if softmax.output[0] not in graph.kept:
        outputs[1] = graph.free(f"{node.output[0]}_log_prob")
        graph.declare_like(outputs[1], softmax.output[0])
    else:
        graph.substitute(softmax, [])
    fused = helper.make_node("SoftmaxCrossEntropyLoss", inputs, outputs, node.name)
    fused.attribute.extend(node.attribute)
    graph.substitute(node, [fused])
