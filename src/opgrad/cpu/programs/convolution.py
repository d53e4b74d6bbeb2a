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
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from opgrad.base.locks import once
from opgrad.contract import DTYPES
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import convolution, gemm
from opgrad.cpu.kernels.convolution import Gathered, GridSteps, Images, ImageSizes, Ranges, Signals, WindowTables
from opgrad.cpu.programs.arithmetic import add_sums, grouped
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.layout import precision
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


@dataclass(frozen=True)
class SignalSizes:
    """The sizes of the problem, and of its signals for so many images at a time."""

    batch: int
    group: int
    filters: int  # of a group
    channels: int  # of a group
    taps: int
    phases: int
    grid: int
    reach: int
    images: int
    lanes: int

    @property
    def tile(self) -> int:
        """The elements of a row of a tile."""
        return convolution.COLUMNS * self.lanes

    @property
    def pad(self) -> int:
        """The zeros before a signal; there are as many behind it."""
        return round_up(self.reach, self.lanes)

    @property
    def pitch(self) -> int:
        """The distance from one signal to the next.

        It is no multiple of 4 KiB: numbers at such distances compete for the same places in the cache.
        """
        size = 2 * self.pad + round_up(self.images * self.grid, self.tile)
        return size + self.lanes if size * 4 % 4096 == 0 else size

    def length(self, images: int) -> int:
        """The numbers of a signal of so many images, in whole vectors."""
        return round_up(images * self.grid, self.lanes)


class GradientSteps(ProgramSteps):
    """Puts the steps together, for some images at a time. The workspace holds the sums of dw and db over all images."""

    name = ""

    def __init__(self, problem: Problem, layout: SignalLayout, sizes: SignalSizes, wanted: Sequence[str]):
        super().__init__(problem)
        self.layout, self.sizes, self.wanted = layout, sizes, wanted
        self.images_at_once = sizes.images
        counts = {name: math.prod(problem.specs[name].shape) for name in wanted if name != "dx"}
        self.sums = {name: self.workspace.shared(count) for name, count in counts.items()}

    def of_all_images(self) -> Program:
        batch = self.sizes.batch
        for first in range(0, batch, self.images_at_once):
            self.chunk(Images(first, min(self.images_at_once, batch - first)))
        for name, sums in self.sums.items():
            n = math.prod(self.problem.specs[name].shape)
            self.add(convolution.copy_sums, n, 2 * self.item, sums=sums, y=self.problem[name])
        return self.program(self.name)

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

    def __init__(self, problem: Problem, layout: SignalLayout, sizes: SignalSizes, wanted: Sequence[str]):
        super().__init__(problem, layout, sizes, wanted)
        self.windows = self.signals(sizes.filters, 1)
        self.field = self.signals(sizes.channels, sizes.phases)

    def signals(self, channels: int, phases: int) -> Signals:
        """The signals of so many channels of each group."""
        s = self.sizes
        channel = phases * s.pitch
        data: Any = self.workspace.shared(s.group * channels * channel)
        return Signals(data, channels * channel, channel, s.pitch, s.pad)

    # --- images to signals and back ---------------------------------------------------------------------------------

    def to_signals(self, name: str, signals_: Signals, sizes: Mapping[str, Any], images: Images) -> None:
        units = sizes["planes"].channels * sizes["phases"]
        unit_bytes = 2 * self.item * images.count * self.sizes.grid
        self.add(
            convolution.to_signals, units, unit_bytes, **sizes, images=images, x=self.problem[name], signals=signals_
        )

    def from_signals(self, signals_: Signals, sizes: Mapping[str, Any], covered: bool, images: Images) -> None:
        """Write dx."""
        units = sizes["planes"].channels * images.count
        own = {"images": images, "covered": covered, "x": self.problem["dx"], "signals": signals_}
        unit_bytes = 2 * self.item * self.sizes.grid * sizes["phases"]
        self.add(convolution.from_signals, units, unit_bytes, **sizes, **own)

    @once
    def window_images(self) -> dict[str, Any]:
        counts = [axis.count for axis in self.layout.along]
        return self.images([[(0, count, 0) for count in counts]], counts, (1, 1, 1), self.sizes.filters)

    @once
    def field_images(self) -> dict[str, Any]:
        along = self.layout.along
        sizes, strides = [axis.size for axis in along], tuple(axis.stride for axis in along)
        return self.images(self.layout.sources, sizes, strides, self.sizes.channels)

    def images(self, sources: Any, sizes: Sequence[int], steps: Sequence[int], channels: int) -> dict[str, Any]:
        """The kernels' arguments about images: their sizes, and the places of their elements in the grid."""
        s = self.sizes
        along = [list(each) for each in zip(sizes, steps, self.layout.grid, strict=True)]
        ranges = [[list(each) for each in phase] for phase in sources]
        if along[2][0] == along[2][2] and along[1][1] == along[2][1] == 1:
            # Rows without anything between them are one long row.
            along = [along[0], [1, 1, 1], [along[1][0] * along[2][0], 1, along[1][2] * along[2][2]]]
            ranges = [[d, [0, 1, 0], [each * sizes[2] for each in h]] for d, h, _ in ranges]
        (depth, step_d, _), (height, step_h, grid_h), (width, step_w, grid_w) = along
        return {
            "planes": ImageSizes(channels * s.group, depth, height, width),
            "grid": GridSteps(s.grid, grid_h, grid_w, step_d, step_h, step_w),
            "phases": len(ranges),
            "table": self.tables.add(ranges),
            "filled": all(math.prod(high - low for low, high, _ in each) == s.grid for each in ranges),
        }

    # --- products ---------------------------------------------------------------------------------------------------

    @once
    def field_shifts(self) -> int:
        """The table of the places in `field` at which a channel's signal begins for each element of a window."""
        s = self.sizes
        taps = np.array([phase * s.pitch + shift + s.pad for phase, shift in self.layout.taps])
        return self.tables.add(np.arange(s.channels)[:, None] * self.field.channel + taps)

    def dot_products(self, images: Images) -> None:
        """dw: dot products of the signals of the windows with shifted signals of the array that they slide over."""
        s = self.sizes
        columns, tiles = s.channels * s.taps, -(-s.filters // convolution.ROWS)
        most_ranges = min(-(-columns // convolution.COLUMNS), -(-FEWEST_UNITS // (tiles * s.group)))
        ranges = max(-(-columns // MOST_COLUMNS), most_ranges)
        per_range = round_up(-(-columns // ranges), convolution.COLUMNS)
        ranges = -(-columns // per_range)
        tiles_per_range = -(-tiles // min(tiles, -(-FEWEST_UNITS // (ranges * s.group))))
        rows = Ranges(s.filters, -(-tiles // tiles_per_range), tiles_per_range * convolution.ROWS)
        length = s.length(images.count)
        arguments = {"rows": rows, "columns": Ranges(columns, ranges, per_range), "length": length}
        arguments |= {"shifts": self.field_shifts, "single": s.filters == 1, "add": images.first > 0}
        arguments |= {"dy": self.windows, "x": self.field, "sums": self.sums["dw"]}
        units, unit_products = s.group * rows.count * ranges, rows.per_range * per_range * length
        self.add_products(convolution.dot_products, units, unit_products, **arguments)

    def packed(self, words: Sequence[Sequence[int]], rows: int, sources: Any, step: int) -> dict[str, Any]:
        """Add the step that packs the filters for these tiles; return the arguments of `correlate` about them.

        step: the elements from one channel of a filter to the next.
        """
        last = words[-1]
        size = last[convolution.WEIGHTS] + last[convolution.TERMS] * rows
        weights: Any = self.workspace.shared(self.sizes.group * size)
        found = {"tiles": len(words), "table": self.tables.add(words), "weights": Rows(weights, size)}
        units, unit_bytes = self.sizes.group * len(words), 8 * size / len(words)
        filters = {"w": self.problem["w"], "w_group": self.sizes.filters * self.sizes.channels * self.sizes.taps}
        given = {"sources": self.tables.add(sources), "rows": rows, "step": step}
        self.add(convolution.pack_weights, units, unit_bytes, **found, **filters, **given)
        return {**found, "single": rows == 1}

    def correlate(self, arguments: Mapping[str, Any], images: Images) -> None:
        s = self.sizes
        blocks = -(-images.count * s.grid // s.tile)
        unit_products = s.tile * s.channels * s.filters * s.taps
        self.add_products(convolution.correlate, s.group * blocks, unit_products, **arguments, blocks=blocks)


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
        s = self.sizes
        length = s.length(images.count)
        given = {"add": images.first > 0, "signals": self.windows, "sums": self.sums["db"]}
        self.add(convolution.sum_signals, s.group * s.filters, length * self.item, length=length, **given)

    @once
    def to_field(self) -> dict[str, Any]:
        """The arguments of `correlate` except for the number of images; a tile has some channels of a phase."""
        s = self.sizes
        rows = 1 if s.channels == 1 else convolution.ROWS
        words, shifts, sources, packed, start = [], [], [], 0, 0
        for p in range(s.phases):
            taps = [(k, shift) for k, (phase, shift) in enumerate(self.layout.taps) if phase == p]
            m = np.arange(s.filters)[:, None]
            shifts.append((m * s.pitch + s.pad - np.array([shift for _, shift in taps])).ravel())
            sources.append((m * (s.channels * s.taps) + np.array([k for k, _ in taps])).ravel())
            terms = s.filters * len(taps)
            for channel in range(0, s.channels, rows):
                out = channel * self.field.channel + p * s.pitch + s.pad
                words.append([packed, start, terms, out, channel, min(rows, s.channels - channel)])
                packed += terms * rows
            start += terms
        arguments = self.packed(words, rows, np.concatenate(sources), s.taps)
        return {**arguments, "shifts": self.tables.add(np.concatenate(shifts)), "dy": self.windows, "dx": self.field}


class TransposedSteps(SignalSteps):
    """Transposed convolution: x has a number for each window, and windows slide over dy.

    dx is a sum of shifted signals of dy times filters here, too, of all phases of dy.
    """

    def chunk(self, images: Images) -> None:
        if "db" in self.sums:  # of all elements of dy: its signals lack those that no window reaches
            size = math.prod(axis.size for axis in self.layout.along)
            self.sum_planes(images, self.sizes.group * self.sizes.channels, size)
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
        s = self.sizes
        rows, terms = 1 if s.filters == 1 else convolution.ROWS, s.channels * s.taps
        words = [
            [m * terms, 0, terms, m * self.windows.channel + s.pad, m, min(rows, s.filters - m)]
            for m in range(0, s.filters, rows)
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


def by_windows(layout: SignalLayout, sizes: SignalSizes) -> bool:
    """Whether matrices of windows take less time than signals."""
    counts = [axis.count for axis in layout.along]
    waste, run = math.prod(layout.grid) / math.prod(counts), next((n for n in counts[::-1] if n > 1), sizes.batch)
    return waste > WASTE and sizes.filters * (waste - 0.5) > ELEMENT_PRODUCTS + RUN_PRODUCTS / run


class WindowSteps(GradientSteps):
    """The steps by matrices of windows; the workspace also holds dy with a row for each filter of some images."""

    name = "windows"

    def __init__(self, problem: Problem, layout: SignalLayout, sizes: SignalSizes, wanted: Sequence[str]):
        super().__init__(problem, layout, sizes, wanted)
        self.per_image = math.prod(axis.count for axis in layout.along)
        self.plane = math.prod(axis.size for axis in layout.along)
        self.filters, self.elements = sizes.group * sizes.filters, sizes.channels * sizes.taps
        self.images_at_once = max(1, min(sizes.batch, CHUNK_BYTES // (self.item * self.filters * self.per_image)))
        row = round_up(self.images_at_once * self.per_image, sizes.lanes) + sizes.lanes
        self.dy: Any = Rows(self.workspace.shared(self.filters * row), row)
        self.axes, self.taps = map(self.tables.add, tables(layout.along))
        left, right = (self.workspace.private(size) for size in gemm.space(sizes.lanes))
        matrix = self.workspace.private(convolution.ELEMENTS * convolution.POSITIONS)
        self.memory = {"left": left, "right": right, "matrix": matrix}

    def chunk(self, images: Images) -> None:
        gathered = Gathered(images, images.count * self.per_image, self.dy)
        if "db" in self.sums:
            self.sum_planes(images, self.filters, self.per_image)
        if "dw" in self.sums or "dx" in self.wanted:
            unit_bytes, given = 2 * self.item * gathered.windows, {"gathered": gathered, "size": self.per_image}
            self.add(convolution.gather_dy, self.filters, unit_bytes, filters=self.filters, **given)
        if "dw" in self.sums:
            self.filters_back(gathered)
        if "dx" in self.wanted:
            self.images_back(gathered)

    def arguments(self, gathered: Gathered) -> dict[str, Any]:
        """The arguments that both products share."""
        s = self.sizes
        image = s.group * s.channels * self.plane
        found = WindowTables(self.axes, self.taps, s.taps, s.channels, s.filters, self.plane, image)
        return {"windows": found, "g": gathered, **self.memory}

    def filters_back(self, gathered: Gathered) -> None:
        s = self.sizes
        per_block = max(FEWEST_ELEMENTS, round_up(-(-self.elements * s.group // WANTED_UNITS), FEWEST_ELEMENTS))
        per_block = min(per_block, convolution.ELEMENTS, self.elements)
        blocks = -(-self.elements // per_block)
        arguments = {**self.arguments(gathered), "blocks": blocks, "per_block": per_block, "dw": self.sums["dw"]}
        unit_products = per_block * s.filters * gathered.windows
        self.add_products(convolution.filters_back, s.group * blocks, unit_products, **arguments)

    def images_back(self, gathered: Gathered) -> None:
        s, count = self.sizes, gathered.images.count
        most = max(1, PLANES // self.plane)
        channels = min(-(-FEWEST_ELEMENTS // s.taps), s.channels, most)
        images = max(1, min(-(-convolution.POSITIONS // self.per_image), count, most // channels))
        sums = self.workspace.private(images * channels * self.plane)
        planes = {"image_blocks": -(-count // images), "channel_blocks": -(-s.channels // channels)}
        units = s.group * math.prod(planes.values())
        planes |= {"block_images": images, "block_channels": channels}
        unit_products = images * self.per_image * channels * s.taps * s.filters
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
    sizes = _sizes(problem, shapes["w"], layout)
    if steps is ConvolutionSteps and by_windows(layout, sizes):
        return WindowSteps(problem, layout, sizes, wanted).of_all_images()
    return steps(problem, layout, sizes, wanted).of_all_images()


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
    return steps.program()


def _sizes(problem: Problem, filters: Sequence[int], layout: SignalLayout) -> SignalSizes:
    """The sizes. filters: the shape of w: the number of filters of all groups, and the channels of one group."""
    dtype, group = precision(problem), problem.attributes["group"]
    batch = problem.specs["x"].shape[0]
    phases, grid = len(layout.phases), math.prod(layout.grid)
    image_bytes = DTYPES[dtype].itemsize * grid * (filters[0] + group * filters[1] * phases)
    return SignalSizes(
        batch=batch,
        group=group,
        filters=filters[0] // group,
        channels=filters[1],
        taps=len(layout.taps),
        phases=phases,
        grid=grid,
        reach=layout.reach,
        images=max(1, min(batch, CHUNK_BYTES // image_bytes)),
        lanes=vector_lanes(dtype),
    )
