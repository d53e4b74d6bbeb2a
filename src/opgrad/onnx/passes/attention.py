"""Recognition of attention, softmax between two products, in the forms that exporters and optimizers write.

A match begins at the softmax. What lies between it and the product of queries and keys is read from there on: factors,
addends and conditions that hide keys, casts, and a tanh that caps the scores. One node stands for all of it. Masks that
are causal whatever the sizes are become an attribute of the node; the others its input.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT
from opgrad.onnx.graph.nodes import attributes_of, naming, title
from opgrad.onnx.passes.attention_masks import (
    ONE_AXIS_FROM,
    NotAttention,
    added_node,
    mask_of,
    reduced,
    some_key,
    unsqueezed,
)
from opgrad.onnx.passes.masks import LOW
from opgrad.onnx.passes.operands import ScoreOperand, as_keys, head_size, scaled, shared_heads

NODE = "AttentionTraining"
LARGEST_HEAD = 256  # of the kernels


@dataclass(frozen=True)
class Recognition:
    """What became of a softmax between two products: replaced if `reason` is empty."""

    node: str
    reason: str = ""


@dataclass
class AttentionScores:
    """What is done to the product of queries and keys, before softmax.

    product: the node of the product. masks: added values, in the scores' type, each with the factor that is applied to
    it. seen: conditions under which a query sees a key. lows: the numbers that stand where it does not, and NaN if
    something is added to them. capped: whether the factors found from here on are inside of the tanh of the softcap.
    """

    product: onnx.NodeProto | None = None
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[tuple[str, float]] = field(default_factory=list)
    seen: list[tuple[str, bool]] = field(default_factory=list)
    lows: set[float] = field(default_factory=set)

    @property
    def evens(self) -> bool:
        """Whether a query without a key has equal scores for all of them, and so the mean of the values."""
        return len(self.lows) == 1 and all(map(math.isfinite, self.lows))


def fuse_attention(graph: Graph) -> list[Recognition]:
    """Replace attention by nodes of AttentionTraining; a line for each softmax that stands before a product."""
    found = []
    for node in list(graph.nodes()):
        if node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
            continue
        try:
            with naming(node):
                last = _product_behind(graph, node)
                if last is None:
                    continue
                _write(graph, node, last)
            found.append(Recognition(title(node)))
        except NotAttention as reason:
            found.append(Recognition(title(node), str(reason)))
    return found


# --- behind softmax ---


@dataclass(frozen=True)
class Last:
    """The product with the values, and what dropout does before it. guard: the mask whose empty rows become 0 there."""

    node: onnx.NodeProto
    dropout: onnx.NodeProto | None = None
    guard: str = ""


def _product_behind(graph: Graph, softmax: onnx.NodeProto) -> Last | None:
    """The product whose first operand the probabilities are; None if there is none."""
    name, dropout, guard = softmax.output[0], None, ""
    while True:
        readers = graph.readers.get(name, [])
        guarded = _without_guard(graph, name, readers)
        if guarded is not None:
            name, guard = guarded
            continue
        products = [each for each in readers if each.op_type == "MatMul" and each.input[0] == name]
        if products:
            return Last(products[0], dropout, guard) if graph.inner(name) else None
        node = graph.reader(name, "Cast", "Dropout")
        if node is None or (node.op_type == "Dropout" and dropout is not None):
            return None
        dropout = node if node.op_type == "Dropout" else dropout
        name = node.output[0]


def _without_guard(graph: Graph, name: str, readers: list[onnx.NodeProto]) -> tuple[str, str] | None:
    """What stands for probabilities behind a Where that puts 0 into rows without a key, and the mask that it asks.

    Exporters ask for NaN, the mask is "" then; the body of ONNX's Attention asks for a mask that is -inf everywhere.
    """
    wheres = [each for each in readers if each.op_type == "Where" and each.input[2] == name]
    others = [each for each in readers if each.op_type not in ("Where", "CastLike")]
    if len(wheres) != 1 or name in graph.kept or _number(graph, wheres[0].input[1]) != 0.0:
        return None
    test = graph.maker(wheres[0].input[0], "IsNaN", "Equal")
    if test is not None and test.op_type == "IsNaN":
        return (wheres[0].output[0], "") if test.input[0] == name and others == [test] else None
    if test is None or others or _number(graph, test.input[1]) != -math.inf:
        return None
    largest = graph.maker(test.input[0], "ReduceMax")
    if largest is None:
        return (wheres[0].output[0], "") if graph.constant(test.input[0]) is not None else None
    return wheres[0].output[0], largest.input[0]


def _number(graph: Graph, name: str) -> float | None:
    """The number in a constant, whatever type it is converted to."""
    node = graph.maker(name, "CastLike")
    return graph.scalar(name if node is None else node.input[0])


# --- before softmax ---


def _scores(graph: Graph, name: str) -> AttentionScores | None:
    """What is done to the product from which a value comes; None if no product is found."""
    node = graph.producers.get(name)
    if node is None or node.domain not in ("", "ai.onnx") or not graph.inner(name):
        return None
    if node.op_type == "MatMul":
        return AttentionScores(node)
    if node.op_type == "Cast":
        return _scores(graph, node.input[0])
    if node.op_type in ("Mul", "Div"):
        return _multiplied(graph, node)
    if node.op_type == "Add":
        return _masked(graph, node)
    return _hidden(graph, node) if node.op_type == "Where" else None


def _multiplied(graph: Graph, node: onnx.NodeProto) -> AttentionScores | None:
    """Scores times a number, outside of whatever was added to them before; or a softcap, c * tanh(scores / c)."""
    for name, other in _either(node) if node.op_type == "Mul" else [tuple(node.input)]:
        number = graph.scalar(other)
        if number is None or not math.isfinite(number) or not number:
            continue
        factor = 1 / number if node.op_type == "Div" else number
        tanh = graph.maker(name, "Tanh") if graph.inner(name) else None
        if tanh is not None:
            return _capped(graph, tanh, factor)
        found = _scores(graph, name)
        if found is not None:
            if found.softcap:
                return None
            found.scale *= factor
            found.masks = [(mask, own * factor) for mask, own in found.masks]
            return found
    return None


def _capped(graph: Graph, tanh: onnx.NodeProto, cap: float) -> AttentionScores | None:
    found = _scores(graph, tanh.input[0])
    if found is None or found.masks or found.seen or found.softcap or cap <= 0:
        return None
    found.scale, found.softcap = found.scale * cap, cap
    return found


def _masked(graph: Graph, node: onnx.NodeProto) -> AttentionScores | None:
    for name, other in _either(node):
        found = _scores(graph, name)
        if found is not None:
            found.masks.append((other, 1.0))
            found.lows |= {math.nan} if found.seen else set()
            return found
    return None


def _hidden(graph: Graph, node: onnx.NodeProto) -> AttentionScores | None:
    """Scores where a condition holds, and a number that hides a key elsewhere, or the other way round."""
    condition, a, b = node.input
    for name, other, holds in ((a, b, True), (b, a, False)):
        low = graph.scalar(other)
        found = _scores(graph, name) if low is not None and low <= LOW else None
        if found is not None and low is not None:
            found.seen.append((condition, holds))
            found.lows.add(low)
            return found
    return None


def _either(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    yield node.input[0], node.input[1]
    yield node.input[1], node.input[0]


# --- the node ---


def _write(graph: Graph, softmax: onnx.NodeProto, last: Last) -> None:
    _check_axis(graph, softmax)
    found = _scores(graph, softmax.input[0])
    if found is None or found.product is None:
        raise NotAttention("its input is no product of queries and keys that is only scaled, masked or capped")
    if last.guard and last.guard not in [mask for mask, _ in found.masks]:
        raise NotAttention("rows become 0 behind it by another mask than that of the scores")
    (q, k), v = _operands(graph, found), last.node.input[1]
    ratio = _ratio(graph, last.dropout) if last.dropout is not None else 0.0
    heads = shared_heads(graph, k.name, v)
    names = (q.name, *(heads or (k.name, v)))
    _check_sizes(graph, names, found.product.output[0])
    new: list[onnx.NodeProto] = []
    rank = len(graph.sizes(q.name) or ())
    inputs = [*names]
    if k.turned:
        inputs[1] = added_node(graph, new, "Transpose", [names[1]], f"{names[1]}/keys", perm=_turned(rank))
    causal, mask = mask_of(graph, new, found.seen, found.masks, q.name, softmax.output[0])
    if rank == 3:
        inputs = [unsqueezed(graph, new, name) for name in inputs]
    attributes: dict[str, float | str] = {
        "scale": found.scale * q.factor * k.factor,
        "softcap": found.softcap,
        "dropout": ratio,
    }
    attributes |= {"causal": causal}
    y, lse = last.node.output[0], graph.free(f"{last.node.output[0]}/lse")
    some = some_key(graph, new, found.seen, y) if found.evens else ""
    made = graph.free(f"{y}/seen") if some else y
    target = made if rank == 4 else graph.free(f"{y}/heads")
    given = [*inputs, *([mask] if mask or ratio else [])]
    if last.dropout is not None and ratio:
        given += ["", "", _random(graph, new, last.dropout, y)]
    new.append(graph.node(NODE, given, [target, lse], MICROSOFT, **attributes))
    if rank == 3:
        new.append(_squeeze(graph, target, made))
    if some:
        mean = reduced(graph, new, "ReduceMean", last.node.input[1], -2)
        new.append(graph.node("Where", [some, made, mean], [y]))
    graph.substitute(last.node, new)


def _check_axis(graph: Graph, softmax: onnx.NodeProto) -> None:
    sizes = graph.sizes(softmax.input[0])
    axis = attributes_of(softmax).get("axis", -1 if graph.opset >= ONE_AXIS_FROM else 1)
    if sizes is None:
        raise NotAttention("the graph does not tell the rank of its input")
    if axis not in (-1, len(sizes) - 1):
        raise NotAttention(f"its axis is {axis}, expected the last one")


def _operands(graph: Graph, found: AttentionScores) -> tuple[ScoreOperand, ScoreOperand]:
    """The queries and keys of the product."""
    assert found.product is not None
    q, k = found.product.input
    return scaled(graph, q), as_keys(graph, scaled(graph, k))


def _check_sizes(graph: Graph, names: tuple[str, ...], scores: str) -> None:
    kinds = [graph.element_type(name) for name in names]
    if kinds[0] not in FLOATS or len(set(kinds)) > 1:
        raise NotAttention("its operands are not known to have one float type")
    ranks = [len(graph.sizes(name) or ()) for name in names]
    if ranks[0] not in (3, 4) or len(set(ranks)) > 1:
        raise NotAttention(f"its operands have {', '.join(map(str, ranks))} axes, expected three or four each")
    q, k, v = (graph.sizes(name) or [] for name in names)
    for size in (head_size(graph, names[0]) or head_size(graph, names[1]), head_size(graph, names[2])):
        if size is None or not 1 <= size <= LARGEST_HEAD:
            raise NotAttention(f"heads have {size or 'an unknown number of'} elements, expected at most {LARGEST_HEAD}")
    # Outside of the heads, sizes of 1 would be broadcast by products, and are not by the node.
    for one, other in ((q[0], k[0]), (q[0], v[0]), (k[-3], v[-3])):
        if (one == 1) != (other == 1) and (isinstance(one, int) and isinstance(other, int)):
            raise NotAttention("its operands are broadcast to each other")


# --- dropout ---


def _ratio(graph: Graph, dropout: onnx.NodeProto) -> float:
    given = attributes_of(dropout).get("ratio", 0.5)
    ratio = graph.scalar(dropout.input[1]) if len(dropout.input) > 1 and dropout.input[1] else given
    if ratio is None:
        raise NotAttention("the ratio of its dropout is not known before the graph runs")
    training = graph.constant(dropout.input[2]) if len(dropout.input) > 2 and dropout.input[2] else np.array(False)
    if training is None:
        raise NotAttention("whether its dropout trains is not known before the graph runs")
    return float(ratio) if training.all() else 0.0


def _random(graph: Graph, new: list[onnx.NodeProto], dropout: onnx.NodeProto, y: str) -> str:
    """The seed of a node's dropout: a number that each run draws, which forward and backward part read."""
    given = attributes_of(dropout).get("seed")
    options = {"seed": float(given)} if given is not None else {}
    drawn = added_node(graph, new, "RandomUniform", [], f"{y}/random", shape=[1], high=float(2**24), low=0.0, **options)
    return added_node(graph, new, "Cast", [drawn], f"{y}/seed", to=TensorProto.INT64)


# --- small nodes ---


def _turned(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _squeeze(graph: Graph, name: str, result: str) -> onnx.NodeProto:
    if graph.opset >= ONE_AXIS_FROM:
        return graph.node("Squeeze", [name, graph.add_constant(np.array([0]), f"{name}/axes")], [result])
    return graph.node("Squeeze", [name], [result], axes=[0])
