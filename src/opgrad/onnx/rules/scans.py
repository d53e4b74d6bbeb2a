"""A Scan as a Loop that computes the same: it can keep values whose shapes differ from step to step."""

import numpy as np
import onnx
from onnx import helper

from opgrad.onnx.graph.formulas import LAST, Body, Value
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.nodes import attributes_of, subgraphs
from opgrad.onnx.graph.subgraphs import TURN_AND_CONDITION, is_reversed, scan_axis, state_count
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.shaping import sizes_of


def as_loop(node: Node, scan: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes that compute what a Scan does, by a Loop. scan: the node, as the graph has it."""
    title = node.body.free(f"{scan.name or scan.op_type}/loop")
    before, inner, behind = (Body(node.opset, f"{title}/{part}") for part in ("before", "body", "behind"))
    states, (body,) = state_count(scan), subgraphs(scan)
    sequences = [node.value(name) for name in scan.input[states:]]
    axes = [scan_axis(scan, place, "input", len(sizes_of(each))) for place, each in enumerate(sequences)]
    steps = Value(before, sequences[0].name).shape(axes[0], axes[0] + 1).scalar()
    last, always = steps - before.ints([1]).scalar(), before.constant(np.array(True))
    step, go_on = inner.input(), inner.input()
    elements = [each.name for each in body.input[states:]]
    for place, (name, whole, axis) in enumerate(zip(elements, sequences, axes, strict=True)):
        index = inner.outer(last) - step if is_reversed(scan, "input", place) else step
        inner.nodes.append(helper.make_node("Gather", [whole.name, index.name], [name], name, axis=axis))
    more = inner.node("Identity", go_on)
    rows = [_row(node, scan, behind, states, place, name) for place, name in enumerate(scan.output[states:])]
    given = [
        helper.make_value_info(each.name, kind) for each, kind in zip((step, go_on), TURN_AND_CONDITION, strict=True)
    ]
    loop_body = helper.make_graph(
        [*inner.nodes, *(copied(each) for each in body.node)], "body", [*given, *map(copied, body.input[:states])],
        [onnx.ValueInfoProto(name=more.name), *map(copied, body.output)], body.initializer, value_info=body.value_info,
    )  # fmt: skip
    inputs = [steps.name, always.name, *scan.input[:states]]
    loop = helper.make_node("Loop", inputs, [*scan.output[:states], *rows], scan.name or title, body=loop_body)
    return [*before.nodes, loop, *behind.nodes]


def _row(node: Node, scan: onnx.NodeProto, body: Body, states: int, place: int, name: str) -> str:
    """The name of an output of the Loop; nodes that turn it, or move its axis, are appended to the body."""
    axes = attributes_of(scan).get("scan_output_axes")
    if not name or not (is_reversed(scan, "output", place) or (axes and axes[place])):
        return name
    rank = len(sizes_of(node.value(name)))
    axis, new = scan_axis(scan, place, "output", rank), node.body.free(f"{name}/rows")
    node.forward.declare(new, node.forward.element_type(name) or 0, [None] * rank)
    value = Value(body, new)
    if is_reversed(scan, "output", place):
        value = value.slice(-1, -LAST - 1, 0, -1)
    moved = value.transpose(*range(1, axis + 1), 0, *range(axis + 1, rank))
    body.nodes[-1].output[0] = name
    node.forward.declare_like(moved.name, name)
    return new
