"""The sizes of a rotary embedding, from the shapes of its arrays and its attributes."""

from typing import Any, NamedTuple

from opgrad.contract.attributes import Attributes, Shape, Shapes

LAYOUTS = ("BHLD", "BLHD")
PACKED = 3  # axes of x where a token's heads lie in one axis: [B, L, H * D]


class Rotation(NamedTuple):
    """The sizes of x, and the shape that its tables must have.

    half: how many pairs of a head's elements are turned. heads_first: whether heads stand before tokens.
    """

    batch: Any
    heads: Any
    tokens: Any
    size: Any
    half: Any
    heads_first: bool
    table: Shape


def rotation(operator: str, array: str, shapes: Shapes, attributes: Attributes) -> Rotation:
    """The sizes of a call of `operator` whose first array is called `array`. Raises its ValueError."""
    shape, heads = shapes[array], attributes["num_heads"]
    if len(shape) == PACKED:
        batch, tokens, width = shape
        if heads < 1 or width % heads:
            what = f"{operator}: num_heads is {heads}, expected a number that divides {width}"
            raise ValueError(f"{what}, the last size of {array}, which has 3 dimensions")
        heads_first, size = False, width // heads
    else:
        heads_first = attributes["layout"] == LAYOUTS[0]
        batch, size = shape[0], shape[3]
        found, tokens = (shape[1], shape[2]) if heads_first else (shape[2], shape[1])
        if heads not in (0, found):
            raise ValueError(f"{operator}: num_heads is {heads}, expected 0 or {found}, the heads that {array} has")
        heads = found
    turned = attributes["rotary_embedding_dim"]
    if turned % 2 or not 0 <= turned <= size or (not turned and size % 2):
        expected = f"an even number from 0 to {size}, the size of a head" if size % 2 == 0 else "an even number above 0"
        raise ValueError(f"{operator}: rotary_embedding_dim is {turned}, expected {expected}")
    half = (turned or size) // 2
    cos = shapes["cos_cache"]
    if "position_ids" in shapes:
        table: Shape = (cos[0], half)
    elif len(cos) == PACKED:
        table = (1 if cos[0] == 1 else batch, tokens, half)
    else:
        table = (max(cos[0], tokens), half)
    return Rotation(batch, heads, tokens, size, half, heads_first, table)
