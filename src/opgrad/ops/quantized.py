"""The gradient of products with quantized weights, several integers to a byte."""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, finite, operator
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes
from opgrad.contract.quantized import checked_bits, not_negative, number_like, quantized, whole_bytes

NODE = {"N": 0, "K": 0, "bits": 4, "row_block": 1, "column_block": 0, "transB": 1, "signed": 0, "zero_point": 0.0}


def _dy(shapes: Shapes, attributes: Attributes) -> Shape:
    quantized(shapes, attributes)
    return (*shapes["dy"][:-1], attributes["N"])


def _dx(shapes: Shapes, attributes: Attributes) -> Shape:
    return (*shapes["dy"][:-1], attributes["K"])


def _b(shapes: Shapes, attributes: Attributes) -> Shape:
    return number_like("b", shapes, quantized(shapes, attributes).packed)


def _scales(shapes: Shapes, attributes: Attributes) -> Shape:
    return number_like("scales", shapes, quantized(shapes, attributes).blocks)


def _zeros(shapes: Shapes, attributes: Attributes) -> Shape:
    sizes = quantized(shapes, attributes)
    packed = number_like("zero_points", shapes, sizes.packed_zeros)
    return packed if packed == shapes["zero_points"] else number_like("zero_points", shapes, sizes.blocks)


def _groups(shapes: Shapes, attributes: Attributes) -> Shape:
    return number_like("g_idx", shapes, (quantized(shapes, attributes).columns,))


Gradient = Annotated[Array, Tensor(FLOATS, _dy, "the shape of y, whose last size is N", ranks=range(1, 65))]
Packed = Annotated[Array, Tensor(("uint8", "int8"), _b, "the bytes of the weights' rows", ranks=range(1, 65))]
Scales = Annotated[Array, Tensor(FLOATS, _scales, "one for each block of weights")]
Zeros = Annotated[Array, Tensor(("uint8", *FLOATS), _zeros, "one for each block of weights, or bytes of packed ones")]
Groups = Annotated[Array, Tensor(("int32",), _groups, "one for each column of the weights")]


def _unpacked(b: Array, rows: int, columns: int, bits: int, signed: bool) -> Array:
    """The integers of packed rows, as float64."""
    if not rows:
        return np.zeros((0, columns))
    width = b.size // rows
    if bits == 8:
        parts = (b.view(np.int8) if signed else b).reshape(rows, width)
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        parts = (b.reshape(rows, width, 1) >> shifts & (2**bits - 1)).reshape(rows, width * len(shifts))
    q = parts[:, :columns].astype(np.float64)
    return np.where(q >= 2 ** (bits - 1), q - 2**bits, q) if signed and bits < 8 else q


def floats_of(
    b: Array, scales: Array, zero_points: Array | None, g_idx: Array | None, attributes: Attributes, signed: bool,
    zero_point: float,
) -> Array:  # fmt: skip
    """The weights that the integers stand for, as they lie in b: [rows, columns]."""
    sizes, bits = quantized({"b": b.shape}, attributes), attributes["bits"]
    q = _unpacked(b, sizes.rows, sizes.columns, bits, signed or b.dtype == np.int8)
    zero: Array = np.full(sizes.blocks, zero_point)
    if zero_points is not None and zero_points.dtype == np.uint8:
        zero = _unpacked(zero_points, sizes.blocks[0], sizes.blocks[1], bits, False)
    elif zero_points is not None:
        zero = zero_points.reshape(sizes.blocks)
    row = np.arange(sizes.rows) // sizes.row_block
    column = np.arange(sizes.columns) // sizes.column_block if g_idx is None else g_idx.reshape(-1)
    return np.asarray((q - zero[row][:, column]) * scales.reshape(sizes.blocks)[row][:, column])


@operator(
    support=IN_GRAPHS,
    results={"dx": Tensor(FLOATS, _dx, "the shape of dy, whose last size is K", dtype_of="dy")},
    onnx=OnnxName(
        "QuantizedMatMulGrad",
        attributes=NODE,
        types={"b": ("uint8", "int8"), "zero_points": ("uint8", "float32", "float16", "bfloat16")},
    ),
)
def quantized_matmul_grad(
    dy: Gradient, b: Packed, scales: Scales, zero_points: Zeros | None = None, g_idx: Groups | None = None,
    N: Annotated[int, not_negative] = 0, K: Annotated[int, not_negative] = 0,
    bits: Annotated[int, checked_bits] = 4, row_block: Annotated[int, not_negative] = 1,
    column_block: Annotated[int, whole_bytes] = 0, transB: bool = True, signed: bool = False,
    zero_point: Annotated[float, finite] = 0.0, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of y = x @ w.T with respect to x, for weights w [N, K] of a few bits, which are never unpacked whole.

    dy: gradient with respect to y, shape [.., N]; float32, float64, float16 or bfloat16.
    b: the integers of the weights, row by row, each row from a new byte on, the first integer of a byte in its lowest
        bits; uint8, or int8 for integers of 8 bits. Bytes of a row: those of C integers, rounded up to whole blocks.
    scales: a scale for each block, any shape of ceil(R / row_block) * ceil(C / column_block) numbers; any float dtype.
    zero_points: one for each block, floats, or uint8: packed as b is, each row of blocks from a new byte on.
    g_idx: the block of each column, int32 [C] in [-s, s) for s blocks in a row; None: those that lie side by side.
    N, K: the sizes of w. bits: of an integer, 2, 4 or 8.
    row_block, column_block: rows and columns of b that share a scale; 0: all of them.
    transB: whether the rows of b are those of w, R = N and C = K, as those of com.microsoft MatMulNBits; without it
        they are those of its transpose, R = K and C = N, as those of MatMul.
    signed: whether the integers are two's complement. zero_point: what they have where zero_points is None.

    Returns dx of shape [.., K] and the dtype of dy, summed in float32 (float64 for float64).

    Formula: dx = dy @ w, w = (b - zero_points) * scales. Source: the gradient of com.microsoft MatMulNBits, and of
    ONNX MatMul with a result of DequantizeLinear; QuantizedMatMulGrad is the node in com.microsoft here.

    Example:
    >>> dy, scales = np.array([[1.0, 2.0]], np.float32), np.array([[0.5], [0.25]], np.float32)
    >>> b = np.array([[0x98, 0x07], [0x86, 0x0C]], np.uint8)  # -8 is what they are less than: 0 1 -1 and -2 0 4
    >>> opgrad.quantized_matmul_grad(dy, b, scales, N=2, K=3, zero_point=8.0)
    array([[-1. ,  0.5,  1.5]], dtype=float32)
    """
    given = {"N": N, "K": K, "bits": bits, "row_block": row_block, "column_block": column_block, "transB": transB}
    w = floats_of(b, scales, zero_points, g_idx, given, signed, zero_point)
    return dy @ (w if transB else w.T)
