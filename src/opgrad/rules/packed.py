"""Weights of a few bits, several to a byte, with a scale for each block, as onnxruntime's quantizers write them."""

from opgrad.graph.formulas import Value
from opgrad.graph.messages import MICROSOFT
from opgrad.rules.errors import NoGradient
from opgrad.rules.node import Node
from opgrad.rules.registry import in_float32, recomputed
from opgrad.rules.shaping import sizes_of

BYTE = 8  # bits


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
