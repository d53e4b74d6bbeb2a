"""Rotary embedding, of ai.onnx and of com.microsoft, whose gradient is the rotation the other way round."""

from opgrad.graph.formulas import Value
from opgrad.graph.messages import MICROSOFT
from opgrad.rules.node import Node
from opgrad.rules.registry import NoGradient, gradient
from opgrad.rules.shaping import sizes_of

ATTRIBUTES = ("interleaved", "rotary_embedding_dim", "num_heads", "layout")
PACKED = 3  # axes of x where a token's heads lie in one axis: [B, L, H * D]
TABLES = (1, 2, 3)  # the places of the inputs that have no gradient: cosines, sines, positions


def _given(node: Node) -> dict[str, int | str]:
    return {name: node.attributes[name] for name in ATTRIBUTES if node.attributes.get(name)}


@gradient("RotaryEmbeddingTraining", domain=MICROSOFT, constant=TABLES)
@gradient("RotaryEmbedding", constant=TABLES)
def rotary_embedding(node: Node) -> Value:
    """dx = dy, every pair turned back."""
    tables = node.required(1), node.required(2), node.input(3)
    return node.microsoft("RotaryEmbeddingGrad", node.dy, *tables, **_given(node))


@gradient("RotaryEmbedding", domain=MICROSOFT, constant=TABLES)
def rotary_embedding_of_microsoft(node: Node) -> Value:
    """The same, with positions before the tables, or the position of the first token alone."""
    if node.get("is_packed_batching", 0) or node.get("scale", 1.0) != 1.0:
        raise NoGradient("it is packed, or scaled")
    x, positions = node.x, node.required(1)
    if len(sizes_of(positions)) == 1:
        place = 1 if len(sizes_of(x)) < 4 else 2
        every = node.body.range(x.shape(place, place + 1).squeeze(0)) + positions
        positions = every.unsqueeze(0).expand(node.body.concat(x.shape(0, 1), x.shape(place, place + 1)))
    tables = node.required(2), node.required(3), positions
    return node.microsoft("RotaryEmbeddingGrad", node.dy, *tables, **_given(node), **_heads(node))


def _heads(node: Node) -> dict[str, int]:
    """The number of heads of [B, L, H * D] where the node does not tell it: heads are as wide as the tables then."""
    if node.rank() > PACKED or node.get("num_heads", 0):
        return {}
    width, half = sizes_of(node.x)[2], sizes_of(node.required(2))[1]
    if not isinstance(width, int) or not isinstance(half, int):
        raise NoGradient("the graph does not tell how wide its input and its tables are")
    return {"num_heads": width // (2 * half)}
