"""The operands of attention: factors and transpositions before the product, and heads that queries share."""

from dataclasses import dataclass, replace

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.passes.sizes import terms_of


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the product of queries and keys: a value, times a factor.

    turned: whether its last two axes still have to be exchanged, to have a row for each key.
    """

    name: str
    factor: float = 1.0
    turned: bool = False


def scaled(graph: Graph, name: str) -> ScoreOperand:
    """An operand without the number that it is multiplied with, or divided by."""
    node = graph.maker(name, "Mul", "Div") if graph.inner(name) else None
    if node is None:
        return ScoreOperand(name)
    pairs = [tuple(node.input)] if node.op_type == "Div" else [tuple(node.input), tuple(node.input)[::-1]]
    for value, other in pairs:
        number = graph.scalar(other)
        sizes, own = graph.sizes(value), graph.sizes(name)
        if number and sizes is not None and own is not None and len(sizes) == len(own):
            found = scaled(graph, value)
            return replace(found, factor=found.factor * (1 / number if node.op_type == "Div" else number))
    return ScoreOperand(name)


def as_keys(graph: Graph, found: ScoreOperand) -> ScoreOperand:
    """The keys before they were transposed for the product."""
    source = _before_transposition(graph, found.name)
    if source is None:
        return replace(found, turned=True)
    inner = scaled(graph, source)
    return ScoreOperand(inner.name, found.factor * inner.factor)


def _before_transposition(graph: Graph, name: str) -> str | None:
    """The value whose last two axes a Transpose exchanges, between two Reshapes or not; None if there is none."""
    node = graph.maker(name, "Transpose", "Reshape")
    if node is None:
        return None
    if node.op_type == "Transpose":
        order = attributes_of(node).get("perm", [])
        rank = len(order)
        return node.input[0] if rank > 2 and order == [*range(rank - 2), rank - 1, rank - 2] else None
    inner = graph.maker(node.input[0], "Transpose")
    first = graph.maker(inner.input[0], "Reshape") if inner is not None else None
    if inner is None or first is None or attributes_of(inner).get("perm") != [0, 2, 1]:
        return None
    before, flat, after = (terms_of(graph, each) for each in (first.input[0], first.output[0], name))
    if before is None or flat is None or after is None or len(before) != 4 or len(after) != 4:
        return None
    same_rows = flat[-1] is not None and flat[-1] == before[-1] == after[-2]
    return first.input[0] if same_rows and before[1] is not None and before[1] == after[1] else None


def head_size(graph: Graph, name: str) -> int | None:
    """The size of the last axis, from operands that are broadcast to a value where the graph does not tell its own."""
    sizes = graph.sizes(name)
    if sizes and isinstance(sizes[-1], int):
        return sizes[-1]
    node = graph.maker(name, "Add", "Sub", "Mul", "Div", "Cast", "Identity")
    found = [] if node is None else [head_size(graph, each) for each in node.input]
    return next((size for size in found if size is not None and size > 1), None)


def shared_heads(graph: Graph, k: str, v: str) -> tuple[str, str] | None:
    """Keys and values before each of their heads was repeated for neighbouring heads of queries; None if not."""
    found = [_before_repetition(graph, name) for name in (k, v)]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _before_repetition(graph: Graph, name: str) -> str | None:
    """x [B, H, L, D] of Reshape(Expand(Unsqueeze(x, 2))), which repeats each head."""
    last = graph.maker(name, "Reshape")
    middle = graph.maker(last.input[0], "Expand") if last is not None else None
    first = graph.maker(middle.input[0], "Unsqueeze", "Reshape") if middle is not None else None
    if first is None or middle is None:
        return None
    before, split, wide, after = (
        graph.sizes(each) for each in (first.input[0], first.output[0], middle.output[0], name)
    )
    if before is None or split is None or after is None or len(before) != 4 or len(split) != 5 or len(after) != 4:
        return None
    heads, every = before[1], after[1]
    if not isinstance(heads, int) or not isinstance(every, int) or split[1:3] != [heads, 1]:
        return None
    if not heads or every % heads:
        return None
    # The product asks for as many numbers in a head as queries have, so that sizes which are not told are those before.
    told = [(a, b) for a, b in zip(before[2:], after[2:], strict=True) if isinstance(a, int) and isinstance(b, int)]
    if any(a != b for a, b in told):
        return None
    return first.input[0] if wide is None or wide[2] in (None, every // heads) else None
