"""Sums become additions, which runtimes do in place, and transposed products others, which they read at no cost."""

import onnx
from onnx import helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.graph.sizes import Sizes, are_equal
from opgrad.onnx.passes.patterns import at_each


@at_each("Sum")
def chain_sums(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace a Sum of values of one shape by additions in its order.

    onnxruntime's Sum needs memory for its result while all of its inputs are in memory. An addition writes into its
    first input, and the memory of each other input is free as soon as it was added.
    """
    if len(node.input) < 2 or _broadcasts(graph, node):
        return False
    graph.substitute(node, _additions(graph, node))
    return True


def _broadcasts(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether one of more than two inputs is known to be broadcast; of two inputs an addition broadcasts as well."""
    whole = graph.sizes(node.output[0])
    sizes = [graph.sizes(name) for name in node.input]
    return len(sizes) > 2 and (whole is None or any(each is not None and _differ(each, whole) for each in sizes))


def _differ(one: Sizes, other: Sizes) -> bool:
    """Whether two shapes are known to differ."""
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(a != b and None not in (a, b) for a, b in pairs)


def _additions(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    total, additions = node.input[0], []
    equal = all(are_equal(graph.sizes(name), graph.sizes(node.output[0])) for name in node.input)
    for name in node.input[1:-1]:
        part = graph.free(f"{node.output[0]}/part")
        if equal:
            graph.declare_like(part, node.output[0])
        additions.append(graph.node("Add", [total, name], [part]))
        total = part
    last = helper.make_node("Add", [total, node.input[-1]], node.output, node.name)
    return [*additions, last]


@at_each("Transpose")
def transpose_products(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace (a @ b).T by b.T @ a.T; gradients of weights that a graph transposes have this form."""
    product = graph.maker(node.input[0], "Gemm")
    if product is None or not graph.inner(node.input[0]) or len([name for name in product.input if name]) > 2:
        return False
    if attributes_of(node).get("perm", [1, 0]) != [1, 0]:
        return False
    given = attributes_of(product)
    other = {"transA": 1 - given.get("transB", 0), "transB": 1 - given.get("transA", 0)}
    attributes = {name: value for name, value in {**given, **other}.items() if value or name not in other}
    swapped = [product.input[1], product.input[0]]
    graph.substitute(node, [helper.make_node("Gemm", swapped, [node.output[0]], product.name, **attributes)])
    return True
