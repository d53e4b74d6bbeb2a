"""Transposed products: (a @ b).T becomes b.T @ a.T, as runtimes read a transposed operand at no cost."""

import onnx
from onnx import helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.passes.single_nodes import at_each


@at_each("Transpose")
def transpose_products(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace (a @ b).T by b.T @ a.T; gradients of weights that a graph transposes have this form."""
    product = graph.maker(node.input[0], "Gemm")
    if product is None or not graph.inner(node.input[0]) or len([name for name in product.input if name]) > 2:
        return False
    if attributes_of(node).get("perm", [1, 0]) != [1, 0]:
        return False
    graph.substitute(node, [_exchanged(graph, product, node.output[0])])
    return True


def _exchanged(graph: Graph, product: onnx.NodeProto, output: str) -> onnx.NodeProto:
    given = attributes_of(product)
    other = {"transA": 1 - given.get("transB", 0), "transB": 1 - given.get("transA", 0)}
    attributes = {name: value for name, value in {**given, **other}.items() if value or name not in other}
    return helper.make_node("Gemm", [product.input[1], product.input[0]], [output], product.name, **attributes)
