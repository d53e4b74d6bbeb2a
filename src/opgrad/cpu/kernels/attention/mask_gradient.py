"""The gradient of an additive mask: the sum of the scores' gradients over the axes along which it is broadcast."""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Units
from opgrad.cpu.kernels.attention.backward import (
    ROWS,
    BackwardInputs,
    BackwardMemory,
    Packed,
    fill_tile,
    pack_queries,
    pack_values,
)
from opgrad.cpu.kernels.attention.tiles import Drop, Scores, Seen, TileSizes, keys_of, span_of
from opgrad.cpu.kernels.loops.fold import sum_range
from opgrad.cpu.kernels.loops.map import clear, write_same, write_sum


class MaskGradient(NamedTuple):
    """dmask with its strides, its sizes, and the keys of a block."""

    data: Pointer
    batch: int
    head: int
    row: int
    batches: int
    heads: int
    rows: int
    keys: int
    block: int


@inline
def _axis(size: int, length: int, place: int, block: int) -> tuple[int, int]:
    """The places of an axis that are summed up for this place of the mask: a block of them, or all."""
    return (place * block, min((place + 1) * block, length)) if size == length else (0, length)


@inline
def _add_tiles(
    inputs: BackwardInputs, sizes: TileSizes, seen: Seen, scores: Scores, drop: Drop, packed: Packed,
    memory: BackwardMemory, sums: Private, at: tuple[int, int, int, int, int],
) -> None:  # fmt: skip
    """Add the gradients of a block of scores of one head, for its queries [low, high) and keys from `first` on."""
    batch, head, low, high, first, stop = at
    kv_head, tile = head // (sizes.heads // sizes.kv_heads), memory.tile
    _, _, k, k_end, shift = span_of(seen, batch)
    begin, _ = keys_of(seen, low, k, k_end, shift)
    _, end = keys_of(seen, high - 1, k, k_end, shift)
    key, columns = max(begin, first), min(end, stop) - max(begin, first)
    if columns > 0:
        pack_queries(inputs, sizes, scores.factor, packed, (batch, head), low, high - low)
        pack_values(inputs, sizes, memory.keys, (batch, kv_head), key, key + columns)
        part = batch, head, low, high, 0, key, columns, 0
        fill_tile(inputs, sizes, seen, scores, drop, packed, memory.keys, tile, part, (k, k_end, shift))
        for row in range(high - low):
            total = sums + (row * tile.pitch + key - first)
            write_sum(total, 0, columns, 0, (total, tile.ds + row * tile.pitch), ())


@inline
def _write(dmask: MaskGradient, sizes: TileSizes, sums: Private, pitch: int, target, count: int, columns: int) -> None:
    """Write the sums of a block, over its rows or columns if the mask has one of them."""
    if dmask.rows != sizes.queries:
        for row in range(1, count):
            write_sum(sums, 0, columns, 0, (sums, sums + row * pitch), ())
    for row in range(count if dmask.rows == sizes.queries else 1):
        line, out = sums + row * pitch, target + row * dmask.row
        if dmask.keys == sizes.keys:
            write_same(out, 0, columns, 0, (line,), ())
        else:
            v.store_one(out, 0, v.reduce_add(sum_range(0, columns, (line,), ())))


@kernel
def sum_mask(
    units: Units, dmask: MaskGradient, sizes: TileSizes, seen: Seen, scores: Scores, drop: Drop, inputs: BackwardInputs,
    packed: Packed, memory: BackwardMemory, sums: Private,
):  # fmt: skip
    """A unit is a block of rows and keys of the mask, of one of its batch entries and heads."""
    across = -(-dmask.keys // dmask.block)
    down = -(-dmask.rows // ROWS)
    for unit in units:
        column, row, head, batch = unit % across, unit // across % down, unit // across // down, 0
        batch, head = head // dmask.heads, head % dmask.heads
        first_batch, stop_batch = _axis(dmask.batches, sizes.batch, batch, 1)
        first_head, stop_head = _axis(dmask.heads, sizes.heads, head, 1)
        low, high = _axis(dmask.rows, sizes.queries, row, ROWS)
        first, stop = _axis(dmask.keys, sizes.keys, column, dmask.block)
        clear(sums, ROWS * memory.tile.pitch)
        for b in range(first_batch, stop_batch):
            for h in range(first_head, stop_head):
                for query in range(low, high, ROWS):
                    for block in range(-(-(stop - first) // dmask.block)):
                        key = first + block * dmask.block
                        at = b, h, query, min(query + ROWS, high), key, min(key + dmask.block, stop)
                        _add_tiles(inputs, sizes, seen, scores, drop, packed, memory, sums, at)
        target = dmask.data + (batch * dmask.batch + head * dmask.head + row * ROWS * dmask.row + column * dmask.block)
        columns = min(dmask.block, stop - first)
        _write(dmask, sizes, sums, memory.tile.pitch, target, min(ROWS, high - low), columns)
