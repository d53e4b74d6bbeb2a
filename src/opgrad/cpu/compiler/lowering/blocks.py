"""Transposes square blocks in registers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir
from numba.core import types

from opgrad.cpu.compiler import simd
from opgrad.cpu.compiler.lowering.conversion import narrow, widen
from opgrad.cpu.compiler.lowering.masks import joined, load_first, masked_load, masked_store, store_first
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

PART_BITS: Final = 128  # of a register


def transposed(builder: Any, rows: list[Any], bits: int) -> list[Any]:
    """The columns of a square block whose elements have so many bits.

    Neighbouring rows are interleaved inside of the parts of a register, for which there are the cheapest shuffles. That
    leaves a column's elements in the same part of several vectors, and each column is gathered from its parts.
    """
    size = len(rows)
    inside = min(PART_BITS // bits, size)
    across = size // inside
    mixed = [_interleaved(builder, rows[first : first + inside]) for first in range(0, size, inside)]
    gathered = [_parts_gathered(builder, [vectors[column] for vectors in mixed], inside) for column in range(inside)]
    return [gathered[column][part] for part in range(across) for column in range(inside)]


def _interleaved(builder: Any, rows: list[Any]) -> list[Any]:
    """Of as many rows as a part has elements, the vectors whose parts are columns of their parts."""
    inside, size = len(rows), rows[0].type.count
    low = [part * inside + lane // 2 + lane % 2 * size for part in range(size // inside) for lane in range(inside)]
    high, half = [lane + inside // 2 for lane in low], inside // 2
    for _ in range(inside.bit_length() - 1):
        rows = [_shuffled(builder, rows[i], rows[i + half], pick) for i in range(half) for pick in (low, high)]
    return rows


def _parts_gathered(builder: Any, rows: list[Any], inside: int) -> list[Any]:
    """The transpose of a square block whose elements are parts, of so many elements each."""
    parts = len(rows)
    even = [part * inside + lane for part in range(0, 2 * parts, 2) for lane in range(inside)]
    odd = [lane + inside for lane in even]
    for _ in range(parts.bit_length() - 1):
        rows = [_shuffled(builder, rows[i], rows[i + 1], pick) for pick in (even, odd) for i in range(0, parts, 2)]
    return rows


def _shuffled(builder: Any, a: Any, b: Any, pick: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(pick)), pick))


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


@contextmanager
def _ways(builder: Any, size: int, rows: Any, columns: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Three branches: for a whole block, for one that lacks columns alone, and for any other; they meet afterwards."""
    all_rows = builder.icmp_signed(">=", rows, I64(size))
    whole = builder.and_(all_rows, builder.icmp_signed(">=", columns, I64(size)))
    tall = builder.and_(all_rows, builder.icmp_signed(">", columns, I64(0)))
    blocks = [builder.append_basic_block(name) for name in ("whole", "other", "tall", "any", "block.end")]
    builder.cbranch(whole, blocks[0], blocks[1])
    builder.position_at_end(blocks[1])
    builder.cbranch(tall, blocks[2], blocks[3])

    @contextmanager
    def branch(begin: Any) -> Iterator[None]:
        builder.position_at_end(begin)
        yield
        builder.branch(blocks[4])

    yield branch(blocks[0]), branch(blocks[2]), branch(blocks[3])
    builder.position_at_end(blocks[4])


@defines(simd.transpose_block_in)
def _(tile: Any, stride: Any, x: Any, row: Any, rows: Any, columns: Any) -> Any:
    size = x.lanes // 2
    kind = ir.VectorType(x.memory, size)

    def emit(context: Any, builder: Any, to: Any, step: Any, base: Any, row: Any, rows: Any, columns: Any) -> None:
        addresses = [at(builder, x, base, builder.mul(row, I64(r)), kind) for r in range(size)]
        found = []
        with _ways(builder, size, rows, columns) as (whole, tall, other):
            with whole:
                found.append(([builder.load(address, align=1) for address in addresses], builder.block))
            with tall:
                loaded = load_first(builder, addresses, kind, x.size, columns)
                found.append((loaded, builder.block))
            with other:
                masks = zip(addresses, row_masks(builder, size, rows, columns), strict=True)
                loaded = [masked_load(builder, address, kind, x.size, mask) for address, mask in masks]
                found.append((loaded, builder.block))
        loaded = [widen(builder, x, value, size) for value in joined(builder, kind, found)]
        for c, column in enumerate(transposed(builder, loaded, x.bits)):
            builder.store(column, plain(builder, to, tile, builder.mul(step, I64(c)), size), align=1)

    return types.none, emit


@defines(simd.transpose_block_out)
def _(y: Any, row: Any, tile: Any, stride: Any, rows: Any, columns: Any) -> Any:
    size = y.lanes // 2

    def emit(context: Any, builder: Any, to: Any, row: Any, base: Any, step: Any, rows: Any, columns: Any) -> None:
        loaded = [
            builder.load(plain(builder, base, tile, builder.mul(step, I64(c)), size), align=1) for c in range(size)
        ]
        values = [narrow(builder, y, value, size) for value in transposed(builder, loaded, y.bits)]
        addresses = [at(builder, y, to, builder.mul(row, I64(r)), value.type) for r, value in enumerate(values)]
        with _ways(builder, size, rows, columns) as (whole, tall, other):
            with whole:
                for value, address in zip(values, addresses, strict=True):
                    builder.store(value, address, align=1)
            with tall:
                store_first(builder, values, addresses, y.size, columns)
            with other:
                masks = row_masks(builder, size, rows, columns)
                for value, address, mask in zip(values, addresses, masks, strict=True):
                    masked_store(builder, value, address, y.size, mask)

    return types.none, emit
