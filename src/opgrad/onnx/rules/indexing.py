"""Elements picked by index."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, gradient


@gradient("Gather", constant=(1,), integers=True)
def gather(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] += dy."""
    return node.microsoft("GatherGrad", node.x.shape(), node.required(1), node.dy, axis=node.get("axis", 0))


@gradient("GatherElements", constant=(1,), integers=True)
def gather_elements(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] += dy, element by element."""
    return node.microsoft("GatherElementsGrad", node.dy, node.x.shape(), node.required(1), axis=node.get("axis", 0))


@gradient("GatherND", constant=(1,), integers=True)
def gather_nd(node: Node) -> Value:
    """dx = 0; dx[index] += dy."""
    batch_dims = node.get("batch_dims", 0)
    return node.microsoft("GatherNDGrad", node.x.shape(), node.required(1), node.dy, batch_dims=batch_dims)


@gradient("TopK", constant=(1,), integers=True)
def top_k(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] = dy, with the indices that the operator found."""
    indices = node.output(1, "_indices", TensorProto.INT64)
    return node.microsoft("GatherElementsGrad", node.dy, node.x.shape(), indices, axis=node.get("axis", -1))


@gradient("OneHot", constant=(0, 1))
def one_hot(node: Node) -> Gradients:
    """dvalues = the sums of dy where the index is not and where it is."""
    dtype = node.required(2).element_type
    mask = node.same(node.x, node.required(1), node.body.ints([0, 1]).cast(dtype or TensorProto.FLOAT))
    on = (node.dy * mask).sum(keepdims=False)
    off = node.dy.sum(keepdims=False) - on
    return [None, None, node.body.concat(off.reshape([1]), on.reshape([1]))]
