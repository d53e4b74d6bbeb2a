"""Kernels of convolution's gradients: signals and their products, and products of matrices of windows.

Images are copied to signals, and back. A signal is one row of numbers for a channel of a batch of images. Element k of
any window lies at the same distance from the window's first element in its signal. A signal has a grid of numbers for
each image, one image after the other; a number of the grid is 0 if the image has no element there. With a stride s, the
elements u = s * q + r of an axis are divided among s signals, one for each phase r (polyphase decomposition). So the
elements that neighbouring windows multiply with one weight always lie side by side.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Rows, Units
from opgrad.cpu.compiler.words import load_word
from opgrad.cpu.kernels import gemm
from opgrad.cpu.kernels.gemm import MANY_REGISTERS, Matrix, ProductSizes, four, product, put_vectors, two
from opgrad.cpu.kernels.loops.fold import sum_range
from opgrad.cpu.kernels.loops.map import write_same, write_sum, write_zeros

# The words of a phase in its table. For each of three axes: the first element of the grid that the image has, the one
# behind the last, and the place of the first in the image.
PHASE: Final = 9


class Signals(NamedTuple):
    """Signals: the distances between groups, channels and signals, and the number of zeros before each signal."""

    data: Pointer
    group: int
    channel: int
    pitch: int
    pad: int


class Images(NamedTuple):
    """The images that lie in signals at the same time: the first one, and how many."""

    first: int
    count: int


class ImageSizes(NamedTuple):
    """The number of an image's channels, and the sizes of its axes. An axis that the image lacks has size 1."""

    channels: int
    depth: int
    height: int
    width: int


class GridSteps(NamedTuple):
    """The sizes of a grid and of its last two axes, and the distance in the image of neighbours on each axis."""

    size: int
    height: int
    width: int
    step_d: int
    step_h: int
    step_w: int


@inline
def axis_range(phase: int, axis: int):
    """The elements of a grid's axis that the image has in this phase."""
    return range(load_word(phase, 3 * axis), load_word(phase, 3 * axis + 1))


@inline
def source_of(phase: int, axis: int, q: int, step: int) -> int:
    """The element of the image's axis that stands at element q of the grid's axis."""
    return load_word(phase, 3 * axis + 2) + (q - load_word(phase, 3 * axis)) * step


@inline
def copy_strided(y, y_step: int, x, x_step: int, n: int) -> None:
    """y[i * y_step] = x[i * x_step]"""
    if x_step == 1 and y_step == 1:
        write_same(y, 0, n, 0, (x,), ())
    else:
        for i in range(n):
            v.store_one(y, i * y_step, v.load_one(x, i * x_step))


@inline
def copy_phase(x, plane: int, planes, signal, grid, phase: int, back: bool) -> None:
    """Copy the elements of a phase from a channel of an image to its part of the signal, or back.

    The words of the phase are read again for each row: in registers all of them would spill.
    """
    columns = axis_range(phase, 2)
    count, from_w = columns.stop - columns.start, source_of(phase, 2, columns.start, grid.step_w)
    if count > 0:
        for qd in axis_range(phase, 0):
            for qh in axis_range(phase, 1):
                d, h = source_of(phase, 0, qd, grid.step_d), source_of(phase, 1, qh, grid.step_h)
                row = x + (((plane * planes.depth + d) * planes.height + h) * planes.width + from_w)
                part = signal + ((qd * grid.height + qh) * grid.width + columns.start)
                if back:
                    copy_strided(row, grid.step_w, part, 1, count)
                else:
                    copy_strided(part, 1, row, grid.step_w, count)


@kernel
def to_signals(
    units: Units, images: Images, planes: ImageSizes, grid: GridSteps, phases, table, filled, x: Pointer,
    signals: Signals,
):  # fmt: skip
    """Write the images of each channel to its signals; a unit is one phase of one channel.

    phases, table: how many there are, and the words of each. filled: whether the image has every element of the grid.
    If not, zeros are also written between its elements.
    """
    for unit in units:
        channel, phase = unit // phases, table + 8 * PHASE * (unit % phases)
        signal, end = signals.data + unit * signals.pitch, signals.pad + images.count * grid.size
        write_zeros(signal, 0, signals.pad if filled else signals.pitch, 0)
        if filled:
            write_zeros(signal, end, signals.pitch, 0)
        for image in range(images.count):
            plane = (images.first + image) * planes.channels + channel
            copy_phase(x, plane, planes, signal + (signals.pad + image * grid.size), grid, phase, False)


@kernel
def from_signals(
    units: Units, images: Images, planes: ImageSizes, grid: GridSteps, phases, table, covered, signals: Signals,
    x: Pointer,
):  # fmt: skip
    """Write x from the signals; a unit is a channel of one image. covered: whether each element of x is in a signal."""
    size = planes.depth * planes.height * planes.width
    for unit in units:
        image, channel = unit // planes.channels, unit % planes.channels
        plane = (images.first + image) * planes.channels + channel
        if not covered:
            write_zeros(x + plane * size, 0, size, 0)
        for p in range(phases):
            signal = signals.data + ((channel * phases + p) * signals.pitch + signals.pad + image * grid.size)
            copy_phase(x, plane, planes, signal, grid, table + 8 * PHASE * p, True)


# --- products of long signals: tiles of sums in registers, four or two rows by three vectors of them -----------------
#
# Rows of a tile are placed and stored as in `gemm`, but signals are read where they lie: a packed copy of all shifts of
# a signal would be as many times as long as a window has elements. With AVX-512 a tile of six rows by two vectors, as
# in `gemm`, took 1.06 times as long. `correlate` adds shifted signals times weights; `dot_products` takes the dot
# products of signals with shifted signals. Both are what convolution's gradients come to
# (opgrad.cpu.programs.convolution).

ROWS: Final = 4  # of a tile: 12 sums of two registers each leave eight of 32 for what is multiplied
COLUMNS: Final = 3
CHUNK: Final = 128  # products of a chunk, whose sum is then added to the total
# Vectors of a signal that are multiplied at a time: seven signals of them, 28 KiB, stay in the first-level cache. With
# 64, windows of one element took 1.4 times as long.
BLOCK_VECTORS: Final = 32


one = inline(lambda p, step, row, last: (p + row * step,))

# With 16 registers the sums of four rows would spill: 50 billion operations a second instead of 95.
AT_ONCE: Final = ROWS if MANY_REGISTERS else 2
rows_at_once = four if MANY_REGISTERS else two


def correlating(rows_of: Callable[..., Any]) -> Callable[..., None]:
    """out[r, 0:3 vectors] (+)= the sum over j of weights[pitch j + r] * signals[shifts[j]:], for a tile's rows."""

    @inline
    def tile(out, out_row: int, row: int, last: int, signals, shifts: int, weights, pitch: int, j: int, end, add: int):
        w, factors, rows = v.lanes(out), rows_of(weights, 1, row, last), rows_of(out, out_row, row, last)
        left = middle = right = v.full_each(rows, 0.0)
        while j < end:
            numbers, source = v.load_one_each(factors, pitch * j), signals + load_word(shifts, j)
            left = v.add_products(left, numbers, v.load(source, 0))
            middle = v.add_products(middle, numbers, v.load(source, w))
            right = v.add_products(right, numbers, v.load(source, 2 * w))
            j += 1
        put_vectors(rows, 0, w, left, add)
        put_vectors(rows, w, w, middle, add)
        put_vectors(rows, 2 * w, w, right, add)

    return tile


correlate_rows, correlate_one = correlating(rows_at_once), correlating(one)

# Words of a tile of `correlate`: where its weights and its shifts begin, how many shifts there are, where its first row
# is written, which channel that is, and how many rows there are.
WEIGHTS, SHIFTS, TERMS, OUT, CHANNEL, TILE_ROWS = range(6)
TILE: Final = 6


@kernel
def correlate(units: Units, blocks, tiles, table, shifts, single, dy: Signals, weights: Rows, dx: Signals):
    """A unit is a block of positions in one group: all tiles of rows, so that its signals are read from the cache.

    tiles, table: how many a group has, and the words of each.
    """
    width = COLUMNS * v.lanes(dx.data)
    for unit in units:
        group, begin = unit // blocks, unit % blocks * width
        signals = dy.data + (group * dy.group + begin)
        for t in range(tiles):
            tile = table + 8 * TILE * t
            factors = weights.data + (group * weights.step + load_word(tile, WEIGHTS))
            offsets, terms = shifts + 8 * load_word(tile, SHIFTS), load_word(tile, TERMS)
            out, rows = dx.data + (group * dx.group + load_word(tile, OUT) + begin), load_word(tile, TILE_ROWS)
            for j in range(0, terms, CHUNK):
                end = min(j + CHUNK, terms)
                if single:
                    correlate_one(out, 0, 0, 0, signals, offsets, factors, 1, j, end, j > 0)
                else:
                    for row in range(0, rows, AT_ONCE):
                        correlate_rows(out, dx.channel, row, rows - 1, signals, offsets, factors, ROWS, j, end, j > 0)


@kernel
def pack_weights(units: Units, tiles, table, sources, rows, w: Pointer, w_group, step, weights: Rows):
    """weights[rows j + r] = w[sources[j] + (channel + r) * step] for each tile.

    w_group, step: from a group of the filters to the next, from one channel of a filter to the next. The last row of a
    tile that has fewer rows is repeated.
    """
    for unit in units:
        group, tile = unit // tiles, table + 8 * TILE * (unit % tiles)
        packed = weights.data + (group * weights.step + load_word(tile, WEIGHTS))
        filters = w + (group * w_group + load_word(tile, CHANNEL) * step)
        offsets, tile_rows = sources + 8 * load_word(tile, SHIFTS), load_word(tile, TILE_ROWS)
        for j in range(load_word(tile, TERMS)):
            source, to = filters + load_word(offsets, j), packed + rows * j
            if rows == 1:
                v.store_one(to, 0, v.load_one(source, 0))
            else:
                numbers = v.load_one_each(four(source, step, 0, tile_rows - 1), 0)
                v.store_one_each(four(to, 1, 0, rows - 1), 0, numbers)


@inline
def put_sums(rows, column: int, vectors, add: int) -> None:
    """Store the sum of the lanes of a vector for each row, or add it to what stands there."""
    sums = v.reduce_add_each(vectors)
    if add:
        sums = v.add_each(v.load_one_each(rows, column), sums)
    v.store_one_each(rows, column, sums)


def multiplying(rows_of: Callable[..., Any]) -> Callable[..., None]:
    """sums[r, c] (+)= the dot product of row r of a and signal c of three, over n numbers, whole vectors."""

    @inline
    def tile(sums, pitch: int, row: int, last: int, columns: int, a, a_row: int, signals, n: int, add: int) -> None:
        (x, y, z), factors, rows = signals, rows_of(a, a_row, row, last), rows_of(sums, pitch, row, last)
        left = middle = right = v.full_each(factors, 0.0)
        i = 0
        while i < n:
            vectors = v.load_each(factors, i)
            left = v.add_products(left, vectors, v.load(x, i))
            middle = v.add_products(middle, vectors, v.load(y, i))
            right = v.add_products(right, vectors, v.load(z, i))
            i += v.lanes(a)
        put_sums(rows, 0, left, add)
        if columns > 1:
            put_sums(rows, 1, middle, add)
        if columns > 2:
            put_sums(rows, 2, right, add)

    return tile


dots_of_rows, dots_of_one = multiplying(rows_at_once), multiplying(one)


class Ranges(NamedTuple):
    """An axis of a matrix cut into ranges: its size, how many ranges, the size of each."""

    size: int
    count: int
    per_range: int


@kernel
def dot_products(
    units: Units, rows: Ranges, columns: Ranges, length, shifts, single, add, dy: Signals, x: Signals, sums: Pointer
):
    """sums[r, c] (+)= the dot product of row r of dy and of x from shifts[c] on.

    A unit is a range of rows and a range of columns in one group. A block of each of its columns stays in the
    second-level cache while all its rows pass by.
    """
    block = BLOCK_VECTORS * v.lanes(dy.data)
    for unit in units:
        group = unit // (rows.count * columns.count)
        first_row = unit // columns.count % rows.count * rows.per_range
        first_column = unit % columns.count * columns.per_range
        signals, last, out = x.data + group * x.group, rows.size - 1, sums + group * rows.size * columns.size
        for start in range(0, length, block):
            n, adds = min(block, length - start), add or start > 0
            a = dy.data + (group * dy.group + dy.pad + start)
            for row in range(first_row, min(first_row + rows.per_range, rows.size), ROWS):
                for column in range(first_column, min(first_column + columns.per_range, columns.size), COLUMNS):
                    tile_columns = min(COLUMNS, columns.size - column)
                    shifted = (
                        signals + (load_word(shifts, column) + start),
                        signals + (load_word(shifts, column + min(1, tile_columns - 1)) + start),
                        signals + (load_word(shifts, column + tile_columns - 1) + start),
                    )
                    if single:
                        dots_of_one(out + column, 0, 0, 0, tile_columns, a, 0, shifted, n, adds)
                    else:
                        for i in range(row, min(row + ROWS, rows.size), AT_ONCE):
                            dots_of_rows(
                                out + column, columns.size, i, last, tile_columns, a, dy.pitch, shifted, n, adds
                            )


@kernel
def sum_signals(rows: Units, length, add, signals: Signals, sums: Pointer):
    """sums[r] (+)= the sum of row r of the signals, over whole vectors."""
    for row in rows:
        signal = signals.data + (row * signals.pitch + signals.pad)
        put_sums((sums,), row, (sum_range(0, length, (signal,), (), BLOCK_VECTORS),), add)


@kernel
def sum_planes(channels_: Units, images: Images, channels, size, x: Pointer, sums: Pointer):
    """sums[c] (+)= the sum of channel c of some images."""
    for channel in channels_:
        for image in range(images.first, images.first + images.count):
            plane = x + (image * channels + channel) * size
            put_sums((sums,), channel, (sum_range(0, size, (plane,), (), BLOCK_VECTORS),), image > 0)


@kernel
def copy_sums(elements: Units, sums: Pointer, y: Pointer):
    write_same(y, elements.start, elements.stop, 0, (sums,), ())


# --- where windows are large in proportion to the images: products of matrices ---------------------------------------
#
# Signals take a product for each element of a grid, which is as large as an image with its padding. If windows reach
# across much of that, most of these products belong to no window: a window as high as an image of a hundred rows wastes
# 99 of 100. Here each product belongs to a window. The matrix of windows has a column for each window and a row for
# each of its elements (im2col). Blocks of it are written to private memory, and multiplied (`gemm`).

POSITIONS: Final = 2 * gemm.CHUNK  # windows of a block
ELEMENTS: Final = 256  # of windows, rows of a block: with so many windows it stays in the second-level cache

# Words of the axes: the windows along each of three, the strides of the first two and their sizes, the elements of x
# from one to the next of these, and between neighbouring windows of the third; 0 where that axis is the images.
COUNT_A, COUNT_B, COUNT_C, STRIDE_A, STRIDE_B, SIZE_A, SIZE_B, STEP_A, STEP_B, STEP_C = range(10)
# Words of a window's element: its place on the first two axes in a window at 0, the first window along the third whose
# element lies on the axis, the one behind the last, and its distance in x from a window at 0 along the third.
AT_A, AT_B, FIRST, STOP, AT_C = range(5)
ELEMENT: Final = 5
ENDLESS: Final = 1 << 60  # windows along the third axis


class WindowTables(NamedTuple):
    """The tables of the axes and of a window's elements; the number of its elements, a group's channels and filters.

    plane, image: the elements of a channel of x, and of all channels of an image.
    """

    axes: int
    table: int
    taps: int
    channels: int
    filters: int
    plane: int
    image: int


class Gathered(NamedTuple):
    """Some images, the number of their windows, and dy for them: a row for each filter, a number for each window."""

    images: Images
    windows: int
    dy: Rows


def over_runs(visit: Callable[..., None]) -> Callable[..., None]:
    """Calls visit(block, x, step, first, stop, n) for each run of windows [begin, end) that lie along the third axis.

    Of the run's n windows those in [first, stop) have the element in x, `step` elements from one to the next.
    """

    @inline
    def runs(block, x, image_step: int, axes: int, tap: int, begin: int, end: int) -> None:
        line = load_word(axes, COUNT_C)
        c, b = begin % line, begin // line
        a = b // load_word(axes, COUNT_B)
        image, step = a // load_word(axes, COUNT_A), load_word(axes, STEP_C) or image_step
        b, a, q = b % load_word(axes, COUNT_B), a % load_word(axes, COUNT_A), begin
        while q < end:
            n = min(line - c, end - q)
            at_a = a * load_word(axes, STRIDE_A) + load_word(tap, AT_A)
            at_b = b * load_word(axes, STRIDE_B) + load_word(tap, AT_B)
            first = stop = n
            if 0 <= at_a < load_word(axes, SIZE_A) and 0 <= at_b < load_word(axes, SIZE_B):
                first = min(max(load_word(tap, FIRST) - c, 0), n)
                stop = min(max(load_word(tap, STOP) - c, first), n)
            place = image * image_step + at_a * load_word(axes, STEP_A) + at_b * load_word(axes, STEP_B)
            visit(block + (q - begin), x + (place + load_word(tap, AT_C) + c * step), step, first, stop, n)
            q, c, b = q + n, 0, b + 1
            if b == load_word(axes, COUNT_B):
                a, b = a + 1, 0
            if a == load_word(axes, COUNT_A):
                image, a = image + 1, 0

    return runs


@inline
def _copy(block, x, step: int, first: int, stop: int, n: int) -> None:
    write_zeros(block, 0, first, 0)
    if step == 1:
        write_same(block, first, stop, 0, (x,), ())
    else:
        copy_strided(block + first, 1, x + first * step, step, stop - first)
    write_zeros(block, stop, n, 0)


@inline
def _add(block, x, step: int, first: int, stop: int, n: int) -> None:
    if step == 1:
        write_sum(x, first, stop, 0, (x, block), ())
    else:
        for i in range(first, stop):
            v.store_one(x, i * step, v.load_one(x, i * step) + v.load_one(block, i))


copy_runs, add_runs = over_runs(_copy), over_runs(_add)


@kernel
def gather_dy(rows: Units, gathered: Gathered, filters, size, dy: Pointer):
    """A row for each filter, of all groups: its windows of one image after the other."""
    for row in rows:
        for image in range(gathered.images.count):
            source = dy + ((gathered.images.first + image) * filters + row) * size
            write_same(gathered.dy.data + (row * gathered.dy.step + image * size), 0, size, 0, (source,), ())


@kernel
def filters_back(
    units: Units, blocks, per_block, windows: WindowTables, g: Gathered, x: Pointer, dw: Pointer,
    left: Private, right: Private, matrix: Private,
):  # fmt: skip
    """dw (+)= dy @ the transposed matrix of windows; a unit is a block of the elements of a group's windows."""
    taps, elements = windows.taps, windows.channels * windows.taps
    for unit in units:
        group, first = unit // blocks, unit % blocks * per_block
        columns, row = min(per_block, elements - first), group * windows.filters
        images = x + (g.images.first * windows.image + group * windows.channels * windows.plane)
        for q in range(0, g.windows, POSITIONS):
            count = min(POSITIONS, g.windows - q)
            for j in range(columns):
                channel, tap = (first + j) // taps, windows.table + 8 * ELEMENT * ((first + j) % taps)
                source = images + channel * windows.plane
                copy_runs(matrix + j * POSITIONS, source, windows.image, windows.axes, tap, q, q + count)
            dy = Matrix(g.dy.data + (row * g.dy.step + q), g.dy.step, 1)
            sizes, add = ProductSizes(windows.filters, columns, count), g.images.first + q > 0
            out = dw + (row * elements + first)
            product(out, elements, dy, Matrix(matrix, 1, POSITIONS), sizes, add, left, right)


@kernel
def images_back(
    units: Units, image_blocks, block_images, channel_blocks, block_channels, sums: Private, windows: WindowTables,
    g: Gathered, w: Pointer, dx: Pointer, left: Private, right: Private, matrix: Private,
):  # fmt: skip
    """dx = the sums of the transposed filters @ dy over all windows; a unit is some channels of some images."""
    taps, elements, per_image = windows.taps, windows.channels * windows.taps, g.windows // g.images.count
    for unit in units:
        image, rest = unit % image_blocks * block_images, unit // image_blocks
        group, channel = rest // channel_blocks, rest % channel_blocks * block_channels
        images = min(block_images, g.images.count - image)
        channels = min(block_channels, windows.channels - channel)
        own, row = channels * windows.plane, group * windows.filters
        write_zeros(sums, 0, images * own, 0)
        filters = w + (row * elements + channel * taps)
        for q in range(0, images * per_image, POSITIONS):
            count = min(POSITIONS, images * per_image - q)
            dy = Matrix(g.dy.data + (row * g.dy.step + image * per_image + q), g.dy.step, 1)
            for first in range(0, channels * taps, ELEMENTS):
                rows = min(ELEMENTS, channels * taps - first)
                sizes = ProductSizes(rows, count, windows.filters)
                product(matrix, POSITIONS, Matrix(filters + first, 1, elements), dy, sizes, 0, left, right)
                for j in range(rows):
                    tap = windows.table + 8 * ELEMENT * ((first + j) % taps)
                    target = sums + (first + j) // taps * windows.plane
                    add_runs(matrix + j * POSITIONS, target, own, windows.axes, tap, q, q + count)
        for i in range(images):
            place = (g.images.first + image + i) * windows.image + (group * windows.channels + channel) * windows.plane
            write_same(dx + place, 0, own, 0, (sums + i * own,), ())
