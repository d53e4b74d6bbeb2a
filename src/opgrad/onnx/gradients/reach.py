"""Which values of a graph carry gradients, and which nodes stand between the values that are asked for."""

import itertools
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, domain_of
from opgrad.onnx.graph.nodes import needed, outside, read_from_outside, subgraphs
from opgrad.onnx.rules.coverage import reason
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantization import QUANTIZING
from opgrad.onnx.rules.registry import RULES, Declared, Gradients, NoGradient

NO_RULE = "there is no rule for it; opgrad.gradients.register_gradient adds one"
# The integers that these operators write or read carry gradients, too: the gradient passes straight through the
# rounding and is that of the floats which the integers stand for (straight-through estimator).
DEQUANTIZING = "DequantizeLinear"
CASTS = ("Cast", "CastLike")
RETYPING = (*CASTS, "MatMulInteger", "ConvInteger")  # which give integers of other types


def paths(forward: Graph, of: Iterable[str], wanted: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes between the values `wanted` and the values `of`, in the graph's order."""
    reached, between = depending(forward, wanted), set(of)
    nodes = []
    for node in reversed(list(forward.nodes())):
        if between.intersection(node.output) and reached.intersection(node.output):
            carried = [name for name in differentiable_inputs(forward, node) if name in reached]
            if carried:
                nodes.append(node)
                between.update(carried)
    return nodes[::-1]


def depending(forward: Graph, wanted: Iterable[str]) -> set[str]:
    """The wanted values and all values that can be differentiated with respect to one of them."""
    reached = set(wanted)
    for node in forward.nodes():
        if reached.intersection(differentiable_inputs(forward, node)):
            reached.update(name for name in node.output if name and carries(forward, name))
    return reached


def carries(forward: Graph, name: str) -> bool:
    """Whether a value can have a gradient."""
    kind = forward.sequence(name) or forward.element_type(name)
    return kind in (None, *FLOATS) or name in quantized(forward)


def quantized(forward: Graph) -> set[str]:
    """The names of all integer values that stand for floats.

    They are what the graph quantizes floats to, what it copies, selects or computes from such integers, and integers
    whose gradient is asked for.
    """
    if forward.quantized is None:
        forward.quantized = found = {name for name in forward.variable if _is_integer(forward.element_type(name))}
        for node in forward.nodes():
            if node.op_type in QUANTIZING and domain_of(node) in ("", MICROSOFT):
                found.add(node.output[0])
            elif node.op_type != DEQUANTIZING and (read := found.intersection(_differentiable(node))):
                found.update(name for name in node.output if name and _is_quantized(forward, node, name, read))
    return forward.quantized


def _is_integer(kind: int | None) -> bool:
    return kind not in (None, TensorProto.BOOL, *FLOATS)


def _is_quantized(forward: Graph, node: onnx.NodeProto, name: str, read: Collection[str]) -> bool:
    """Whether a result of a node that reads quantized integers stands for floats, too.

    A float, a condition or an index does not. A result of unknown type, or a sequence, may hold such integers.
    """
    kind = forward.element_type(name)
    moved = rule_of(node).integers and node.op_type not in RETYPING
    return kind is None or (kind in map(forward.element_type, read) if moved else _is_integer(kind))


def cut_off(forward: Graph, of: Iterable[str], reached: Collection[str]) -> Iterator[onnx.NodeProto]:
    """The casts of floats to integers that DequantizeLinear takes for floats again.

    No gradient passes through such a cast, and beside another way to the same floats nobody would notice.
    of: the values that are differentiated. reached: those that depend on the wanted ones.
    """
    moved = set[str]()
    for node in reversed(needed(list(forward.nodes()), of)):
        if node.op_type == DEQUANTIZING:
            moved.add(node.input[0])
        elif moved.isdisjoint(node.output):
            continue
        elif node.op_type in CASTS and forward.element_type(node.input[0]) in FLOATS:
            if node.input[0] in reached:
                yield node
        elif rule_of(node).integers:
            moved.update(_differentiable(node))


def taken_branch(forward: Graph, node: onnx.NodeProto) -> onnx.GraphProto | None:
    """The branch of an If that every run takes, as its condition is a constant; None for another node."""
    condition = forward.constant(node.input[0]) if node.op_type == "If" and not domain_of(node) else None
    if condition is None:
        return None
    name = "then_branch" if np.all(condition) else "else_branch"
    return next(each.g for each in node.attribute if each.name == name)


def taken_nodes(forward: Graph, nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes and those of their subgraphs, without branches that no run takes."""
    for node in nodes:
        yield node
        branch = taken_branch(forward, node)
        for graph in subgraphs(node) if branch is None else [branch]:
            yield from taken_nodes(forward, graph.node)


def _differentiable(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads at places that have a gradient."""
    skipped = rule_of(node).constant
    given = (name for index, name in enumerate(node.input) if name and index not in skipped)
    return itertools.chain(given, outside(node))


def differentiable_inputs(forward: Graph, node: onnx.NodeProto) -> list[str]:
    """The names that a node reads and that have a gradient if its results have one."""
    branch = taken_branch(forward, node)
    names = _differentiable(node) if branch is None else read_from_outside(branch)
    return [name for name in names if carries(forward, name)]


def rule_of(node: onnx.NodeProto) -> Declared:
    """The rule of a node; an operator without a rule gets one that raises NoGradient with the reason."""
    return RULES.get((domain_of(node), node.op_type)) or Declared(node.op_type, node.domain, _no_rule)


def _no_rule(node: Node) -> Gradients:
    raise NoGradient(reason(domain_of(node.proto), node.proto.op_type) or NO_RULE)
