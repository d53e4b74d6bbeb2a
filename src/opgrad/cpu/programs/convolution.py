"""The gradients of convolution and of transposed convolution, as products of signals.

The channels of dy and x are laid out as signals, long rows of numbers in which element k of a window lies at a fixed
distance from the window. Then dx is a sum of shifted signals of dy times filters, and dw consists of dot products of
signals of one with shifted signals of the other. No matrix of windows is written. A batch is computed in chunks of
images whose signals stay in the cache. If windows are large in proportion to the images, products of matrices of
windows are faster, and take the place of signals.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from opgrad.base.locks import once
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import convolution, gemm
from opgrad.cpu.kernels.convolution import Gathered, GridSteps, Images, ImageSizes, Ranges, Signals, WindowTables
from opgrad.cpu.programs.arithmetic import add_sums, grouped
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.plan import Program, round_up
from opgrad.ops.reference.windows import MOST_AXES, WindowAxis, convolution_axes, transposed_axes

# --- the grid of a signal, and the shift of a window's elements ------------------------------------------------------
#
# A window's element lies at s * q + r on an axis, for the stride s: q is its shift there, and r is its phase.


class SignalLayout:
    """The layout of signals.

    along: the three axes; those that an image lacks come first and have one element. phases: the remainders r of a
    window's elements on every axis. first, grid: the q of the grid's first element on each axis, and the number of its
    elements. taps: for each element of a window, the number of its phase, and its shift in a signal of that phase.
    reach: the largest shift in either direction. sources: for each phase and axis, the grid's first element that x has,
    the one behind the last, and that first one in x. covered: whether each element of x is in a signal.
    """

    def __init__(self, along: tuple[WindowAxis, ...]):
        """The grid must be so large that a window which reaches beyond a row of dy, or of x, meets zeros.

        The zeros behind a row are also those before the next one, so few are needed: a row of 7 elements takes 8 for
        windows of 3.
        """
        self.along = along
        windows = itertools.product(*(range(axis.kernel) for axis in along))
        elements = [
            [divmod(k * axis.dilation, axis.stride) for k, axis in zip(each, along, strict=True)] for each in windows
        ]
        self.phases = sorted({tuple(r for _, r in element) for element in elements})
        # For each phase and axis: the first q at which x has an element, and the q behind the last.
        ranges = [[_range(*each) for each in zip(along, r, strict=True)] for r in self.phases]
        by_axis = list(zip(*ranges, strict=True))
        self.first = tuple(min(low for low, _ in each) for each in by_axis)
        last = (max(high for _, high in each) for each in by_axis)
        self.grid = tuple(
            max(axis.count + (axis.kernel - 1) * axis.dilation // axis.stride - low, high)
            for axis, low, high in zip(along, self.first, last, strict=True)
        )
        self.taps = [
            (self.phases.index(tuple(r for _, r in element)), self._shift([q for q, _ in element]))
            for element in elements
        ]
        self.reach = max(abs(shift) for _, shift in self.taps)
        self.sources = [
            [
                (low - begin, high - begin, low * axis.stride + part - axis.begin)
                for axis, part, (low, high), begin in zip(along, r, each, self.first, strict=True)
            ]
            for r, each in zip(self.phases, ranges, strict=True)
        ]
        inside = sum(math.prod(high - low for low, high in each) for each in ranges)
        self.covered = inside == math.prod(axis.size for axis in along)

    def _shift(self, place: Sequence[int]) -> int:
        """The distance in a signal from a window's first element to the one at q on each axis."""
        shift = 0
        for q, low, size in zip(place, self.first, self.grid, strict=True):
            shift = shift * size + q - low
        return shift


def _range(axis: WindowAxis, r: int) -> tuple[int, int]:
    """The first q at which the axis has an element of phase r, and the q behind the last."""
    beyond = axis.count + (axis.kernel - 1) * axis.dilation // axis.stride
    low = max(0, -((r - axis.begin) // axis.stride))
    high = min(beyond, -((r - axis.begin - axis.size) // axis.stride))
    return low, max(low, high)


# --- signals of x and dy, and products of them -----------------------------------------------------------------------

PART_PRODUCTS: Final = 1 << 18  # products that take 5 µs: less is not worth another part
MOST_PARTS: Final = 64
CHUNK_BYTES: Final = 8 << 20  # of signals, or of dy as a matrix
FEWEST_UNITS: Final = 32  # of dot products, if there are so many tiles
MOST_COLUMNS: Final = 48  # of a unit of dot products: a block of 4 KiB of each column stays in the second-level cache


class GradientSteps(ProgramSteps):
    """Puts the steps together, for some images at a time. The workspace holds the sums of dw and db over all images.

    filters, channels: of a group. grid: the numbers of an image in a signal.
    """

    images_at_once: int

    def __init__(self, problem: Problem, layout: SignalLayout, wanted: Sequence[str]):
        super().__init__(problem)
        filters, self.channels, *_ = problem.specs["w"].shape
        self.layout, self.wanted, self.grid = layout, wanted, math.prod(layout.grid)
        self.batch, self.group, self.taps = problem.specs["x"].shape[0], problem.attributes["group"], len(layout.taps)
        self.filters = filters // self.group
        counts = {name: math.prod(problem.specs[name].shape) for name in wanted if name != "dx"}
        self.sums = {name: self.workspace.shared(count) for name, count in counts.items()}

    def of_all_images(self) -> Program:
        for first in range(0, self.batch, self.images_at_once):
            self.chunk(Images(first, min(self.images_at_once, self.batch - first)))
        for name, sums in self.sums.items():
            n = math.prod(self.problem.specs[name].shape)
            self.add(convolution.copy_sums, n, 2 * self.item, sums=sums, y=self.problem[name])
        return self

    def chunk(self, images: Images) -> None:
        """The steps for some images."""
        raise NotImplementedError

    def add_products(self, kernel: Kernel, units: int, unit_products: int, /, **arguments: Any) -> None:
        """Add a step whose units take so many products each."""
        wanted = max(units * unit_products / MOST_PARTS, PART_PRODUCTS)
        self.add_parts(kernel, units, max(1, min(units, round(wanted / unit_products))), **arguments)

    def sum_planes(self, images: Images, channels: int, size: int) -> None:
        """Add the sums of dy over the elements of each of its channels to those of the images before."""
        given = {"x": self.problem["dy"], "sums": self.sums["db"]}
        unit_bytes = images.count * size * self.item
        self.add(convolution.sum_planes, channels, unit_bytes, images=images, channels=channels, size=size, **given)


class SignalSteps(GradientSteps):
    """The steps by products of signals; the workspace also holds packed filters, and the signals of both arrays.

    `windows` are the signals of the array that has a number for each window, `field` those of the array that windows
    slide over. The signals of x become those of dx once x has been used.
    """

    name = "signals"

    def __init__(self, problem: Problem, layout: SignalLayout, wanted: Sequence[str]):
        super().__init__(problem, layout, wanted)
        self.phases, self.tile = len(layout.phases), convolution.COLUMNS * self.lanes
        image_bytes = self.item * self.grid * self.group * (self.filters + self.channels * self.phases)
        self.images_at_once = max(1, min(self.batch, CHUNK_BYTES // image_bytes))
        self.pad = round_up(layout.reach, self.lanes)  # zeros before a signal; there are as many behind it
        # Signals that lie a multiple of 4 KiB apart would compete for the same places in the cache.
        size = 2 * self.pad + round_up(self.images_at_once * self.grid, self.tile)
        self.pitch = size + self.lanes if size * 4 % 4096 == 0 else size
        self.windows = self.signals(self.filters, 1)
        self.field = self.signals(self.channels, self.phases)

    def signals(self, channels: int, phases: int) -> Signals:
        """The signals of so many channels of each group."""
        channel = phases * self.pitch
        data: Any = self.workspace.shared(self.group * channels * channel)
        return Signals(data, channels * channel, channel, self.pitch, self.pad)

    def length(self, images: int) -> int:
        """The numbers of a signal of so many images, in whole vectors."""
        return round_up(images * self.grid, self.lanes)

    # --- images to signals and back ---------------------------------------------------------------------------------

    def to_signals(self, name: str, signals_: Signals, sizes: Mapping[str, Any], images: Images) -> None:
        units = sizes["planes"].channels * sizes["phases"]
        unit_bytes = 2 * self.item * images.count * self.grid
        self.add(
            convolution.to_signals, units, unit_bytes, **sizes, images=images, x=self.problem[name], signals=signals_
        )

    def from_signals(self, signals_: Signals, sizes: Mapping[str, Any], covered: bool, images: Images) -> None:
        """Write dx."""
        units = sizes["planes"].channels * images.count
        own = {"images": images, "covered": covered, "x": self.problem["dx"], "signals": signals_}
        unit_bytes = 2 * self.item * self.grid * sizes["phases"]
        self.add(convolution.from_signals, units, unit_bytes, **sizes, **own)

    @once
    def window_images(self) -> dict[str, Any]:
        counts = [axis.count for axis in self.layout.along]
        return self.images([[(0, count, 0) for count in counts]], counts, (1, 1, 1), self.filters)

    @once
    def field_images(self) -> dict[str, Any]:
        along = self.layout.along
        sizes, strides = [axis.size for axis in along], tuple(axis.stride for axis in along)
        return self.images(self.layout.sources, sizes, strides, self.channels)

    def images(self, sources: Any, sizes: Sequence[int], steps: Sequence[int], channels: int) -> dict[str, Any]:
        """The kernels' arguments about images: their sizes, and the places of their elements in the grid."""
        along = [list(each) for each in zip(sizes, steps, self.layout.grid, strict=True)]
        ranges = [[list(each) for each in phase] for phase in sources]
        if along[2][0] == along[2][2] and along[1][1] == along[2][1] == 1:
            # Rows without anything between them are one long row.
            along = [along[0], [1, 1, 1], [along[1][0] * along[2][0], 1, along[1][2] * along[2][2]]]
            ranges = [[d, [0, 1, 0], [each * sizes[2] for each in h]] for d, h, _ in ranges]
        (depth, step_d, _), (height, step_h, grid_h), (width, step_w, grid_w) = along
        return {
            "planes": ImageSizes(channels * self.group, depth, height, width),
            "grid": GridSteps(self.grid, grid_h, grid_w, step_d, step_h, step_w),
            "phases": len(ranges),
            "table": self.tables.add(ranges),
            "filled": all(math.prod(high - low for low, high, _ in each) == self.grid for each in ranges),
        }

    # --- products ---------------------------------------------------------------------------------------------------

    @once
    def field_shifts(self) -> int:
        """The table of the places in `field` at which a channel's signal begins for each element of a window."""
        taps = np.array([phase * self.pitch + shift + self.pad for phase, shift in self.layout.taps])
        return self.tables.add(np.arange(self.channels)[:, None] * self.field.channel + taps)

    def dot_products(self, images: Images) -> None:
        """dw: dot products of the signals of the windows with shifted signals of the array that they slide over."""
        columns, tiles = self.channels * self.taps, -(-self.filters // convolution.ROWS)
        most_ranges = min(-(-columns // convolution.COLUMNS), -(-FEWEST_UNITS // (tiles * self.group)))
        ranges = max(-(-columns // MOST_COLUMNS), most_ranges)
        per_range = round_up(-(-columns // ranges), convolution.COLUMNS)
        ranges = -(-columns // per_range)
        tiles_per_range = -(-tiles // min(tiles, -(-FEWEST_UNITS // (ranges * self.group))))
        rows = Ranges(self.filters, -(-tiles // tiles_per_range), tiles_per_range * convolution.ROWS)
        length = self.length(images.count)
        arguments = {"rows": rows, "columns": Ranges(columns, ranges, per_range), "length": length}
        arguments |= {"shifts": self.field_shifts, "single": self.filters == 1, "add": images.first > 0}
        arguments |= {"dy": self.windows, "x": self.field, "sums": self.sums["dw"]}
        units, unit_products = self.group * rows.count * ranges, rows.per_range * per_range * length
        self.add_products(convolution.dot_products, units, unit_products, **arguments)

    def packed(self, words: Sequence[Sequence[int]], rows: int, sources: Any, step: int) -> dict[str, Any]:
        """Add the step that packs the filters for these tiles; return the arguments of `correlate` about them.

        step: the elements from one channel of a filter to the next.
        """
        last = words[-1]
        size = last[convolution.WEIGHTS] + last[convolution.TERMS] * rows
        weights: Any = self.workspace.shared(self.group * size)
        found = {"tiles": len(words), "table": self.tables.add(words), "weights": Rows(weights, size)}
        units, unit_bytes = self.group * len(words), 8 * size / len(words)
        filters = {"w": self.problem["w"], "w_group": self.filters * self.channels * self.taps}
        given = {"sources": self.tables.add(sources), "rows": rows, "step": step}
        self.add(convolution.pack_weights, units, unit_bytes, **found, **filters, **given)
        return {**found, "single": rows == 1}

    def correlate(self, arguments: Mapping[str, Any], images: Images) -> None:
        blocks = -(-images.count * self.grid // self.tile)
        unit_products = self.tile * self.channels * self.filters * self.taps
        self.add_products(convolution.correlate, self.group * blocks, unit_products, **arguments, blocks=blocks)


class ConvolutionSteps(SignalSteps):
    """Convolution: windows slide over x, and dy has a number for each window.

    dx is a sum of shifted signals of dy times filters.
    """

    def chunk(self, images: Images) -> None:
        self.to_signals("dy", self.windows, self.window_images, images)
        if "db" in self.sums:
            self.sum_signals(images)
        if "dw" in self.sums:
            self.to_signals("x", self.field, self.field_images, images)
            self.dot_products(images)
        if "dx" in self.wanted:
            self.correlate(self.to_field, images)
            self.from_signals(self.field, self.field_images, self.layout.covered, images)

    def sum_signals(self, images: Images) -> None:
        length = self.length(images.count)
        given = {"add": images.first > 0, "signals": self.windows, "sums": self.sums["db"]}
        self.add(convolution.sum_signals, self.group * self.filters, length * self.item, length=length, **given)

    @once
    def to_field(self) -> dict[str, Any]:
        """The arguments of `correlate` except for the number of images; a tile has some channels of a phase."""
        rows = 1 if self.channels == 1 else convolution.ROWS
        words, shifts, sources, packed, start = [], [], [], 0, 0
        for p in range(self.phases):
            taps = [(k, shift) for k, (phase, shift) in enumerate(self.layout.taps) if phase == p]
            m = np.arange(self.filters)[:, None]
            shifts.append((m * self.pitch + self.pad - np.array([shift for _, shift in taps])).ravel())
            sources.append((m * (self.channels * self.taps) + np.array([k for k, _ in taps])).ravel())
            terms = self.filters * len(taps)
            for channel in range(0, self.channels, rows):
                out = channel * self.field.channel + p * self.pitch + self.pad
                words.append([packed, start, terms, out, channel, min(rows, self.channels - channel)])
                packed += terms * rows
            start += terms
        arguments = self.packed(words, rows, np.concatenate(sources), self.taps)
        return {**arguments, "shifts": self.tables.add(np.concatenate(shifts)), "dy": self.windows, "dx": self.field}


class TransposedSteps(SignalSteps):
    """Transposed convolution: x has a number for each window, and windows slide over dy.

    dx is a sum of shifted signals of dy times filters here, too, of all phases of dy.
    """

    def chunk(self, images: Images) -> None:
        if "db" in self.sums:  # of all elements of dy: its signals lack those that no window reaches
            size = math.prod(axis.size for axis in self.layout.along)
            self.sum_planes(images, self.group * self.channels, size)
        if "dw" in self.sums or "dx" in self.wanted:
            self.to_signals("dy", self.field, self.field_images, images)
        if "dw" in self.sums:
            self.to_signals("x", self.windows, self.window_images, images)
            self.dot_products(images)
        if "dx" in self.wanted:
            self.correlate(self.to_windows, images)
            self.from_signals(self.windows, self.window_images, True, images)

    @once
    def to_windows(self) -> dict[str, Any]:
        """The arguments of `correlate` except for the number of images; a tile has some channels of x."""
        rows, terms = 1 if self.filters == 1 else convolution.ROWS, self.channels * self.taps
        words = [
            [m * terms, 0, terms, m * self.windows.channel + self.pad, m, min(rows, self.filters - m)]
            for m in range(0, self.filters, rows)
        ]
        arguments = self.packed(words, rows, np.arange(terms), terms)
        return {**arguments, "shifts": self.field_shifts, "dy": self.field, "dx": self.windows}


# --- matrices of windows ---------------------------------------------------------------------------------------------

# Signals take longer than matrices of windows where the grid has many elements for a window. A window's element costs a
# product for each filter either way, by signals at half the rate; to write it into the matrix costs as much as 24
# products, and a run of windows side by side as much as 700 (Zen 4, AVX-512).
WASTE: Final = 1.5
ELEMENT_PRODUCTS: Final = 24
RUN_PRODUCTS: Final = 700
FEWEST_ELEMENTS: Final = 48  # of a part's block of windows, if there are so many: each part packs all of dy
WANTED_UNITS: Final = 16
PLANES: Final = 1 << 17  # numbers of dx that a part works on at a time, if one plane is not more


def by_windows(layout: SignalLayout, batch: int, filters: int) -> bool:
    """Whether matrices of windows take less time than signals."""
    counts = [axis.count for axis in layout.along]
    waste, run = math.prod(layout.grid) / math.prod(counts), next((n for n in counts[::-1] if n > 1), batch)
    return waste > WASTE and filters * (waste - 0.5) > ELEMENT_PRODUCTS + RUN_PRODUCTS / run


class WindowSteps(GradientSteps):
    """The steps by matrices of windows; the workspace also holds dy with a row for each filter of some images."""

    name = "windows"

    def __init__(self, problem: Problem, layout: SignalLayout, wanted: Sequence[str]):
        super().__init__(problem, layout, wanted)
        self.per_image = math.prod(axis.count for axis in layout.along)
        self.plane = math.prod(axis.size for axis in layout.along)
        self.every, self.elements = self.group * self.filters, self.channels * self.taps
        self.images_at_once = max(1, min(self.batch, CHUNK_BYTES // (self.item * self.every * self.per_image)))
        row = round_up(self.images_at_once * self.per_image, self.lanes) + self.lanes
        self.dy: Any = Rows(self.workspace.shared(self.every * row), row)
        self.tables_of_windows = [*map(self.tables.add, tables(layout.along))]
        left, right = (self.workspace.private(size) for size in gemm.space(self.lanes))
        matrix = self.workspace.private(convolution.ELEMENTS * convolution.POSITIONS)
        self.memory = {"left": left, "right": right, "matrix": matrix}

    def chunk(self, images: Images) -> None:
        gathered = Gathered(images, images.count * self.per_image, self.dy)
        if "db" in self.sums:
            self.sum_planes(images, self.every, self.per_image)
        if "dw" in self.sums or "dx" in self.wanted:
            unit_bytes, given = 2 * self.item * gathered.windows, {"gathered": gathered, "size": self.per_image}
            self.add(convolution.gather_dy, self.every, unit_bytes, filters=self.every, **given)
        if "dw" in self.sums:
            self.filters_back(gathered)
        if "dx" in self.wanted:
            self.images_back(gathered)

    def arguments(self, gathered: Gathered) -> dict[str, Any]:
        """The arguments that both products share."""
        image = self.group * self.channels * self.plane
        sizes = self.taps, self.channels, self.filters, self.plane, image
        found = WindowTables(*self.tables_of_windows, *sizes)
        return {"windows": found, "g": gathered, **self.memory}

    def filters_back(self, gathered: Gathered) -> None:
        per_block = max(FEWEST_ELEMENTS, round_up(-(-self.elements * self.group // WANTED_UNITS), FEWEST_ELEMENTS))
        per_block = min(per_block, convolution.ELEMENTS, self.elements)
        blocks = -(-self.elements // per_block)
        arguments = {**self.arguments(gathered), "blocks": blocks, "per_block": per_block, "dw": self.sums["dw"]}
        unit_products = per_block * self.filters * gathered.windows
        self.add_products(convolution.filters_back, self.group * blocks, unit_products, **arguments)

    def images_back(self, gathered: Gathered) -> None:
        count, most = gathered.images.count, max(1, PLANES // self.plane)
        channels = min(-(-FEWEST_ELEMENTS // self.taps), self.channels, most)
        images = max(1, min(-(-convolution.POSITIONS // self.per_image), count, most // channels))
        sums = self.workspace.private(images * channels * self.plane)
        planes = {"image_blocks": -(-count // images), "channel_blocks": -(-self.channels // channels)}
        units = self.group * math.prod(planes.values())
        planes |= {"block_images": images, "block_channels": channels}
        unit_products = images * self.per_image * channels * self.taps * self.filters
        self.add_products(
            convolution.images_back, units, unit_products, **self.arguments(gathered), **planes, sums=sums
        )


def tables(along: Sequence[WindowAxis]) -> tuple[list[int], list[list[int]]]:
    """The words of the axes, and those of each element of a window.

    The third axis is one with several windows, so that runs are long, and the others count as they did. If there is
    none, runs go from image to image.
    """
    steps = [math.prod(axis.size for axis in along[place + 1 :]) for place in range(len(along))]
    last = max((place for place, axis in enumerate(along) if axis.count > 1), default=len(along) - 1)
    order = [place for place in range(len(along)) if place != last] + [last]
    a, b, c = (along[place] for place in order)
    step_a, step_b, step_c = (steps[place] for place in order)
    line, step = (c.count, c.stride * step_c) if c.count > 1 else (convolution.ENDLESS, 0)
    axes = [a.count, b.count, line, a.stride, b.stride, a.size, b.size, step_a, step_b, step]
    taps = []
    for element in itertools.product(*(range(axis.kernel) for axis in along)):
        at_a, at_b, at_c = (element[place] * along[place].dilation - along[place].begin for place in order)
        first = min(max(0, -(at_c // c.stride)), c.count)
        stop = min(max(first, -((at_c - c.size) // c.stride)), c.count)
        taps.append([at_a, at_b, first, stop * (line // c.count) if first < stop else first, at_c * step_c])
    return axes, taps


# --- programs --------------------------------------------------------------------------------------------------------

ONE_WINDOW: Final = WindowAxis(1, 1, 1)


def _program(problem: Problem, axes: Any, steps: type[SignalSteps]) -> Program:
    shapes = {name: problem.specs[name].shape for name in ("dy", "x", "w")}
    wanted = [name for name in ("dx", "dw", "db") if problem.operands.get(name) is not None]
    if not all(math.prod(shape) for shape in shapes.values()):
        return _empty(problem, wanted)
    found = axes(shapes, problem.attributes)
    layout = SignalLayout((ONE_WINDOW,) * (MOST_AXES - len(found)) + found)
    filters = shapes["w"][0] // problem.attributes["group"]
    is_by_windows = steps is ConvolutionSteps and by_windows(layout, shapes["x"][0], filters)
    return (WindowSteps if is_by_windows else steps)(problem, layout, wanted).of_all_images()


conv_grad = partial(_program, axes=convolution_axes, steps=ConvolutionSteps)
conv_transpose_grad = partial(_program, axes=transposed_axes, steps=TransposedSteps)


def _empty(problem: Problem, wanted: Sequence[str]) -> Program:
    """The program for empty sums, which are 0.

    If only x is empty, for lack of channels, the bias still has a gradient.
    """
    steps, shape = ProgramSteps(problem), problem.specs["dy"].shape
    for name in wanted:
        if name != "db" or not math.prod(shape):
            steps.clear(name)
        else:
            others = frozenset(range(len(shape))) - {1}
            add_sums(steps, grouped(shape, others), problem["dy"], problem["db"])
    return steps
