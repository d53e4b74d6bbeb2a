"""Images are copied to signals, and back. A signal is one row of numbers for a channel of a batch of images.

Element k of any window lies at the same distance from the window's first element in its signal. A signal has a grid of
numbers for each image, one image after the other; a number of the grid is 0 if the image has no element there. With a
stride s, the elements u = s * q + r of an axis are divided among s signals, one for each phase r (polyphase
decomposition). So the elements that neighbouring windows multiply with one weight always lie side by side.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.words import load_word
from opgrad.cpu.kernels.loops.map import write_same, write_zeros

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
