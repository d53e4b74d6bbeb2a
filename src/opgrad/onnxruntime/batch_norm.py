"""Batch normalization by the statistics of the batch, in training, or by given ones, in evaluation."""

from collections.abc import Iterable, Iterator

import onnx
from onnx import helper

from opgrad.onnxruntime.messages import domain_of, keep, opset_of
from opgrad.onnxruntime.opset import all_nodes

TRAINING_MODE_FROM = 14  # the first opset whose batch normalization says whether it trains
STATISTICS = (3, 4)  # the places of a batch normalization's mean and variance


def batch_norms(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes that normalize by the statistics of a batch, or by given ones."""
    return (node for node in model_nodes(model) if node.op_type == "BatchNormalization" and not domain_of(node))


def model_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a model and of its functions."""
    yield from all_nodes(model.graph.node)
    for function in model.functions:
        yield from all_nodes(function.node)


def trains(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a batch normalization takes the statistics of the batch."""
    if opset < TRAINING_MODE_FROM:
        return len(node.output) > 1
    return any(each.name == "training_mode" and each.i for each in node.attribute)


def freeze(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Let batch normalizations take the statistics that they are given."""
    lost: dict[str, str] = {}
    for node in nodes:
        set_training_mode(node, 0, opset_of(model))
        lost |= {name: node.input[place] for name, place in zip(node.output[1:], STATISTICS, strict=False) if name}
        del node.output[1:]
    _repeat(model.graph, lost)


def set_training_mode(node: onnx.NodeProto, value: int, opset: int) -> None:
    """Let a batch normalization train or not; older opsets have no attribute for that."""
    keep(node.attribute, [each for each in node.attribute if each.name != "training_mode"])
    if opset >= TRAINING_MODE_FROM:
        node.attribute.append(helper.make_attribute("training_mode", value))


def one_output(model: onnx.ModelProto) -> None:
    """Let batch normalizations in evaluation mode have one output, as ONNX asks of them.

    onnxruntime-training left those with the running statistics behind where a model was exported in training mode.
    """
    opset = opset_of(model)
    freeze(model, [node for node in batch_norms(model) if len(node.output) > 1 and not trains(node, opset)])


def evaluating(model: onnx.ModelProto) -> None:
    """Let all batch normalizations of an eval model be in evaluation mode."""
    opset = opset_of(model)
    freeze(model, [node for node in batch_norms(model) if trains(node, opset)])


def _repeat(graph: onnx.GraphProto, lost: dict[str, str]) -> None:
    """Give values that nothing makes any more those of others, where somebody reads them."""
    read = {name for node in all_nodes(graph.node) for name in node.input} | {each.name for each in graph.output}
    for name, source in lost.items():
        if name in read:
            graph.node.insert(0, helper.make_node("Identity", [source], [name]))
