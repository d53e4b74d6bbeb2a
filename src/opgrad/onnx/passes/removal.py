"""Removal of nodes that change nothing, and fusion of pairs such as a Transpose of a Transpose."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import attributes_of, leave_out_results, needed, read_by, registering
from opgrad.onnx.graph.sizes import Term, Terms
from opgrad.onnx.passes.patterns import at_each
from opgrad.onnx.passes.sizes import Shapes, slice_limits, terms_of

Test = Callable[[Graph, onnx.NodeProto], bool]
TESTS: dict[str, Test] = {}
DROPOUT_TRAINS_FROM = 12  # the first opset with a Dropout that can train
# For each type the types that represent all of its values exactly.
WIDER: dict[int, tuple[int, ...]] = {
    TensorProto.FLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.BFLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.FLOAT: (TensorProto.DOUBLE,),
    TensorProto.INT32: (TensorProto.INT64, TensorProto.DOUBLE),
    TensorProto.BOOL: (TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE),
}


# Registers a test of whether the first result of these operators equals their first input.
unchanged = registering(TESTS)


@at_each()
def remove_no_ops(graph: Graph, node: onnx.NodeProto) -> bool:
    """Let the readers of a node that changes nothing read the node's input instead."""
    by = _equal_input(graph, node) if _is_read(graph, node) else None
    return by is not None and graph.alias(node.output[0], by)


def _is_read(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether something reads the first result, and nothing reads another one."""
    needed = [bool(name) and (name in graph.kept or bool(graph.readers.get(name))) for name in node.output]
    return needed[:1] == [True] and not any(needed[1:])


def _equal_input(graph: Graph, node: onnx.NodeProto) -> str | None:
    """The input that equals the first result; None if there is none."""
    test = TESTS.get(node.op_type)
    if test is None or not node.input or not node.input[0]:
        return None
    if test(graph, node):
        return node.input[0]
    neutral = {"Add": 0, "Mul": 1}.get(node.op_type)
    return node.input[1] if neutral is not None and _is_neutral(graph, node.input[::-1], neutral) else None


def _sizes_stay(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the result has the sizes of the first input, as far as the graph tells both."""
    before, after = (terms_of(graph, name) for name in (node.input[0], node.output[0]))
    return before is not None and before == after and None not in before


unchanged("Identity")(lambda graph, node: True)


@unchanged("Dropout")
def _dropout(graph: Graph, node: onnx.NodeProto) -> bool:
    if graph.opset < DROPOUT_TRAINS_FROM or len(node.input) < 3 or not node.input[2]:
        return True
    training = graph.constant(node.input[2])
    return training is not None and not np.any(training)


unchanged("Cast")(lambda graph, node: graph.element_type(node.input[0]) == attributes_of(node)["to"])


@unchanged("CastLike")
def _cast_like(graph: Graph, node: onnx.NodeProto) -> bool:
    kinds = [graph.element_type(name) for name in node.input]
    return kinds[0] is not None and kinds[0] == kinds[1]


@unchanged("Reshape")
def _reshape(graph: Graph, node: onnx.NodeProto) -> bool:
    before, after = (graph.sizes(name) for name in (node.input[0], node.output[0]))
    if before is None or after is None or len(before) != len(after):
        return False
    # One size of several follows from the others, unless one of them is 0.
    equal = sum(a == b and isinstance(a, int) and a > 0 for a, b in zip(before, after, strict=True))
    return equal >= len(before) - 1 if before else True


unchanged("Flatten", "Squeeze", "Unsqueeze")(lambda graph, node: _sizes_stay(graph, node))


@unchanged("Tile")
def _tile(graph: Graph, node: onnx.NodeProto) -> bool:
    copies = Shapes(graph).numbers(node.input[1])
    return copies is not None and set(copies) <= {1}


@unchanged("Expand")
def _expand(graph: Graph, node: onnx.NodeProto) -> bool:
    target = Shapes(graph)(node.input[1])
    return _sizes_stay(graph, node) or (target is not None and _covers(terms_of(graph, node.input[0]), target))


def _covers(sizes: Terms | None, target: Terms) -> bool:
    """Whether broadcasting a value of these sizes to the target leaves its shape as it is."""
    if sizes is None or len(target) > len(sizes):
        return False
    last = sizes[len(sizes) - len(target) :]
    return all(
        wanted == Term(1) or (wanted == own and own is not None) for own, wanted in zip(last, target, strict=True)
    )


@unchanged("Transpose")
def _transpose(graph: Graph, node: onnx.NodeProto) -> bool:
    order = attributes_of(node).get("perm")
    sizes = graph.sizes(node.input[0])
    if order is None:
        return sizes is not None and len(sizes) < 2
    return list(order) == sorted(order)


unchanged("Concat", "Sum", "Max", "Min", "Mean")(lambda graph, node: len(node.input) == 1)


@unchanged("Slice")
def _slice(graph: Graph, node: onnx.NodeProto) -> bool:
    limits, sizes = slice_limits(Shapes(graph), node), terms_of(graph, node.input[0])
    if limits is None or sizes is None:
        return False
    return all(
        start == Term(0) and step == Term(1) and end is not None and _reaches(end, sizes[axis])
        for axis, start, end, step in limits
    )


def _reaches(end: Term, size: Term | None) -> bool:
    """Whether the end of a slice is at or behind the end of the axis."""
    if end == size:
        return True
    last, own = end.number, size.number if size is not None else None
    return last is not None and (last >= np.iinfo(np.int32).max or (own is not None and last >= own))


@unchanged("Pad")
def _pad(graph: Graph, node: onnx.NodeProto) -> bool:
    given = attributes_of(node).get("pads", attributes_of(node).get("paddings"))
    pads = given if given is not None else graph.constant(node.input[1]) if len(node.input) > 1 else None
    return pads is not None and not np.any(pads)


unchanged("Add", "Sub")(lambda graph, node: _is_neutral(graph, node.input, 0))
unchanged("Mul", "Div", "Pow")(lambda graph, node: _is_neutral(graph, node.input, 1))


def _is_neutral(graph: Graph, operands: Sequence[str], number: float) -> bool:
    """Whether the second operand is this number and its axes are no more than those of the first."""
    sizes, own = (graph.sizes(name) for name in operands)
    fits = sizes is not None and own is not None and len(own) <= len(sizes)
    return fits and graph.scalar(operands[1]) == number


# --- pairs ---


@at_each("Cast", "Transpose", "Reshape")
def join_pairs(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace two successive Casts, Transposes or Reshapes by one, or by none if they cancel out."""
    first = graph.maker(node.input[0], node.op_type) if _is_read(graph, node) else None
    return first is not None and PAIRS[node.op_type](graph, first, node)


def _casts(graph: Graph, first: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    before, between = (graph.element_type(each.input[0]) for each in (first, node))
    if before is None or between not in WIDER.get(before, ()):
        return False
    if attributes_of(node)["to"] == before:
        return graph.alias(node.output[0], first.input[0])
    node_of = graph.node("Cast", [first.input[0]], node.output, to=attributes_of(node)["to"])
    graph.substitute(node, [node_of])
    return True


def _transposes(graph: Graph, first: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    orders = [attributes_of(each).get("perm") for each in (first, node)]
    if orders[0] is None or orders[1] is None:
        return False
    perm = [orders[0][axis] for axis in orders[1]]
    if perm == sorted(perm):
        return graph.alias(node.output[0], first.input[0])
    if not graph.inner(first.output[0]):
        return False  # two transposes of one value would both run; runtimes fuse a single one into a product
    graph.substitute(node, [graph.node("Transpose", [first.input[0]], node.output, perm=perm)])
    return True


def _reshapes(graph: Graph, first: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    target = graph.constant(node.input[1]) if len(node.input) > 1 else None
    if target is None or 0 in target or not graph.inner(first.output[0]):
        return False
    attributes = [helper.make_attribute(name, value) for name, value in attributes_of(node).items()]
    joined = graph.node("Reshape", [first.input[0], node.input[1]], node.output)
    joined.attribute.extend(attributes)
    graph.substitute(node, [joined])
    return True


PAIRS = {"Cast": _casts, "Transpose": _transposes, "Reshape": _reshapes}


# --- dead code -----------------------------------------------------------------------------------------------------


def remove_dead(graph: Graph) -> bool:
    """Remove the nodes that no output and no kept value depends on."""
    nodes = list(graph.nodes())
    kept = needed(nodes, graph.kept)
    read, places = read_by(kept).union(graph.kept), {id(node) for node in kept}
    dead = [node for node in nodes if id(node) not in places]
    for node in dead:
        graph.substitute(node, [])
    trimmed = [leave_out_results(node, read) for node in kept]
    return _remove_initializers(graph, read) or bool(dead) or any(trimmed)


def _remove_initializers(graph: Graph, read: set[str]) -> bool:
    tensors, changed = graph.graph.initializer, False
    for index in reversed(range(len(tensors))):
        if tensors[index].name not in read:
            del graph.initializers[tensors[index].name], tensors[index]
            changed = True
    return changed
