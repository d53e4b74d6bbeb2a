"""The two modes of batch normalization: by the statistics of the batch in training, by stored ones in evaluation."""

from collections.abc import Iterable, Iterator

import onnx
from onnx import helper

from opgrad.onnx.graph.messages import domain_of, keep, opset_of
from opgrad.onnx.graph.nodes import all_nodes, model_nodes

TRAINING_MODE_FROM = 14  # the first opset whose batch normalization says whether it trains
STATISTICS = (3, 4)  # the places of a batch normalization's mean and variance


def batch_norms(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The batch normalizations of a model."""
    return (node for node in model_nodes(model) if node.op_type == "BatchNormalization" and not domain_of(node))


def trains(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a batch normalization is in training mode and uses the statistics of the batch."""
    if opset < TRAINING_MODE_FROM:
        return len(node.output) > 1
    return any(each.name == "training_mode" and each.i for each in node.attribute)


def freeze(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Set batch normalizations to evaluation mode, in which they use the stored statistics."""
    lost: dict[str, str] = {}
    for node in nodes:
        set_training_mode(node, 0, opset_of(model))
        lost |= {name: node.input[place] for name, place in zip(node.output[1:], STATISTICS, strict=False) if name}
        del node.output[1:]
    _repeat(model.graph, lost)


def set_training_mode(node: onnx.NodeProto, value: int, opset: int) -> None:
    """Set the mode of a batch normalization; in older opsets there is no attribute for it."""
    keep(node.attribute, [each for each in node.attribute if each.name != "training_mode"])
    if opset >= TRAINING_MODE_FROM:
        node.attribute.append(helper.make_attribute("training_mode", value))


def one_output(model: onnx.ModelProto) -> None:
    """Remove the further outputs of batch normalizations in evaluation mode, which ONNX does not allow.

    onnxruntime-training left the outputs with the running statistics if a model was exported in training mode.
    """
    opset = opset_of(model)
    freeze(model, [node for node in batch_norms(model) if len(node.output) > 1 and not trains(node, opset)])


def evaluating(model: onnx.ModelProto) -> None:
    """Set all batch normalizations of an eval model to evaluation mode."""
    opset = opset_of(model)
    freeze(model, [node for node in batch_norms(model) if trains(node, opset)])


def _repeat(graph: onnx.GraphProto, lost: dict[str, str]) -> None:
    """Add Identity nodes for removed outputs that are still read. lost: for each such output the value to copy."""
    read = {name for node in all_nodes(graph.node) for name in node.input} | {each.name for each in graph.output}
    for name, source in lost.items():
        if name in read:
            graph.node.insert(0, helper.make_node("Identity", [source], [name]))


def written_inputs(graph: onnx.GraphProto) -> set[str]:
    """The inputs that a run of a training graph changes: the running statistics of batch normalization."""
    return {name for node in graph.node if node.op_type == "BatchNormInternal" for name in node.input[3:5]}
