"""The driver that takes each block of a problem through stages, and the stages that read and write memory.

A stage is a small kernel that the driver calls through its address. Stages are compiled one by one, not for each
combination of them, and a call of one costs about 15 ns. A block lies in a buffer in the first-level cache, in the
precision of the computation. There are two kinds of stages, with different arguments: `read`, `write` and `keep` get
the place of a block in memory; all others work on buffers (opgrad.cpu.kernels.fused.post_ops). `read` and `write` also
multiply by alpha, which costs no time.

An operand of any strides is described by a table: a word for the stage's own use, the number of loops over its
elements, then size and stride in bytes of each, the innermost first. Flat indices count elements in these loops' order.
"""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import call_address, load_word, stack_words, store_word
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get, mapped, put, times
from opgrad.cpu.kernels.numerics.philox import keep_run

# --- tables ---------------------------------------------------------------------------------------------------------

OWN, LOOPS, FIRST_LOOP = 0, 1, 2


@inline
def _locate(table: int, flat: int) -> tuple[int, int, int]:
    """The place of element `flat` in bytes, the place at which its innermost loop starts, its index in that loop."""
    loops, word, offset = load_word(table, LOOPS), FIRST_LOOP + 2, 0
    size, rest = load_word(table, FIRST_LOOP), flat
    if loops > 1:
        rest = flat // size
    inside = flat - rest * size if loops > 1 else flat
    for loop in range(1, loops):
        index = rest
        if loop + 1 < loops:
            rest = rest // load_word(table, word)
            index -= rest * load_word(table, word)
        offset += index * load_word(table, word + 1)
        word += 2
    return offset + inside * load_word(table, FIRST_LOOP + 1), offset, inside


@inline
def _next_start(table: int, flat: int, start: int) -> int:
    """The place at which the innermost loop starts whose first element is `flat`.

    `start` is that of the loop before.
    """
    if load_word(table, LOOPS) == 2:
        return start + load_word(table, FIRST_LOOP + 3)
    _, found, _ = _locate(table, flat)
    return found


def over_runs(visit: Callable[..., None]) -> Callable[..., None]:
    """Call visit(values + i, offset, step, count, …) for each run of a line.

    A run is `count` elements `step` bytes apart.
    """

    @inline
    def line(values, operand, alpha: float, flat: int, width: int, ahead: int, table: int) -> None:
        offset, start, inside = _locate(table, flat)
        size, step = load_word(table, FIRST_LOOP), load_word(table, FIRST_LOOP + 1)
        run = min(size - inside, width)
        visit(values, operand, alpha, offset, step, run, ahead, table)
        done = run
        while done < width:
            start = _next_start(table, flat + done, start)
            run = min(size, width - done)
            visit(values + done, operand, alpha, start, step, run, ahead, table)
            done += run

    return line


# --- reading and writing -------------------------------------------------------------------------------------------


@inline
def _size(p) -> int:
    return v.address_of(p + 1) - v.address_of(p)


AHEAD: Final = 1 << 11  # elements between a prefetch and its use, in the next block; this saves 5 to 10 % of a call


@inline
def _read_vector(total, arrays, i: int, whole: bool, mask, numbers):
    (values, p), (alpha, ahead) = arrays, numbers
    put(values, i, get(p, i, whole, mask) * alpha, whole, mask, 0)
    if whole:
        v.prefetch(p, i + ahead)
    return total


_read_neighbours, _write_times, _fill = fold(_read_vector), mapped(times), mapped(lambda values, value: value)


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
        _write_times(p, 0, count, load_word(table, OWN), (values,), (alpha,))
    else:
        for i in range(count):
            v.store_one(v.at_byte(p, i * step), 0, v.load_one(values, i) * v.number(values, alpha))


@inline
def _keep_run(values, operand, alpha: float, offset: int, step: int, count: int, ahead: int, table: int) -> None:
    state = v.address_of(operand)
    keep_run(values, 0, count, offset, step, load_word(state, 0), load_word(state, 1), load_word(table, OWN))


def _over_lines(visit: Callable[..., None]) -> Kernel:
    """The stage that visits all runs of a block: `lines` lines of `width` elements, in memory `pitch` elements apart.

    start: the first element. row: the elements from one line to the next in the buffer. Strips of columns have many
    lines; a block of rows is a single line.
    """
    over_line = over_runs(visit)

    @kernel
    def stage(values: Pointer, operand: Pointer, alpha: Float, start, lines, pitch, width, row, table):
        for line in range(lines):
            over_line(values + line * row, operand, alpha, start + line * pitch, width, row or AHEAD, table)

    return stage


# values[line, i] = alpha * operand at start + line * pitch + i.
read = _over_lines(_read_run)
# operand at start + line * pitch + i = alpha * values[line, i]; the table's own word tells whether to stream.
write = _over_lines(_write_run)
# values = 1 where dropout keeps an element, else 0. operand: seed and offset. The table gives the place in C order
# of each element; its own word is the threshold.
keep = _over_lines(_keep_run)


# --- the driver -----------------------------------------------------------------------------------------------------

# Words of a stage.
TASK, IN_MEMORY, VALUES, VALUES_MOVE, SOURCE, OPERAND, OPERAND_MOVE, THIRD, THIRD_MOVE, ALPHA, BETA, OWN_TABLE = range(
    12
)
STAGE: Final = 12
BUFFER: Final = -1  # the SOURCE of an operand that is a buffer

# Words of a plan of stages: the blocks, the softmax kernel and its buffers (offsets in private memory), then the
# stages.
COLUMNS, PER_BLOCK, COUNT, N, INNER, STRIPS, CHUNK, ITEM = range(8)
SOFTMAX, OTHER, STATS, TILE, INF_AS_ZERO = range(8, 13)
BEFORE, OF_ROWS, AFTER, FIRST_STAGE = range(13, 17)

# The arguments of a stage: the words of buffers, then the words of a place in memory.
ARGUMENTS: Final = 15
MEMORY_WORDS: Final = 6


@inline
def _store_words(address: int, index: int, values) -> None:
    for offset, value in enumerate(values):
        store_word(address, index + offset, value)


@inline
def _run(stages: int, number: int, operands: int, space: int, words: int, moved: int) -> None:
    """Run stages whose block buffers begin `moved` bytes later; `words` already hold the count and the lines."""
    for each in range(number):
        stage = stages + 8 * STAGE * each
        values = space + load_word(stage, VALUES) + moved * load_word(stage, VALUES_MOVE)
        third = space + load_word(stage, THIRD) + moved * load_word(stage, THIRD_MOVE)
        operand = space + load_word(stage, OPERAND) + moved * load_word(stage, OPERAND_MOVE)
        source, alpha = load_word(stage, SOURCE), load_word(stage, ALPHA)
        if source != BUFFER:
            operand = load_word(operands, source)
        _store_words(words, 0, (values, operand, third))
        _store_words(words, 4, (alpha, load_word(stage, BETA)))
        _store_words(words, MEMORY_WORDS, (values, operand, alpha))
        store_word(words, MEMORY_WORDS + 8, load_word(stage, OWN_TABLE))
        call_address(load_word(stage, TASK), words + 8 * MEMORY_WORDS * load_word(stage, IN_MEMORY), 0)


@inline
def _store_lines(words: int, count: int, start: int, lines: int, pitch: int, width: int, row: int) -> None:
    store_word(words, 3, count)
    _store_words(words, MEMORY_WORDS + 3, (start, lines, pitch, width, row))


@inline
def _run_in_chunks(
    stages: int, number: int, operands: int, space: int, words: int, plan: int, start: int, lines: int, width: int
) -> None:
    """Run all stages over one chunk of a block after the other, so that a chunk stays in the first-level cache."""
    chunk, item = max(load_word(plan, CHUNK), 1), load_word(plan, ITEM)  # a range's step is never 0
    if load_word(plan, COLUMNS):
        row, pitch = load_word(plan, PER_BLOCK), load_word(plan, INNER)
        for line in range(0, lines, chunk):
            some = min(chunk, lines - line)
            _store_lines(words, some * row, start + line * pitch, some, pitch, width, row)
            _run(stages, number, operands, space, words, line * row * item)
    else:
        for begin in range(0, width, chunk):
            some = min(chunk, width - begin)
            _store_lines(words, some, start + begin, 1, 0, some, 0)
            _run(stages, number, operands, space, words, begin * item)


@inline
def _softmax(plan: int, space: int, words: int, rows: int, n: int, width: int) -> None:
    other, stats, tile = load_word(plan, OTHER), load_word(plan, STATS), load_word(plan, TILE)
    _store_words(words, 0, (space, space + other, space + stats, space + tile, rows, n, width))
    store_word(words, 7, load_word(plan, INF_AS_ZERO))
    call_address(load_word(plan, SOFTMAX), words, 0)


@kernel
def blocks(units: Units, operands, space: Private, plan):
    """Each unit is a block: PER_BLOCK rows, or N lines of a strip of PER_BLOCK columns."""
    words, own = stack_words(ARGUMENTS), v.address_of(space)
    n, inner, per_block = load_word(plan, N), load_word(plan, INNER), load_word(plan, PER_BLOCK)
    before, of_rows, after = load_word(plan, BEFORE), load_word(plan, OF_ROWS), load_word(plan, AFTER)
    stages = plan + 8 * FIRST_STAGE
    row_stages = stages + 8 * STAGE * before
    for unit in units:
        if load_word(plan, COLUMNS):
            strips = load_word(plan, STRIPS)
            o, j = unit // strips, unit % strips * per_block
            start, of_row, lines, width = o * n * inner + j, o * inner + j, n, min(per_block, inner - j)
            rows = width
        else:
            rows = min(per_block, load_word(plan, COUNT) - unit * per_block)
            start, of_row, lines, width = unit * per_block * n, unit * per_block, 1, rows * n
        _run_in_chunks(stages, before, operands, own, words, plan, start, lines, width)
        _softmax(plan, own, words, rows, n, per_block)
        _store_lines(words, rows, of_row, 1, 0, rows, 0)
        _run(row_stages, of_rows, operands, own, words, 0)
        _run_in_chunks(row_stages + 8 * STAGE * of_rows, after, operands, own, words, plan, start, lines, width)
