"""Constant folding: values that do not depend on the graph's inputs are computed once, here."""

import onnx
from onnx import helper, numpy_helper

from opgrad.onnx.graph.evaluation import AMPLIFIED, FOLDED, constant_tensor, evaluate
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import copied, names_of
from opgrad.onnx.graph.nodes import subgraphs
from opgrad.onnx.passes.single_nodes import at_each

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
