"""Common subexpression elimination: equal nodes are computed once, and equal constants are stored once."""

import hashlib
from collections.abc import Hashable

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.batch_norm import trains
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of
from opgrad.onnx.graph.nodes import subgraphs

LARGEST_SHARED = 1 << 16  # the most bytes of a constant that is compared with others


def share_nodes(graph: Graph) -> bool:
    """Keep only the first of nodes with the same operator, attributes and inputs."""
    first: dict[Hashable, onnx.NodeProto] = {}
    changed = False
    for node in list(graph.nodes()):
        if is_repeatable(node):
            own = first.setdefault(_key(node), node)
            changed |= own is not node and _merge(graph, own, node)
    return changed


def is_repeatable(node: onnx.NodeProto) -> bool:
    """Whether a node always gives the same results for the same inputs."""
    known = domain_of(node) in ("", MICROSOFT) and not facts_of(node).once
    trains = node.op_type == "BatchNormalization" and len(node.output) > 1
    return known and not trains and not any(subgraphs(node))


def _key(node: onnx.NodeProto) -> Hashable:
    attributes = sorted(each.SerializeToString(deterministic=True) for each in node.attribute)
    inputs = list(node.input)
    while inputs and not inputs[-1]:
        inputs.pop()
    return domain_of(node), node.op_type, tuple(inputs), tuple(attributes)


def _merge(graph: Graph, own: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    """Replace `node` by `own`, which computes the same; False if a result of it has a name that must stay."""
    if graph.kept.intersection(node.output):
        return False
    for place, name in enumerate(node.output):
        if name:
            _result(graph, own, place, name)
    graph.substitute(node, [])
    return True


def _result(graph: Graph, own: onnx.NodeProto, place: int, name: str) -> None:
    """Let the readers of a value read a result of `own` instead; an optional result that it lacks is added."""
    own.output.extend([""] * (place + 1 - len(own.output)))
    if own.output[place]:
        graph.alias(name, own.output[place])
    else:
        own.output[place] = graph.free(name)
        graph.producers[own.output[place]] = own
        graph.declare_like(own.output[place], name)
        graph.alias(name, own.output[place])


def share_constants(graph: Graph) -> bool:
    """Keep only the first of equal initializers that are no parameters."""
    first: dict[Hashable, str] = {}
    changed = False
    own_state = {name for node in graph.nodes() if _keeps_state(graph, node) for name in node.input}
    for tensor in list(graph.graph.initializer):
        if (
            tensor.name in graph.kept
            or tensor.name in own_state
            or uses_external_data(tensor)
            or tensor.ByteSize() > LARGEST_SHARED
        ):
            continue
        own = first.setdefault(_content(tensor), tensor.name)
        if own != tensor.name and tensor.name in graph.readers:
            graph.alias(tensor.name, own)
            changed = True
    return changed


def _keeps_state(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node writes into its inputs, or will do so in the training graph."""
    if domain_of(node):
        return facts_of(node).once
    return node.op_type == "BatchNormalization" and trains(node, graph.opset)


def _content(tensor: onnx.TensorProto) -> Hashable:
    if tensor.HasField("raw_data"):
        return tensor.data_type, tuple(tensor.dims), hashlib.sha256(tensor.raw_data).digest()
    bare = copied(tensor)
    bare.name = bare.doc_string = ""
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()
