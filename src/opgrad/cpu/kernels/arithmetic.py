"""Kernels of arithmetic: the gradients of division, before they are summed where an operand was broadcast; zeros."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import copy_bytes
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import both_offsets, elementwise, get, row_writer, scaling, times


@inline
def _one(p, i: int, whole: bool, mask) -> Vector:
    return v.full(p, v.load_one(p, 0))


def quotient_kernel(a_of: Callable[..., Vector], b_of: Callable[..., Vector]) -> Kernel:
    """The kernel of da and db before they are summed. a_of, b_of: load a vector, or one element for the row."""

    def dividend(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, _, b = arrays
        return get(dy, i, whole, mask) / b_of(b, i, whole, mask)

    def divisor(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, a, b = arrays
        by = b_of(b, i, whole, mask)
        return -(get(dy, i, whole, mask) / by) * (a_of(a, i, whole, mask) / by)

    write_dividend, write_divisor = row_writer(dividend), row_writer(divisor)

    @kernel
    def quotients(
        units: Units, blocks, n, loops, table,
        dy: Pointer, a: Pointer, b: Pointer, da: Pointer, db: Pointer, stream,
    ):  # fmt: skip
        """loops: how many are around rows; table: the address of their table (see `both_offsets`) for a and b."""
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            a_at, b_at = both_offsets(table, loops, row)
            at, end = row * n, min(begin + BLOCK, n)
            arrays = (dy + at, a + a_at, b + b_at)
            write_dividend(da + at, begin, end, stream, arrays, ())
            write_divisor(db + at, begin, end, stream, arrays, ())

    return quotients


EACH, ONE_DIVIDEND, ONE_DIVISOR = quotient_kernel(get, get), quotient_kernel(_one, get), quotient_kernel(get, _one)


@kernel
def copy_words(source, count, target: Pointer):
    copy_bytes(v.address_of(target), source, 8 * count)


@elementwise
def zero_gradient(x: Vector, alpha: float) -> Vector:
    return v.like(x, 0.0)


SUM, VALUE = elementwise(lambda buffer, value, alpha: buffer + value), elementwise(lambda value, alpha: value)
TIMES, DIVIDED = scaling(times), scaling(lambda x, factor: x / factor)
