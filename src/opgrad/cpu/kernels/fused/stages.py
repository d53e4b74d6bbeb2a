"""The driver that takes each block of a problem through stages, and the stages that read and write memory.

A stage is a small kernel that the driver calls through its address. Stages are compiled one by one, not for each
combination of them, and a call of one costs about 15 ns. A block lies in a buffer in the first-level cache, in the
precision of the computation. All stages have the same arguments. `read`, `write` and `keep` copy the lines of a chunk
between a buffer and memory; `read` and `write` also multiply by alpha, which costs no time. All others work on buffers
(opgrad.cpu.kernels.fused.post_ops).

An operand of any strides is described by a table: a word for the stage's own use, the number of loops over its
elements, then three words for each loop, the innermost first, as `both_offsets` takes them: its size, its stride in
bytes, and 0. Flat indices count elements in these loops' order.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.compiler.words import call_address, load_word, stack_words, store_word
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get, mapped, put, write_times
from opgrad.cpu.kernels.numerics.philox import keep_run
from opgrad.cpu.kernels.strided import both_offsets

# --- reading and writing ----------------------------------------------------------------------------------------------

OWN, LOOPS, SIZE, STRIDE = range(4)
LOOP: Final = 24  # bytes of a loop in a table
OUTER: Final = 8 * SIZE + LOOP  # where the second loop stands
NOTHING_DROPPED: Final = -1  # in place of dropout's threshold


class Chunk(NamedTuple):
    """A chunk: its first element, and `count` lines of `width` elements each.

    In memory lines begin `pitch` elements apart, in buffers `row` elements.
    """

    start: int
    count: int
    pitch: int
    width: int
    row: int


@inline
def _run_start(table: int, run: int) -> int:
    """The place in bytes at which a run of the innermost loop starts."""
    offset, _ = both_offsets(table + OUTER, load_word(table, LOOPS) - 1, run)
    return offset


def _over_lines(visit: Callable[..., None]) -> Kernel:
    """The stage that calls visit(values, operand, alpha, offset, step, count, ahead, table) for each run of the lines.

    A run is `count` elements in memory, `step` bytes apart, the first of them `offset` bytes behind the operand.
    """

    @inline
    def line(values, operand, alpha: float, flat: int, width: int, ahead: int, table: int) -> None:
        size, step = load_word(table, SIZE), load_word(table, STRIDE)
        run, inside, done = 0, flat, 0
        if load_word(table, LOOPS) > 1:
            run = flat // size
            inside = flat - run * size
        start = _run_start(table, run)
        while done < width:
            count = min(size - inside, width - done)
            visit(values + done, operand, alpha, start + inside * step, step, count, ahead, table)
            done, run, inside = done + count, run + 1, 0
            if done < width:
                two = load_word(table, LOOPS) == 2
                start = start + load_word(table + OUTER, 1) if two else _run_start(table, run)

    @kernel
    def stage(
        values: Pointer, operand: Pointer, third, count, alpha: Float, beta: Float, lines: Chunk, table
    ):  # fmt: skip
        for each in range(lines.count):
            flat = lines.start + each * lines.pitch
            line(values + each * lines.row, operand, alpha, flat, lines.width, lines.row, table)

    return stage


@inline
def _size(p) -> int:
    return v.address_of(p + 1) - v.address_of(p)


@inline
def _read_vector(total, arrays, i: int, whole: bool, mask, numbers):
    (values, p), (alpha, ahead) = arrays, numbers
    put(values, i, get(p, i, whole, mask) * alpha, whole, mask, 0)
    if whole:
        v.prefetch(p, i + ahead)  # of the next chunk; this saves 5 to 10 % of a call
    return total


_read_neighbours, _fill = fold(_read_vector), mapped(lambda values, value: value)


@inline
def _read_run(values, operand, alpha: float, offset: int, step: int, count: int, ahead: int, table: int) -> None:
    p = v.at_byte(operand, offset)
    if step == _size(p):
        _read_neighbours((), 0, count, (values, p), (alpha, ahead))
    elif step == 0:
        _fill(values, 0, count, 0, (values,), (v.full(values, v.load_one(p, 0)) * alpha,))
    else:
        for i in range(count):
            v.store_one(values, i, v.load_one(v.at_byte(p, i * step), 0) * v.number(values, alpha))


@inline
def _write_run(values, operand, alpha: float, offset: int, step: int, count: int, ahead: int, table: int) -> None:
    p = v.at_byte(operand, offset)
    if step == _size(p):
        write_times(p, 0, count, load_word(table, OWN), (values,), (alpha,))
    else:
        for i in range(count):
            v.store_one(v.at_byte(p, i * step), 0, v.load_one(values, i) * v.number(values, alpha))


@inline
def _keep_run(values, operand, alpha: float, offset: int, step: int, count: int, ahead: int, table: int) -> None:
    state, threshold = v.address_of(operand), load_word(table, OWN)
    if threshold == NOTHING_DROPPED:
        _fill(values, 0, count, 0, (values,), (v.full(values, 1.0),))
    else:
        keep_run(values, 0, count, offset, step, load_word(state, 0), load_word(state, 1), threshold)


# values = alpha * the operand's elements.
read = _over_lines(_read_run)
# The operand's elements = alpha * values; the table's own word tells whether they are written past the cache.
write = _over_lines(_write_run)
# values = 1 where dropout keeps an element, else 0. operand: seed and offset. The table gives the place in C order
# of each element; its own word is the threshold.
keep = _over_lines(_keep_run)


# --- the driver -------------------------------------------------------------------------------------------------------

# Words of a stage: its address; the places of its three arrays in the table of addresses; alpha, beta, and its table.
TASK, VALUES, ALPHA, BETA, TABLE, STAGE = 0, 1, 4, 5, 6, 7
# The arguments of a stage: three arrays, count, alpha, beta, lines, table.
COUNT, NUMBERS, LINES, OWN_TABLE, ARGUMENTS = 3, 4, 6, 11, 12


class BlockCut(NamedTuple):
    """How a problem is cut into blocks of `per_block` rows or columns, and a block into lines.

    strips: blocks of columns for each outer index; 0 if blocks have rows. pitch, row: the elements from line to line in
    memory and in a buffer. together: lines of a chunk.
    """

    per_block: int
    outer: int
    n: int
    inner: int
    strips: int
    pitch: int
    row: int
    together: int


class Softmax(NamedTuple):
    """A kernel in place, and what it is given besides the values (see `rows.Block`); buffers are offsets in bytes."""

    task: int
    other: int
    stats: int
    tile: int
    inf_as_zero: int


class Stages(NamedTuple):
    """The address of the buffers' offsets and then the stages' words; the numbers of operands, of buffers, of stages.

    The first two buffers hold a whole block: the values, and y in gradients. Others hold a chunk.
    """

    words: int
    operands: int
    buffers: int
    before: int
    of_rows: int
    after: int


@inline
def _run(stages: int, number: int, addresses: int, words: int) -> None:
    """Run stages, whose count and lines stand in `words` already."""
    for each in range(number):
        stage = stages + 8 * STAGE * each
        for array in range(3):
            store_word(words, array, load_word(addresses, load_word(stage, VALUES + array)))
        store_word(words, NUMBERS, load_word(stage, ALPHA))
        store_word(words, NUMBERS + 1, load_word(stage, BETA))
        store_word(words, OWN_TABLE, load_word(stage, TABLE))
        call_address(load_word(stage, TASK), words, 0)


@inline
def _store_words(address: int, index: int, values) -> None:
    for offset, value in enumerate(values):
        store_word(address, index + offset, value)


@inline
def _run_in_chunks(stages: int, number: int, addresses: int, words: int, cut, block, buffers: int, moving) -> None:
    """Run all stages over one chunk of a block after the other, so that a chunk stays in the first-level cache."""
    (start, lines, rest), (space, other, item) = block, moving
    together = max(cut.together, 1)  # a range's step is never 0
    for line in range(0, lines, together):
        at, some = line * cut.row, min(together, lines - line)
        width = rest if cut.strips else min(cut.row, rest - at)
        _store_words(words, COUNT, ((some - 1) * cut.row + width,))
        _store_words(words, LINES, (start + line * cut.pitch, some, cut.pitch, width, cut.row))
        _store_words(addresses, buffers, (space + at * item, other + at * item))
        _run(stages, number, addresses, words)


@inline
def _block(cut, unit: int):
    """A block's first element, its number of lines and its width; the place of its first row, and how many it has."""
    if cut.strips:
        o, j = unit // cut.strips, unit % cut.strips * cut.per_block
        width = min(cut.per_block, cut.inner - j)
        return (o * cut.n * cut.inner + j, cut.n, width), o * cut.inner + j, width
    first, rows = unit * cut.per_block, min(cut.per_block, cut.outer - unit * cut.per_block)
    return (first * cut.n, (rows * cut.n + cut.row - 1) // cut.row, rows * cut.n), first, rows


@kernel
def blocks(
    units: Units, cut: BlockCut, stages: Stages, softmax: Softmax, operands, space: Private, addresses: Private, item
):
    """Each unit is a block. addresses: memory for the table of the addresses of operands and buffers."""
    words, own, table = stack_words(ARGUMENTS), v.address_of(space), v.address_of(addresses)
    for number in range(stages.operands):
        store_word(table, number, load_word(operands, number))
    for number in range(stages.buffers):
        store_word(table, stages.operands + number, own + load_word(stages.words, number))
    before = stages.words + 8 * stages.buffers
    of_rows = before + 8 * STAGE * stages.before
    after, moving = of_rows + 8 * STAGE * stages.of_rows, (own, own + softmax.other, item)
    for unit in units:
        block, row, rows = _block(cut, unit)
        _run_in_chunks(before, stages.before, table, words, cut, block, stages.operands, moving)
        _store_words(words, 0, (own, own + softmax.other, own + softmax.stats, own + softmax.tile, rows, cut.n))
        _store_words(words, 6, (cut.per_block, softmax.inf_as_zero))
        call_address(softmax.task, words, 0)
        _store_words(words, LINES, (row, 1, 0, rows, 0))
        _run(of_rows, stages.of_rows, table, words)
        _run_in_chunks(after, stages.after, table, words, cut, block, stages.operands, moving)
