"""Ranks that onnx does not infer: of operands, from results such as declared outputs, and of the results of trees."""

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import TypeProto, helper

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.messages import CLASSICAL, domain_of

BROADCASTING = frozenset(("Add", "Div", "Max", "Mean", "Min", "Mul", "Sub", "Sum", "Where"))
MATRIX = 2
TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")  # their last result has a row for each row


def more_ranks(nodes: Sequence[onnx.NodeProto], types: Mapping[str, TypeProto.Tensor]) -> dict[str, TypeProto.Tensor]:
    """The types, with ranks, of values of which only the element type is known."""
    found: dict[str, TypeProto.Tensor] = {}

    def rank(name: str) -> int | None:
        known = found.get(name) or types.get(name)
        return len(known.shape.dim) if known is not None and known.HasField("shape") else None

    for node in reversed(nodes):
        result = rank(node.output[0]) if node.output and not domain_of(node) else None
        tree = node.output[-1] if node.op_type in TREES and node.domain == CLASSICAL else ""
        if tree in types and rank(tree) is None:
            found[tree] = _of_rank(types[tree], MATRIX)
        for name, size in _operands(node, result, {name: rank(name) for name in node.input}):
            if name in types and rank(name) is None:
                found[name] = _of_rank(types[name], size)
    return found


def _of_rank(known: TypeProto.Tensor, size: int) -> TypeProto.Tensor:
    return helper.make_tensor_type_proto(known.elem_type, [None] * size).tensor_type


def _operands(node: onnx.NodeProto, result: int | None, ranks: Mapping[str, int | None]) -> Iterator[tuple[str, int]]:
    """The operands of a node whose rank follows from that of its result. ranks: those of all operands."""
    if result is None:
        return
    if facts_of(node).same_rank:
        yield node.input[0], result
    elif node.op_type == "Concat" or (node.op_type == "MatMul" and MATRIX in ranks.values()):
        yield from ((name, result) for name in node.input)
    elif node.op_type == "Gemm":
        yield from ((name, MATRIX) for name in node.input[:2])
    elif node.op_type in BROADCASTING:
        unknown = [name for name in dict.fromkeys(node.input) if ranks[name] is None]
        if len(unknown) == 1 and all(other < result for other in ranks.values() if other is not None):
            yield unknown[0], result  # the widest operand has the rank of the result
