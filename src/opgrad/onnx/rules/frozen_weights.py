"""Products with weights that DequantizeLinear makes of integers: in the gradient of x, tiles of them are unpacked.

Their scales have no gradients then. The runtime's kernels compute forward, from the same integers.
"""

from typing import NamedTuple

from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from opgrad.contract.quantized import BYTE
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT, domain_of, packed_bytes
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.rules.node import Node

# The bits of an integer and whether it has a sign, by its type.
INTEGERS: dict[int, tuple[int, bool]] = {
    TensorProto.INT8: (8, True),
    TensorProto.UINT8: (8, False),
    TensorProto.INT4: (4, True),
    TensorProto.UINT4: (4, False),
    TensorProto.INT2: (2, True),
    TensorProto.UINT2: (2, False),
}
COPIES = ("Identity", "Cast")
BYTES_SUFFIX = ".bytes"


class Stored(NamedTuple):
    """A matrix of integers: its name, whether the product reads it transposed, scales, zero points and blocks.

    block: the rows and columns that share a scale, 0 for all of them.
    """

    name: str
    transposed: bool
    scales: Value
    zeros: Value | None
    block: tuple[int, int]


def gradient_through(node: Node, dy: Value, index: int, transposed: bool = False) -> Value | None:
    """dy @ w.T for a product x @ w, whose w is the input at this index; None if no frozen integers are behind it.

    transposed: whether the product is x @ w.T.
    """
    if index in node.needed or len(node.required(0).sizes or ()) < 2:
        return None
    stored = _stored(node, node.names[index], transposed)
    return None if stored is None else product(node, dy, stored)


def product(node: Node, dy: Value, stored: Stored) -> Value | None:
    """dy @ w.T for a matrix of integers; None if its rows are no whole bytes, or its bytes are not known."""
    given = node.value(stored.name)
    sizes = [size for size in given.sizes or () if isinstance(size, int)]
    if given.element_type not in INTEGERS or len(sizes) != 2 or len(given.sizes or ()) != 2:
        return None
    bits, signed = INTEGERS[given.element_type]
    (rows, columns), (row_block, column_block) = sizes, stored.block
    if columns * bits % BYTE or (column_block > 1 and column_block * bits % BYTE):
        return None
    b = given if bits == BYTE else _bytes(node, stored.name, rows * columns * bits // BYTE)
    if b is None:
        return None
    n, k = (rows, columns) if stored.transposed else (columns, rows)
    zeros = None if stored.zeros is None else stored.zeros.cast(TensorProto.FLOAT).like(dy)
    attributes = {"N": n, "K": k, "bits": bits, "row_block": row_block, "column_block": column_block}
    flags = {"transB": int(stored.transposed), "signed": int(signed)}
    return node.microsoft("QuantizedMatMulGrad", dy, b, stored.scales.like(dy), zeros, **attributes, **flags)


def _bytes(node: Node, name: str, count: int) -> Value | None:
    """The bytes of an initializer of a few bits; None if it is none.

    Values that are apart from the model are so for its bytes, too, which are `BYTES_SUFFIX` behind the same name.
    """
    tensor = node.forward.initializers.get(name)
    if tensor is None:
        return None
    if uses_external_data(tensor):
        same = TensorProto(name=name + BYTES_SUFFIX, data_type=TensorProto.UINT8, dims=[count])
        same.data_location = tensor.data_location
        same.external_data.extend(tensor.external_data)
        if all(each.name != same.name for each in node.body.initializers):
            node.body.initializers.append(same)
        return Value(node.body, same.name, TensorProto.UINT8, [count])
    content = packed_bytes(tensor)
    return node.body.constant(content) if content.size == count else None


def _stored(node: Node, name: str, transposed: bool) -> Stored | None:
    """The integers of which a matrix is made."""
    maker = node.maker(name)
    while maker is not None and maker.op_type in (*COPIES, "Transpose") and not domain_of(maker):
        if maker.op_type == "Transpose" and attributes_of(maker).get("perm", [1, 0]) != [1, 0]:
            return None
        transposed ^= maker.op_type == "Transpose"
        maker = node.maker(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear" or domain_of(maker) not in ("", MICROSOFT):
        return None
    if node.maker(maker.input[0]) is not None:
        return None  # weights that are rounded in each step are floats that are trained
    scales, given = node.value(maker.input[1]), attributes_of(maker)
    zeros = node.value(maker.input[2]) if len(maker.input) > 2 and maker.input[2] else None
    block = blocks(scales, given.get("axis", 1), given.get("block_size", 0))
    return None if block is None else Stored(maker.input[0], transposed, scales, zeros, block)


def blocks(scales: Value, axis: int, size: int = 0) -> tuple[int, int] | None:
    """The rows and columns of a matrix that share a scale, 0 for all; None if that is not known."""
    if scales.sizes is None:
        return None
    if list(scales.sizes) in ([], [1]):
        return 0, 0
    if axis % 2:
        return (1, size) if size else (0, 1)
    return (size, 1) if size else (1, 0)
