"""Packs examples into one row: each sees itself alone, and its positions begin with 0. No token is padding."""

from collections.abc import Callable
from typing import Any

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of
from opgrad.onnx.graph.nodes import rename_inputs
from opgrad.onnx.rules.grouped_attention import in_sequences, of_sequences
from opgrad.onnx.rules.node import Node, NoGradient, sizes_of
from opgrad.tune.language.caches import POSITIONS

STARTS, PLACES = "starts", "places"  # inputs: where examples begin, [1, n + 1], and the places of their tokens, [1, L]
# Operators that let tokens of a row act on others, other than attention.
MIXING = ("Softmax", "LSTM", "GRU", "RNN", "Scan", "Loop", "CumSum", "CausalConvWithState", "LinearAttention")


def packed_rows(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """The graph for one row of several examples, with the inputs `starts` and `places`.

    Raises NotImplementedError where tokens act on others in another way than by an operator of causal attention.
    """
    graph = Graph(copied(model))
    body = GraphBody(graph.opset, graph.taken)
    graph.graph.input.extend([
        helper.make_tensor_value_info(STARTS, TensorProto.INT64, [1, "bounds"]),
        helper.make_tensor_value_info(PLACES, TensorProto.INT64, ["batch", "length"]),
    ])  # fmt: skip
    count = 0
    for node in list(graph.nodes()):
        write = WRITERS.get((domain_of(node), node.op_type))
        if write is None:
            if node.op_type in MIXING and POSITIONS not in node.output:
                raise NotImplementedError(
                    f"{what}: {node.op_type} (node {node.name!r}) lets the tokens of a row act on each other; examples "
                    "can be packed where operators of attention alone do"
                )
            continue
        body.scope(node.name or node.op_type)
        starts, places = (Value(body, name, TensorProto.INT64, [1, None]) for name in (STARTS, PLACES))
        try:
            y = write(Node(node, graph, body, [], []), starts.squeeze(0), places)
        except NoGradient as reason:
            raise NotImplementedError(f"{what}: examples cannot be packed: {node.op_type} {reason}") from None
        made, body.nodes = body.nodes, []
        graph.substitute(node, [*made, helper.make_node("Identity", [y.name], [node.output[0]])])
        count += 1
    if not count:
        raise NotImplementedError(f"{what}: examples cannot be packed: the model has no operator of attention")
    graph.graph.initializer.extend(body.initializers)
    graph.commit()
    for node in graph.graph.node:
        rename_inputs(node, {POSITIONS: PLACES})
    return graph.model


def _attention(node: Node, starts: Value, _: Value) -> Value:
    """ONNX's Attention, whose queries, keys and values are [1, L, heads * H] or [1, heads, L, H]."""
    if not node.get("is_causal", 0) or node.input(3) is not None:
        raise NoGradient("is not causal, or has a mask")
    if node.rank() > 3:
        parts = [node.required(place).squeeze(0).transpose(1, 0, 2) for place in range(3)]
    else:
        counts = [node.get(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        parts = [_by_heads(node.required(place), count) for place, count in enumerate(counts)]
    given = {"causal": "top_left", "softcap": node.get("softcap", 0.0), **_scale(node)}
    y = of_sequences(node, parts, starts, None, **given)
    if node.rank() > 3:
        heads = sizes_of(node.x)[1]
        if not isinstance(heads, int):
            raise NoGradient("does not tell how many heads it has")
        return y.reshape([0, 0, heads, -1]).transpose(0, 2, 1, 3)
    return y


def _multi_head(node: Node, starts: Value, _: Value) -> Value:
    """MultiHeadAttention of com.microsoft, with queries, keys and values [1, L, heads * H] apart."""
    if not node.get("unidirectional", 0) or any(node.input(place) is not None for place in range(3, 8)):
        raise NoGradient("is not causal, or has a mask or a bias")
    if node.input(1) is None or node.input(2) is None or any(node.rank(place) != 3 for place in range(3)):
        raise NoGradient("has queries, keys and values in one array")
    parts = [_by_heads(node.required(place), node.get("num_heads")) for place in range(3)]
    return of_sequences(node, parts, starts, None, causal="top_left", **_scale(node))


def _by_heads(x: Value, heads: int) -> Value:
    """[1, L, heads * H] as [L, heads, H]."""
    return x.reshape([0, 0, heads, -1]).squeeze(0)


def _scale(node: Node) -> dict[str, Any]:
    given = node.get("scale", 0.0)
    return {"scale": given} if given else {}


Write = Callable[[Node, Value, Value], Value]
WRITERS: dict[tuple[str, str], Write] = {
    (MICROSOFT, "GroupQueryAttention"): in_sequences,
    (MICROSOFT, "MultiHeadAttention"): _multi_head,
    ("", "Attention"): _attention,
}
