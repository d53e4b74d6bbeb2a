"""Shape arithmetic is replaced by constants where sizes are known; sizes that only have names stay computed."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.graph.sizes import constant_target, numbers
from opgrad.onnx.passes.sizes import RULES, Shapes, terms_of

INTEGERS = (TensorProto.INT64, TensorProto.INT32)


def simplify_shapes(graph: Graph) -> bool:
    """Replace arrays of known sizes, and the shapes that Reshape reads, by initializers."""
    shapes, changed = Shapes(graph), False
    for node in list(graph.nodes()):
        if domain_of(node):
            continue
        if node.op_type == "Where" and _chosen(graph, shapes, node):
            changed = True
        elif node.op_type in RULES and len(node.output) == 1:
            changed |= _value(graph, shapes, node)
        elif node.op_type == "Reshape":
            changed |= _target(graph, shapes, node)
    return changed


def _value(graph: Graph, shapes: Shapes, node: onnx.NodeProto) -> bool:
    """Replace a node whose result is known."""
    name = node.output[0]
    kind, sizes = graph.element_type(name), graph.sizes(name)
    if name in graph.kept or kind not in INTEGERS or sizes is None or len(sizes) > 1:
        return node.op_type == "Reshape" and _target(graph, shapes, node)
    found = numbers(shapes(name))
    if found is None:
        return False
    array = np.array(found if sizes else found[0], helper.tensor_dtype_to_np_dtype(kind))
    graph.become_constants(node, {name: numpy_helper.from_array(array)})
    return True


def _chosen(graph: Graph, shapes: Shapes, node: onnx.NodeProto) -> bool:
    """Replace the result of Where by one of its operands, if both hold the same sizes."""
    found = shapes(node.output[0])
    if found is None or None in found or not graph.readers.get(node.output[0]):
        return False
    equal = [name for name in node.input[1:] if shapes(name) == found and graph.sizes(name) is not None]
    same = [name for name in equal if len(graph.sizes(name) or ()) == len(graph.sizes(node.output[0]) or ())]
    return bool(same) and graph.alias(node.output[0], same[0])


def _target(graph: Graph, shapes: Shapes, node: onnx.NodeProto) -> bool:
    """Give Reshape a constant shape, with 0 for sizes that stay and -1 for one size that follows from the others."""
    if len(node.input) < 2 or graph.constant(node.input[1]) is not None:
        return False
    wanted = shapes(node.input[1])
    if wanted is None or attributes_of(node).get("allowzero"):
        return False
    target = constant_target(wanted, terms_of(graph, node.input[0]) or [])
    if target is None:
        return False
    shape = graph.add_constant(np.array(target, np.int64), f"{node.output[0]}/shape")
    inputs = [node.input[0], shape]
    graph.substitute(node, [helper.make_node("Reshape", inputs, node.output, node.name)])
    return True
