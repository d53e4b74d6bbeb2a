"""The sizes of quantized weights, from the shapes of a call's arrays and its attributes."""

import math
from typing import Any, NamedTuple

from opgrad.contract.attributes import Attributes, Beside, Shape, Shapes, integer

WIDTHS = (2, 4, 8)  # bits of an integer
BYTE = 8


class Quantized(NamedTuple):
    """Rows and columns of the packed weights, those of a block, the blocks, and the bytes of weights and zero points.

    row_bytes, zero_bytes: the bytes of a row of integers, and of a row of packed zero points.
    """

    rows: int
    columns: int
    row_block: int
    column_block: int
    blocks: Shape
    row_bytes: int
    zero_bytes: int

    @property
    def packed(self) -> Shape:
        return self.rows, self.row_bytes

    @property
    def packed_zeros(self) -> Shape:
        return self.blocks[0], self.zero_bytes


def checked_bits(what: str, value: Any, beside: Beside) -> int:
    """The bits of an integer."""
    found = integer(what, value)
    if found not in WIDTHS:
        raise ValueError(f"{what} is {found}, expected 2, 4 or 8")
    return found


def weight_bits(what: str, value: Any, beside: Beside) -> int:
    """The bits of an integer among weights, or 0 for weights that are floats."""
    return checked_bits(what, value, beside) if integer(what, value) else 0


def whole_bytes(what: str, value: Any, beside: Beside) -> int:
    """The columns of a block, which begin with bytes."""
    found, bits = not_negative(what, value, beside), beside.attributes["bits"]
    if found > 1 and found * bits % BYTE:
        raise ValueError(f"{what} is {found}, expected blocks of whole bytes, as bits is {bits}")
    return found


def number_like(name: str, shapes: Shapes, expected: Shape) -> Shape:
    """The own shape of an array that has as many elements as expected; else what is expected."""
    return shapes[name] if math.prod(shapes[name]) == math.prod(expected) else expected


def not_negative(what: str, value: Any, beside: Beside) -> int:
    """An integer of at least 0 that fits 32 bits."""
    found = integer(what, value)
    if not 0 <= found < 2**31:
        raise ValueError(f"{what} is {found}, expected 0 to {2**31 - 1}")
    return found


def quantized(shapes: Shapes, attributes: Attributes) -> Quantized:
    """The sizes of the weights of a call.

    Without the shape of b its rows are taken to have whole blocks.
    """
    transposed, bits = attributes["transB"], attributes["bits"]
    rows, columns = (attributes[name] for name in (("N", "K") if transposed else ("K", "N")))
    row_block, column_block = attributes["row_block"] or max(rows, 1), attributes["column_block"] or max(columns, 1)
    blocks = -(-rows // row_block), -(-columns // column_block)
    whole = blocks[1] * column_block if attributes["column_block"] > 1 else columns
    least, most = -(-columns * bits // BYTE), whole * bits // BYTE
    padded = most > least and ("b" not in shapes or math.prod(shapes["b"]) == rows * most > 0)
    return Quantized(
        rows, columns, row_block, column_block, blocks, most if padded else least, -(-blocks[1] * bits // BYTE)
    )
