"""Common subexpression elimination: equal nodes are computed once, and equal constants are stored once."""

import hashlib
from collections.abc import Hashable

import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.batch_norm import trains
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.graph import AMPLIFIED, FOLDED, Graph, constant_tensor, evaluate
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of, names_of
from opgrad.onnx.graph.nodes import subgraphs
from opgrad.onnx.passes.patterns import at_each

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


# --- constants --------------------------------------------------------------------------------------------------------


GROWTH = 1 << 12  # the most bytes by which a folded value may be larger than the constants it is computed from
FOLDABLE = FOLDED | names_of(
    """
    Abs Exp Log Sign Sin Cos Tanh Sigmoid Round GreaterOrEqual LessOrEqual Trilu Tile Split Flatten Clip MatMul Gemm
    CumSum ReduceSum ReduceMax ReduceMin ReduceMean ScatterND ScatterElements GatherND GatherElements OneHot
    CastLike Sum Mean Xor EyeLike ArgMax ArgMin Relu IsNaN IsInf
    """
)


@at_each()
def fold_constants(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace Constant nodes, and nodes whose inputs are all constants, by initializers."""
    if graph.kept.intersection(node.output) or any(subgraphs(node)):
        return False
    tensors = _constant(node) if node.op_type == "Constant" else _computed(graph, node)
    if tensors is not None:
        graph.become_constants(node, tensors)
        if node.op_type == "Constant":
            graph.room += AMPLIFIED * sum(each.ByteSize() for each in tensors.values())
    return tensors is not None


def _constant(node: onnx.NodeProto) -> dict[str, onnx.TensorProto] | None:
    tensor = constant_tensor(node)
    return None if tensor is None else {node.output[0]: copied(tensor)}


def _computed(graph: Graph, node: onnx.NodeProto) -> dict[str, onnx.TensorProto] | None:
    """The results of a node whose inputs are all constants; None if they are not, or would be large."""
    if node.op_type not in FOLDABLE:
        return None
    if node.op_type in ("Shape", "Size"):
        value = graph.constant(node.output[0])
        return None if value is None else {node.output[0]: numpy_helper.from_array(value)}
    names = [name for name in node.input if name]
    if not all(name in graph.initializers for name in names):
        return None
    inputs = [value for name in names if (value := graph.constant(name)) is not None]
    if len(inputs) < len(names):
        return None
    held = {name: each.nbytes for name, each in zip(names, inputs, strict=True)}
    results = evaluate(node, inputs, graph.opset, min(GROWTH + sum(held.values()), max(GROWTH, graph.room)))
    if results is None:
        return None
    outputs = [name for name in node.output if name]
    kinds = [graph.element_type(name) for name in outputs]
    if any(kind != helper.np_dtype_to_tensor_dtype(each.dtype) for kind, each in zip(kinds, results, strict=True)):
        return None
    graph.room -= sum(each.nbytes for each in results if each.nbytes > GROWTH)
    return {name: numpy_helper.from_array(each) for name, each in zip(outputs, results, strict=True)}
