"""Weights of a few bits, several to a byte, with a scale for each block, as onnxruntime's quantizers write them."""

from typing import Any

import numpy as np
from onnx import TensorProto

from opgrad.contract.quantized import BYTE
from opgrad.contract.quantized import quantized as sizes
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.plain import quantized
from opgrad.onnx.rules.node import Node, NoGradient, numbers_of, sizes_of
from opgrad.onnx.rules.registry import Gradients, in_float32, recomputed

# Attributes of MatMulNBits with their defaults.
NBITS = {"N": 0, "K": 0, "block_size": 32, "bits": 4}
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
    """The numbers of so many bits in each byte; see `opgrad.onnx.plain.quantized.unpacked`."""
    if bits not in (1, 2, 4, BYTE):
        raise NoGradient(f"its weights have {bits} bits, expected 1, 2, 4 or 8")
    return quantized.unpacked(bytes_, len(sizes_of(bytes_)), bits)


def _gradient_of_a(node: Node) -> Gradients:
    """da = dy @ w, by the operator that unpacks tiles of w in the cache; db = dy, summed over all rows."""
    zeros = node.input(3)
    if zeros is not None and zeros.element_type != TensorProto.UINT8:
        zeros = zeros.like(node.dy)
    given = [node.dy, node.required(1), node.required(2).like(node.dy), zeros, node.input(4)]
    dx = node.microsoft("QuantizedMatMulGrad", *given, **_attributes(node))
    return [dx, None, None, None, None, None if node.input(5) is None else node.unbroadcast(node.dy, 5)]


def _attributes(node: Node) -> dict[str, Any]:
    """The attributes of MatMulNBits by the names of `quantized_matmul_grad`."""
    rows, depth, block, bits = (node.get(name, default) for name, default in NBITS.items())
    if bits not in (2, 4, BYTE):
        raise NoGradient(f"its weights have {bits} bits, expected 2, 4 or 8")
    if node.get("weight_prepacked", 0):
        raise NoGradient("its weights are in the order of a kernel; export it with weight_prepacked=0")
    zeros = node.input(3)
    if node.input(4) is not None and (bits != 4 or (zeros is not None and zeros.element_type == TensorProto.UINT8)):
        raise NoGradient("it has g_idx, which onnxruntime reads with 4 bits and without packed zero points alone")
    return {"N": rows, "K": depth, "bits": bits, "column_block": block, "zero_point": 2.0 ** (bits - 1)}


@recomputed("MatMulNBits", domain=MICROSOFT, constant=(1, 4), direct=((0, 5), _gradient_of_a))
@in_float32
def matmul_nbits(node: Node) -> Value:
    """y = a @ w.T + bias, w = (b - zero_points) * scales by blocks."""
    given = _attributes(node) | {"row_block": 1, "transB": 1}
    packed = node.input(3) is not None and node.required(3).element_type == TensorProto.UINT8
    operands = node.required(1), node.required(2), node.input(3), node.input(4)
    whole = quantized.QuantizedWeights(*operands, sizes({}, given), given["bits"], packed, False, given["zero_point"])
    y, bias = node.body.node("MatMul", node.x, whole.floats().transpose(1, 0)), node.input(5)
    return y if bias is None else y + bias


@recomputed("MatMulBnb4", domain=MICROSOFT, constant=(1,))
@in_float32
def matmul_bnb4(node: Node) -> Value:
    """y = a @ w.T, w = table[b] * absmax by blocks, the first of two numbers in a byte in its upper half."""
    rows, depth, block = (node.get(name) for name in ("N", "K", "block_size"))
    body, bytes_ = node.body, node.required(1)
    halves = [
        quantized.shifted(bytes_, 4, "RIGHT"),
        quantized.shifted(quantized.shifted(bytes_, 4, "LEFT"), 4, "RIGHT"),
    ]
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
