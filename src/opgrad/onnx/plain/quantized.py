"""Quantized weights as floats, and the gradient of products with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from opgrad.contract.quantized import BYTE, Quantized, quantized
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.lowering import Call, in_float32, lowers

DEFAULTS = {"N": 0, "K": 0, "bits": 4, "row_block": 1, "column_block": 0, "transB": 1, "signed": 0, "zero_point": 0.0}


def unpacked(bytes_: Value, rank: int, bits: int) -> Value:
    """The numbers of so many bits in each byte, the lowest bits first, along the last axis; of uint8 as the bytes.

    Two shifts cut a number out: the first drops the bits above it, the second those below.
    """
    if bits == BYTE:
        return bytes_
    parts = []
    for index in range(BYTE // bits):
        above = BYTE - bits * (index + 1)
        cut = shifted(shifted(bytes_, above, "LEFT"), BYTE - bits, "RIGHT")
        parts.append(cut.unsqueeze(rank))
    whole = bytes_.body.concat(*parts, axis=rank)
    return whole.reshape(bytes_.body.concat(bytes_.shape(0, rank - 1), bytes_.body.ints([-1])))


def shifted(bytes_: Value, count: int, direction: str) -> Value:
    """Bytes shifted by so many bits."""
    return bytes_.body.node("BitShift", bytes_, bytes_.body.number(count, bytes_), direction=direction)


@dataclass(frozen=True)
class QuantizedWeights:
    """Quantized weights as `quantized_matmul_grad` takes them.

    packed_zeros: whether zero points are bytes of several. signed: whether integers are two's complement, in bytes
    without a sign. other: a value of the run; the shapes of b and scales then depend on it, though they are always the
    same: what depends on constants alone runtimes compute once for all, and floats take 8 times the bytes of 4 bits.
    """

    b: Value
    scales: Value
    zeros: Value | None
    groups: Value | None
    sizes: Quantized
    bits: int
    packed_zeros: bool
    signed: bool
    zero_point: float
    other: Value | None = None

    def floats(self) -> Value:
        """The weights, as [rows, columns] of the type of the scales."""
        sizes, bits = self.sizes, self.bits
        numbers = unpacked(self.b.reshape(self._shape(sizes.packed)), 2, bits).like(self.scales)
        if self.signed:
            half = 2.0 ** (bits - 1)
            numbers = self.b.body.where(numbers > half - 0.5, numbers - 2 * half, numbers)
        stored = sizes.row_bytes * BYTE // bits
        in_blocks = self.groups is None and sizes.row_block == 1 and stored == sizes.blocks[1] * sizes.column_block
        if in_blocks:
            numbers = numbers.reshape([sizes.rows, sizes.blocks[1], sizes.column_block])
        elif stored > sizes.columns:
            numbers = numbers.slice(0, sizes.columns, 1)
        scales, offset = self._of_blocks(self.scales, in_blocks), self._zeros(in_blocks)
        w = (numbers - offset) * scales
        if in_blocks:
            w = w.reshape([sizes.rows, stored])
            w = w if stored == sizes.columns else w.slice(0, sizes.columns, 1)
        return w

    def _shape(self, sizes: Sequence[int]) -> Value:
        shape = self.b.body.ints(sizes)
        return shape if self.other is None else shape + (self.other.size() < 0).cast(TensorProto.INT64)

    def _zeros(self, in_blocks: bool) -> Value | float:
        blocks = self.sizes.blocks
        if self.zeros is None:
            return self.zero_point
        if not self.packed_zeros:
            return self._of_blocks(self.zeros.like(self.scales), in_blocks)
        bytes_ = self.zeros.reshape([blocks[0], self.sizes.zero_bytes])
        return self._of_blocks(unpacked(bytes_, 2, self.bits).slice(0, blocks[1], 1).like(self.scales), in_blocks)

    def _of_blocks(self, values: Value, in_blocks: bool) -> Value:
        """What each block has, for each of its weights, or in a shape that broadcasts to them.

        in_blocks: whether weights are [rows, blocks, columns of a block].
        """
        sizes, body = self.sizes, values.body
        found = values.reshape(self._shape(sizes.blocks))
        if in_blocks:
            return found.unsqueeze(2)
        if sizes.row_block > 1 and sizes.blocks[0] > 1:
            found = body.node("Gather", found, body.constant(np.arange(sizes.rows) // sizes.row_block), axis=0)
        if self.groups is not None:
            return body.node("Gather", found, self.groups.reshape([sizes.columns]), axis=1)
        if sizes.column_block > 1 and sizes.blocks[1] > 1:
            found = body.node("Gather", found, body.constant(np.arange(sizes.columns) // sizes.column_block), axis=1)
        return found


def weights_of(call: Call, places: Sequence[int], given: dict[str, Any]) -> QuantizedWeights:
    """The weights of a node. places: indices of b, scales, zero points and groups. given: its attributes."""
    b, scales, zeros, groups = places
    shape = call.input_shapes[b]
    known = shape is not None and all(isinstance(size, int) for size in shape)
    sizes = quantized({"b": tuple(size or 0 for size in shape or ())} if known else {}, given)
    int8 = call.input_types[b] == TensorProto.INT8
    packed = given["bits"] < BYTE and zeros < len(call.input_types) and call.input_types[zeros] == TensorProto.UINT8
    signed = bool(given["signed"]) and not int8
    operands = call.required(b), call.required(scales), call.input(zeros), call.input(groups)
    return QuantizedWeights(*operands, sizes, given["bits"], packed, signed, given["zero_point"], call.required(0))


@lowers("QuantizedMatMulGrad")
@in_float32(0)
def quantized_matmul_grad(call: Call) -> Sequence[Value]:
    """dx = dy @ w, w = (b - zero_points) * scales."""
    given = {name: call.get(name, default) for name, default in DEFAULTS.items()}
    w = weights_of(call, (1, 2, 3, 4), given).floats()
    return [call.body.node("MatMul", call.required(0), w if given["transB"] else w.transpose(1, 0))]
