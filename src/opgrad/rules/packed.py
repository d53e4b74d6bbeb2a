"""Weights of a few bits, several to a byte, with a scale for each block, as onnxruntime's quantizers write them."""

import numpy as np
from onnx import TensorProto

from opgrad.graph.formulas import Value
from opgrad.graph.messages import MICROSOFT
from opgrad.rules.errors import NoGradient
from opgrad.rules.node import Node
from opgrad.rules.registry import in_float32, recomputed
from opgrad.rules.shaping import numbers_of, sizes_of

BYTE = 8  # bits
# What the numbers of 4 bits stand for, by the type of quantization: bitsandbytes' fp4, and nf4 of the QLoRA paper.
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
TABLES = {
    0: np.concatenate([FP4, -FP4]),
    1: np.array(
        [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0,
         0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32,
    ),
}  # fmt: skip


def unpacked(node: Node, bytes_: Value, bits: int) -> Value:
    """The numbers of so many bits in each byte, the lowest bits first, along the last axis; of uint8 as the bytes.

    Two shifts cut a number out: the first drops the bits above it, the second those below.
    """
    if bits not in (1, 2, 4, BYTE):
        raise NoGradient(f"its weights have {bits} bits, expected 1, 2, 4 or 8")
    if bits == BYTE:
        return bytes_
    rank, parts = len(sizes_of(bytes_)), []
    for place in range(BYTE // bits):
        above = BYTE - bits * (place + 1)
        cut = _shifted(_shifted(bytes_, above, "LEFT"), BYTE - bits, "RIGHT")
        parts.append(cut.unsqueeze(rank))
    whole = node.body.concat(*parts, axis=rank)
    return whole.reshape(node.body.concat(bytes_.shape(0, rank - 1), node.body.ints([-1])))


def _shifted(bytes_: Value, count: int, direction: str) -> Value:
    return bytes_.body.node("BitShift", bytes_, bytes_.body.number(count, bytes_), direction=direction)


@recomputed("MatMulNBits", domain=MICROSOFT, constant=(1, 4))
@in_float32
def matmul_nbits(node: Node) -> Value:
    """y = a @ w.T + bias, w = (b - zero_points) * scales by blocks."""
    if node.get("weight_prepacked", 0):
        raise NoGradient("its weights are in the order of a kernel; export it with weight_prepacked=0")
    rows, depth, block = (node.get(name) for name in ("N", "K", "block_size"))
    blocks = -(-depth // block)
    w = _weights(node, rows, depth, blocks, block)
    y, bias = node.body.node("MatMul", node.x, w.transpose(1, 0)), node.input(5)
    return y if bias is None else y + bias


def _weights(node: Node, rows: int, depth: int, blocks: int, block: int) -> Value:
    """The weights as floats, [rows, depth]."""
    x, bits = node.x, node.get("bits", 4)
    whole = unpacked(node, node.required(1), bits).like(x).reshape([rows, blocks * block])
    zeros = node.input(3)
    packed = zeros is not None and zeros.element_type != x.element_type
    if zeros is not None and packed:
        bytes_ = node.with_sizes(zeros.reshape([rows, -1]), [rows, -(-blocks * bits // BYTE)])
        zeros = unpacked(node, bytes_, bits).slice(0, blocks, 1).like(x)
    scales, groups = node.required(2).reshape([rows, blocks]), node.input(4)
    zero = 2.0 ** (bits - 1) if zeros is None else zeros.reshape([rows, blocks])
    if groups is not None and (bits != 4 or packed):
        raise NoGradient("it has g_idx, which onnxruntime reads with 4 bits and without packed zero points alone")
    if groups is None:
        offset = zero if isinstance(zero, float) else zero.unsqueeze(2)
        parts = (whole.reshape([rows, blocks, block]) - offset) * scales.unsqueeze(2)
        return parts.reshape([rows, blocks * block]).slice(0, depth, 1)
    scale = node.body.node("Gather", scales, groups, axis=1)
    offset = zero if isinstance(zero, float) else node.body.node("Gather", zero, groups, axis=1)
    return (whole.slice(0, depth, 1) - offset) * scale


@recomputed("MatMulBnb4", domain=MICROSOFT, constant=(1,))
@in_float32
def matmul_bnb4(node: Node) -> Value:
    """y = a @ w.T, w = table[b] * absmax by blocks, the first of two numbers in a byte in its upper half."""
    rows, depth, block = (node.get(name) for name in ("N", "K", "block_size"))
    body, bytes_ = node.body, node.required(1)
    halves = [_shifted(bytes_, 4, "RIGHT"), _shifted(_shifted(bytes_, 4, "LEFT"), 4, "RIGHT")]
    places = body.concat(*(each.unsqueeze(1) for each in halves), axis=1).reshape([-1]).slice(0, rows * depth)
    numbers = body.node("Gather", body.constant(TABLES[node.get("quant_type")]), places.cast(TensorProto.INT32))
    scales = body.node("Gather", node.required(2), body.constant(np.arange(rows * depth) // block))
    w = (numbers * scales).reshape([rows, depth])
    return body.node("MatMul", node.x, w.transpose(1, 0) if node.get("transB", 1) else w)


@recomputed("GatherBlockQuantized", domain=MICROSOFT, constant=(0, 1, 3))
@in_float32
def gather_block_quantized(node: Node) -> Value:
    """y = (data[index] - zero_points[index]) * scales[index], by blocks; only scales have a gradient."""
    data, scales, zeros, rank = node.x, node.required(2), node.input(3), node.rank()
    if node.get("gather_axis", 0) or node.get("quantize_axis", 1) % rank != rank - 1:
        raise NoGradient("it gathers along another axis than the first, or its blocks are not along the last")
    packed = data.element_type == TensorProto.UINT8
    bits = node.get("bits", 4) if packed else 4
    width = numbers_of(data, -1)[0] * (BYTE // bits if packed else 1)
    blocks = -(-width // node.get("block_size", 128))
    numbers = _rows(node, data, bits if packed else None, width).like(scales)
    scale = _rows(node, scales, None, blocks)
    offset: Value | float = 2.0 ** (bits - 1) if packed else 0.0
    if zeros is not None:
        offset = _stretched(node, _rows(node, zeros, bits if packed else None, blocks).like(scales), width)
    return (numbers - offset) * _stretched(node, scale, width)


def _rows(node: Node, table: Value, bits: int | None, width: int) -> Value:
    """The rows of a table that the indices choose, of so many numbers each; bits: of a number, None for no bytes."""
    rows, indices = node.body.node("Gather", table, node.required(1)), len(sizes_of(node.required(1)))
    if bits is None:
        return rows
    rank = indices + node.rank() - 1
    return unpacked(node, node.with_sizes(rows, [None] * rank), bits).slice(0, width, rank - 1)


def _stretched(node: Node, blocks: Value, width: int) -> Value:
    """What each block has, for each of its numbers."""
    places = node.body.constant(np.arange(width) // node.get("block_size", 128))
    return node.body.node("Gather", blocks, places, axis=len(sizes_of(node.required(1))) + node.rank() - 2)
