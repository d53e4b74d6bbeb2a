"""Rotary embedding, of ai.onnx and of com.microsoft, whose gradient is the rotation the other way round."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node, numbers_of, sizes_of, unbroadcast
from opgrad.onnx.rules.registry import Gradients, NoGradient, gradient

ATTRIBUTES = ("interleaved", "rotary_embedding_dim", "num_heads", "layout")
PACKED = 3  # axes of x where a token's heads lie in one axis: [B, L, H * D]


def _given(node: Node) -> dict[str, int | str]:
    return {name: node.attributes[name] for name in ATTRIBUTES if node.attributes.get(name)}


@gradient("RotaryEmbeddingTraining", domain=MICROSOFT, constant=(3,))
@gradient("RotaryEmbedding", constant=(3,))
def rotary_embedding(node: Node) -> Gradients:
    """dx = dy, every pair turned back; dcos and dsin sum products of x and dy over heads and equal positions."""
    tables = node.required(1), node.required(2), node.input(3)
    dx = node.microsoft("RotaryEmbeddingGrad", node.dy, *tables, **_given(node))
    return [dx, *_of_tables(node, tables[0], tables[2], node.get("num_heads", 0))] if node.needed - {0} else dx


@gradient("RotaryEmbedding", domain=MICROSOFT, constant=(1,))
def rotary_embedding_of_microsoft(node: Node) -> Gradients:
    """The same, with positions before the tables, or the position of the first token alone."""
    if node.get("is_packed_batching", 0) or node.get("scale", 1.0) != 1.0:
        raise NoGradient("it is packed, or scaled")
    x, positions = node.x, node.required(1)
    if len(sizes_of(positions)) == 1:
        place = 1 if len(sizes_of(x)) < 4 else 2
        every = node.body.range(x.shape(place, place + 1).squeeze(0)) + positions
        positions = every.unsqueeze(0).expand(node.body.concat(x.shape(0, 1), x.shape(place, place + 1)))
    tables, heads = (node.required(2), node.required(3), positions), _heads(node)
    dx = node.microsoft("RotaryEmbeddingGrad", node.dy, *tables, **_given(node), **heads)
    if not node.needed - {0}:
        return dx
    return [dx, None, *_of_tables(node, tables[0], positions, heads.get("num_heads", node.get("num_heads", 0)))]


def _of_tables(node: Node, cos: Value, positions: Value | None, heads: int) -> list[Value]:
    """dcos = dy[a] * x[a] + dy[b] * x[b] and dsin = dy[b] * x[a] - dy[a] * x[b], summed over heads in float32.

    (a, b) are the pairs. What tokens of the same position give is summed, too.
    """
    wide = node.wide()
    (half,) = numbers_of(cos, len(sizes_of(cos)) - 1)
    (a, b), (da, db) = (_pairs(node, each, half, heads) for each in (wide.x, wide.dy))
    parts = [each.sum([2], keepdims=False) for each in (da * a + db * b, db * a - da * b)]
    if positions is None and len(sizes_of(cos)) == PACKED:
        return [unbroadcast(each, each, cos) for each in parts]
    tokens = parts[0].shape(0, 2)
    if positions is None:
        positions = node.body.range(tokens.slice(1, 2).squeeze(0)).unsqueeze(0)
    rows = positions.expand(tokens)
    return [node.microsoft("GatherGrad", cos.shape(), rows, each, axis=0) for each in parts]


def _pairs(node: Node, x: Value, half: int, heads: int) -> tuple[Value, Value]:
    """The first and the second elements of the pairs, each [B, L, H, half]."""
    if node.rank() == PACKED:
        x = x.reshape([0, 0, heads, -1])
    elif node.get("layout", "BHLD") == "BHLD":
        x = x.transpose(0, 2, 1, 3)
    if node.get("interleaved", 0):
        return x.slice(0, 2 * half, 3, 2), x.slice(1, 2 * half, 3, 2)
    return x.slice(0, half, 3), x.slice(half, 2 * half, 3)


def _heads(node: Node) -> dict[str, int]:
    """The number of heads of [B, L, H * D] where the node does not tell it: heads are as wide as the tables then."""
    if node.rank() > PACKED or node.get("num_heads", 0):
        return {}
    width, half = sizes_of(node.x)[2], sizes_of(node.required(2))[1]
    if not isinstance(width, int) or not isinstance(half, int):
        raise NoGradient("the graph does not tell how wide its input and its tables are")
    return {"num_heads": width // (2 * half)}
