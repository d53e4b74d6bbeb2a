"""Kernels of a convolution's gradients where windows are large in proportion to the images: products of matrices.

Signals (`signals`) take a product for each element of a grid, which is as large as an image with its padding. If
windows reach across much of that, most of these products belong to no window: a window as high as an image of a
hundred rows wastes 99 of 100. Here each product belongs to a window. The matrix of windows has a column for each window
and a row for each of its elements (im2col). Blocks of it are written to private memory, and multiplied (`gemm`).
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Rows, Units
from opgrad.cpu.compiler.words import load_word
from opgrad.cpu.kernels import gemm
from opgrad.cpu.kernels.convolution.signals import Images, copy_strided
from opgrad.cpu.kernels.gemm import Matrix, ProductSizes, product
from opgrad.cpu.kernels.loops.map import write_same, write_sum, write_zeros

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


# --- windows ---------------------------------------------------------------------------------------------------------


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


# --- products --------------------------------------------------------------------------------------------------------


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
