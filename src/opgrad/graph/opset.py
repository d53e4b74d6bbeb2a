"""Walks over the nodes of a model, and raises the opset of ai.onnx that it imports."""

from collections.abc import Iterable, Iterator, Mapping

import onnx

from opgrad.graph.conversion import converted

LEAST = 16  # the first opset whose ScatterND and ScatterElements can add
LAYER_NORMALIZATION = 17  # the first opset with LayerNormalization, which onnxruntime-training wrote into older ones
# Between these opsets only types were added, except to the operators below.
UNCHANGED_FROM, UNCHANGED_TO = 13, 17


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def captured(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads: its inputs, and the values that its subgraphs read from outside."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {each.name for each in (*graph.input, *graph.initializer)}
        own |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in captured(inner) if name not in own)
        yield from (each.name for each in graph.output if each.name not in own)


def rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Let a node and its subgraphs read other values; names: from old to new ones."""
    if not names.keys().isdisjoint(node.input):
        node.input[:] = [names.get(each, each) for each in node.input]
    for graph in subgraphs(node):
        for inner in graph.node:
            rename_inputs(inner, names)
        for value in graph.output:
            value.name = names.get(value.name, value.name)


def raise_opset(model: onnx.ModelProto, least: int = LEAST, who: str = "lower") -> None:
    """Convert a model, in place, so that it imports at least opset `least` of ai.onnx. who: the caller, for messages.

    From opset 13 to 17 its operators mean the same, except RoiAlign and a training BatchNormalization; onnx's converter
    rewrites models with those, models of older opsets, and models for newer ones.
    Raises NotImplementedError where the converter cannot.
    """
    entry = next((each for each in model.opset_import if each.domain in ("", "ai.onnx")), None)
    if entry is None:
        model.opset_import.append(onnx.helper.make_opsetid("", least))
        return
    plain = [node for node in all_nodes(model.graph.node) if node.domain in ("", "ai.onnx")]
    normalized = any(node.op_type == "LayerNormalization" for node in plain)
    wanted = max(entry.version, LAYER_NORMALIZATION if normalized and least == LEAST else least)
    if entry.version == wanted:
        return
    changed = any(
        node.op_type == "RoiAlign" or (node.op_type == "BatchNormalization" and len(node.output) > 1) for node in plain
    )
    if entry.version < UNCHANGED_FROM or wanted > UNCHANGED_TO or (changed and entry.version < 14):
        _convert(model, entry.version, wanted, who)
    else:
        entry.version = wanted


def _convert(model: onnx.ModelProto, version: int, wanted: int, who: str) -> None:
    try:
        model.CopyFrom(converted(model, version, wanted))
    except Exception as error:
        raise NotImplementedError(
            f"{who}: the model imports opset {version} of ai.onnx, and onnx cannot convert it to {wanted}: {error}"
        ) from error
