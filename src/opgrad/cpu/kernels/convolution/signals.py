"""Images as signals: every channel of a batch as one row of numbers in which a window's elements lie at fixed shifts.

A channel's signal has, one image after the other, a grid of elements; what has no source is 0. This is a polyphase
decomposition: with a stride s, the elements u = s * q + r of an axis make s signals, one for each phase r, so that
elements of neighbouring windows always stand side by side.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.map import write_same

# Words of a phase in its table: for each of three axes the first element of the grid that has a source, the one behind
# the last, the first's source.
PHASE: Final = 9


class Signals(NamedTuple):
    """Signals: the elements from one to the next of groups, channels and signals, and the zeros before each signal."""

    data: Pointer
    group: int
    channel: int
    pitch: int
    pad: int


class Images(NamedTuple):
    """The images that are signals at a time: the first one, and how many."""

    first: int
    count: int


class ImageSizes(NamedTuple):
    """The channels of an image, of all groups, and their sizes; those that an image lacks are 1."""

    channels: int
    depth: int
    height: int
    width: int


class GridSteps(NamedTuple):
    """The elements of a grid, and of its last two axes; how far apart the sources of neighbours are on each axis."""

    size: int
    height: int
    width: int
    step_d: int
    step_h: int
    step_w: int


class Phases(NamedTuple):
    """The phases: how many, and the table of their words."""

    count: int
    table: int


@inline
def axis_range(phase: int, axis: int):
    """The elements of the grid's axis that have a source in the phase."""
    return range(load_word(phase, 3 * axis), load_word(phase, 3 * axis + 1))


@inline
def source_of(phase: int, axis: int, q: int, step: int) -> int:
    """Which element of the image's axis stands at element q of the grid's."""
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
    units: Units,
    images: Images,
    planes: ImageSizes,
    grid: GridSteps,
    phases: Phases,
    filled,
    x: Pointer,
    signals: Signals,
):
    """signals = each channel's images (a unit with each phase), zeros around them and, unless filled, between."""
    for unit in units:
        channel, phase = unit // phases.count, phases.table + 8 * PHASE * (unit % phases.count)
        signal, end = signals.data + unit * signals.pitch, signals.pad + images.count * grid.size
        write_zeros(signal, 0, signals.pad if filled else signals.pitch, 0)
        if filled:
            write_zeros(signal, end, signals.pitch, 0)
        for image in range(images.count):
            plane = (images.first + image) * planes.channels + channel
            copy_phase(x, plane, planes, signal + (signals.pad + image * grid.size), grid, phase, False)


@kernel
def from_signals(
    units: Units,
    images: Images,
    planes: ImageSizes,
    grid: GridSteps,
    phases: Phases,
    covered,
    signals: Signals,
    x: Pointer,
):
    """x = the elements of the signals that have a source there, 0 elsewhere; a unit is a channel of one image."""
    size = planes.depth * planes.height * planes.width
    for unit in units:
        image, channel = unit // planes.channels, unit % planes.channels
        plane = (images.first + image) * planes.channels + channel
        if not covered:
            write_zeros(x + plane * size, 0, size, 0)
        for p in range(phases.count):
            signal = signals.data + ((channel * phases.count + p) * signals.pitch + signals.pad + image * grid.size)
            copy_phase(x, plane, planes, signal, grid, phases.table + 8 * PHASE * p, True)
