"""The steps of a convolution's gradients: the signals of x and dy, and products of signals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from opgrad.base.locks import once
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import convolution
from opgrad.cpu.kernels.convolution import GridSteps, Images, ImageSizes, Ranges, Signals
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.convolution.grid import SignalLayout
from opgrad.cpu.runtime.program import Program, round_up

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
