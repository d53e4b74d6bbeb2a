"""Transposes square blocks in registers."""

from typing import Any

from llvmlite import ir
from numba.core import types

from opgrad.cpu.compiler import simd
from opgrad.cpu.compiler.lowering.conversion import narrow, widen
from opgrad.cpu.compiler.lowering.masks import masked_load, masked_store
from opgrad.cpu.compiler.lowering.operations import (
    ELEMENT,
    I32,
    I64,
    PointerType,
    VectorType,
    at,
    defines,
    splat,
)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square block: in each step, rows that lie `distance` apart swap their off-diagonal parts."""
    size = len(rows)
    distance = size // 2
    while distance:
        low = [lane if not lane & distance else size + lane - distance for lane in range(size)]
        high = [lane + distance if not lane & distance else size + lane for lane in range(size)]
        for i in range(size):
            if not i & distance:
                pair = rows[i], rows[i + distance]
                kind = ir.VectorType(I32, size)
                rows[i], rows[i + distance] = (
                    builder.shuffle_vector(*pair, ir.Constant(kind, pick)) for pick in (low, high)
                )
        distance //= 2
    return rows


def row_masks(builder: Any, size: int, rows: Any, columns: Any) -> list[Any]:
    """For each row of a block, the lanes that exist: none in rows from `rows` on."""
    word = VectorType("i32", size)
    lane = ir.Constant(word.llvm, list(range(size)))
    width = builder.trunc(columns, I32)
    masks = []
    for row in range(size):
        exists = builder.icmp_signed("<", I64(row), rows)
        limit = splat(builder, word.lanes, builder.select(exists, width, I32(0)))
        masks.append(builder.icmp_signed("<", lane, limit))
    return masks


def plain(builder: Any, base: Any, p: PointerType, i: Any, size: int) -> Any:
    return at(builder, p, base, i, ir.VectorType(ELEMENT[p.element], size))


@defines(simd.transpose_block_in)
def _(tile: Any, stride: Any, x: Any, row: Any, rows: Any, columns: Any) -> Any:
    size = x.lanes // 2

    def emit(context: Any, builder: Any, to: Any, step: Any, base: Any, row: Any, rows: Any, columns: Any) -> None:
        kind = ir.VectorType(x.memory, size)
        loaded = []
        for r, mask in enumerate(row_masks(builder, size, rows, columns)):
            address = at(builder, x, base, builder.mul(row, I64(r)), kind)
            loaded.append(widen(builder, x, masked_load(builder, address, kind, x.size, mask), size))
        for c, column in enumerate(transposed(builder, loaded)):
            builder.store(column, plain(builder, to, tile, builder.mul(step, I64(c)), size), align=1)

    return types.none, emit


@defines(simd.transpose_block_out)
def _(y: Any, row: Any, tile: Any, stride: Any, rows: Any, columns: Any) -> Any:
    size = y.lanes // 2

    def emit(context: Any, builder: Any, to: Any, row: Any, base: Any, step: Any, rows: Any, columns: Any) -> None:
        loaded = [
            builder.load(plain(builder, base, tile, builder.mul(step, I64(c)), size), align=1) for c in range(size)
        ]
        masks = row_masks(builder, size, rows, columns)
        for r, value in enumerate(transposed(builder, loaded)):
            stored = narrow(builder, y, value, size)
            address = at(builder, y, to, builder.mul(row, I64(r)), stored.type)
            masked_store(builder, stored, address, y.size, masks[r])

    return types.none, emit
