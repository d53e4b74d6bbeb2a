"""The gradient of convolution, as products of signals (`signals`, `products`).

With the channels of dy and x laid out as signals, a window's element k stands at a fixed shift from the window, so
dx is a sum of shifted signals of dy times filters, dw holds dot products of signals of dy with shifted signals of x,
and no matrix of windows is written. A batch is taken in chunks of images whose signals stay in the cache.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from opgrad.contract import DTYPES, Array
from opgrad.contract.problem import Problem
from opgrad.contract.windows import MOST_AXES, Axis, convolution_axes
from opgrad.cpu.compiler.native import Kernel, kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.convolution import products, signals
from opgrad.cpu.convolution.grid import Layout
from opgrad.cpu.convolution.products import Filters, Ranges, Tiles
from opgrad.cpu.convolution.signals import Grid, Images, Phases, Planes, Signals
from opgrad.cpu.loops.fill import zero_step
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.loops.map import write_same
from opgrad.cpu.runtime.execute import Program, Step, shared_out
from opgrad.cpu.runtime.workspace import Workspace
from opgrad.locks import once

CHUNK_BYTES: Final = 8 << 20  # of signals
PART_PRODUCTS: Final = 1 << 18  # 5 µs of them: less is not worth another part
MOST_PARTS: Final = 64
FEWEST_UNITS: Final = 32  # of dot products, if there are so many tiles
MOST_COLUMNS: Final = 48  # of a unit of dot products: a block of 4 KiB of each stays in the second-level cache
ONE_WINDOW: Final = Axis(1, 1, 1)


@kernel
def copy_sums(elements: Units, sums: Pointer, y: Pointer):
    write_same(y, elements.start, elements.stop, 0, (sums,), ())


@dataclass(frozen=True)
class Sizes:
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
        return products.COLUMNS * self.lanes

    @property
    def pad(self) -> int:
        """The zeros before a signal; there are as many behind it."""
        return _round_up(self.reach, self.lanes)

    @property
    def pitch(self) -> int:
        """From one signal to the next: not a multiple of 4 KiB, whose addresses compete for places in the cache."""
        size = 2 * self.pad + _round_up(self.images * self.grid, self.tile)
        return size + self.lanes if size * 4 % 4096 == 0 else size

    def length(self, images: int) -> int:
        """Whole vectors of the signals of so many images."""
        return _round_up(images * self.grid, self.lanes)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def conv_grad(problem: Problem) -> Program:
    shapes = {name: problem.specs[name].shape for name in ("dy", "x", "w")}
    wanted = [name for name in ("dx", "dw", "db") if problem.operands.get(name) is not None]
    if not all(math.prod(shape) for shape in shapes.values()):
        return _empty(problem, wanted)
    found = convolution_axes(shapes, problem.attributes)
    layout = Layout((ONE_WINDOW,) * (MOST_AXES - len(found)) + found)
    sizes = _sizes(problem, shapes, layout)
    return _Steps(problem, layout, sizes, wanted).program()


def _empty(problem: Problem, wanted: Sequence[str]) -> Program:
    """Sums of nothing; only the bias may have a gradient, if x has no channels, and then M is 0 too."""
    sizes = {name: math.prod(problem.specs[name].shape) for name in wanted}
    operands = [(problem[name], n) for name, n in sizes.items() if n]
    return Program([zero_step(y, n, n * DTYPES[y.dtype].itemsize) for y, n in operands])


def _sizes(problem: Problem, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> Sizes:
    dtype, group = precision(problem), problem.attributes["group"]
    (batch, channels), (filters, _) = shapes["x"][:2], shapes["w"][:2]
    phases, grid = len(layout.phases), math.prod(layout.grid)
    image_bytes = DTYPES[dtype].itemsize * grid * (filters + channels * phases)
    return Sizes(
        batch=batch,
        group=group,
        filters=filters // group,
        channels=channels // group,
        taps=len(layout.taps),
        phases=phases,
        grid=grid,
        reach=layout.reach,
        images=max(1, min(batch, CHUNK_BYTES // image_bytes)),
        lanes=vector_lanes(dtype),
    )


def _fixed_parts(kernel: Kernel, units: int, unit_products: int, arguments: Mapping[str, Any]) -> Step:
    """The step of a kernel whose units take so many products each."""
    wanted = max(units * unit_products / MOST_PARTS, PART_PRODUCTS)
    return Step(kernel, units, arguments, max(1, min(units, round(wanted / unit_products))))


class _Steps:
    """Puts the steps together; the workspace holds packed filters, sums, and the signals of dy and x (or dx)."""

    def __init__(self, problem: Problem, layout: Layout, sizes: Sizes, wanted: Sequence[str]):
        self.problem, self.layout, self.sizes, self.wanted = problem, layout, sizes, wanted
        self.workspace = Workspace(precision(problem))
        self.item = DTYPES[self.workspace.precision].itemsize
        self.tables: list[Array] = []
        self.steps: list[Step] = []
        self.dy = self.signals(sizes.filters, 1)
        self.x = self.signals(sizes.channels, sizes.phases)
        counts = {name: math.prod(problem.specs[name].shape) for name in wanted if name != "dx"}
        self.sums = {name: self.workspace.shared(count) for name, count in counts.items()}

    def signals(self, channels: int, phases: int) -> Signals:
        """The signals of so many channels of each group."""
        s = self.sizes
        channel = phases * s.pitch
        data: Any = self.workspace.shared(s.group * channels * channel)
        return Signals(data, channels * channel, channel, s.pitch, s.pad)

    def table(self, values: Any) -> int:
        """The address of a table of words."""
        self.tables.append(np.ascontiguousarray(values, np.int64))
        return int(self.tables[-1].ctypes.data)

    def program(self) -> Program:
        s = self.sizes
        correlation = self.correlation() if "dx" in self.wanted else {}
        for first in range(0, s.batch, s.images):
            images = Images(first, min(s.images, s.batch - first))
            self.to_signals("dy", self.dy, self.dy_images, images)
            if "db" in self.sums:
                self.sum_signals(images)
            if "dw" in self.sums:
                self.to_signals("x", self.x, self.x_images, images)
                self.dot_products(images)
            if "dx" in self.wanted:
                self.correlate(correlation, images)
                self.from_signals(images)
        for name, sums in self.sums.items():
            arguments = {"sums": sums, "y": self.problem[name]}
            n = math.prod(self.problem.specs[name].shape)
            self.steps.append(shared_out(copy_sums, n, 2 * self.item, arguments))
        return Program(self.steps, self.workspace, name="conv_grad", tables=self.tables)

    # --- images to signals and back ---------------------------------------------------------------------------------

    def to_signals(self, name: str, signals_: Signals, sizes: Mapping[str, Any], images: Images) -> None:
        units = sizes["planes"].channels * sizes["phases"].count
        arguments = {**sizes, "images": images, "x": self.problem[name], "signals": signals_}
        unit_bytes = 2 * self.item * images.count * self.sizes.grid
        self.steps.append(shared_out(signals.to_signals, units, unit_bytes, arguments))

    def from_signals(self, images: Images) -> None:
        s = self.sizes
        units = s.group * s.channels * images.count
        own = {"images": images, "covered": self.layout.covered, "x": self.problem["dx"], "signals": self.x}
        unit_bytes = 2 * self.item * s.grid * s.phases
        self.steps.append(shared_out(signals.from_signals, units, unit_bytes, {**self.x_images, **own}))

    @once
    def dy_images(self) -> dict[str, Any]:
        counts = [axis.count for axis in self.layout.along]
        return self.images([[(0, count, 0) for count in counts]], counts, (1, 1, 1), self.sizes.filters)

    @once
    def x_images(self) -> dict[str, Any]:
        along = self.layout.along
        sizes, strides = [axis.size for axis in along], tuple(axis.stride for axis in along)
        return self.images(self.layout.sources, sizes, strides, self.sizes.channels)

    def images(self, sources: Any, sizes: Sequence[int], steps: Sequence[int], channels: int) -> dict[str, Any]:
        """What the kernels are told of images: their sizes, and where their elements stand in the grid."""
        s = self.sizes
        along = [list(each) for each in zip(sizes, steps, self.layout.grid, strict=True)]
        ranges = [[list(each) for each in phase] for phase in sources]
        if along[2][0] == along[2][2] and along[1][1] == along[2][1] == 1:
            # Rows without anything between them are one long row.
            along = [along[0], [1, 1, 1], [along[1][0] * along[2][0], 1, along[1][2] * along[2][2]]]
            ranges = [[d, [0, 1, 0], [each * sizes[2] for each in h]] for d, h, _ in ranges]
        (depth, step_d, _), (height, step_h, grid_h), (width, step_w, grid_w) = along
        return {
            "planes": Planes(channels * s.group, depth, height, width),
            "grid": Grid(s.grid, grid_h, grid_w, step_d, step_h, step_w),
            "phases": Phases(len(ranges), self.table(ranges)),
            "filled": all(math.prod(high - low for low, high, _ in each) == s.grid for each in ranges),
        }

    # --- products ---------------------------------------------------------------------------------------------------

    def sum_signals(self, images: Images) -> None:
        s = self.sizes
        length = s.length(images.count)
        arguments = {"length": length, "add": images.first, "signals": self.dy, "sums": self.sums["db"]}
        self.steps.append(shared_out(products.sum_signals, s.group * s.filters, length * self.item, arguments))

    @once
    def x_shifts(self) -> int:
        """The table of where each channel's signal begins for each tap."""
        s = self.sizes
        taps = np.array([phase * s.pitch + shift + s.pad for phase, shift in self.layout.taps])
        return self.table(np.arange(s.channels)[:, None] * self.x.channel + taps)

    def dot_products(self, images: Images) -> None:
        s = self.sizes
        columns, tiles = s.channels * s.taps, -(-s.filters // products.ROWS)
        most_ranges = min(-(-columns // products.COLUMNS), -(-FEWEST_UNITS // (tiles * s.group)))
        ranges = max(-(-columns // MOST_COLUMNS), most_ranges)
        per_range = _round_up(-(-columns // ranges), products.COLUMNS)
        ranges = -(-columns // per_range)
        tiles_per_range = -(-tiles // min(tiles, -(-FEWEST_UNITS // (ranges * s.group))))
        rows = Ranges(s.filters, -(-tiles // tiles_per_range), tiles_per_range * products.ROWS)
        length = s.length(images.count)
        arguments = {"rows": rows, "columns": Ranges(columns, ranges, per_range), "length": length}
        arguments |= {"shifts": self.x_shifts, "single": s.filters == 1, "add": images.first, "dy": self.dy}
        arguments |= {"x": self.x, "sums": self.sums["dw"]}
        units, unit_products = s.group * rows.count * ranges, rows.per_range * per_range * length
        self.steps.append(_fixed_parts(products.dot_products, units, unit_products, arguments))

    def correlation(self) -> dict[str, Any]:
        """Packs the filters; the arguments of `correlate` but those that depend on the number of images."""
        s = self.sizes
        rows = 1 if s.channels == 1 else products.ROWS
        words, shifts, sources, packed, start = [], [], [], 0, 0
        for p in range(s.phases):
            taps = [(k, shift) for k, (phase, shift) in enumerate(self.layout.taps) if phase == p]
            m = np.arange(s.filters)[:, None]
            shifts.append((m * s.pitch + s.pad - np.array([shift for _, shift in taps])).ravel())
            sources.append((m * (s.channels * s.taps) + np.array([k for k, _ in taps])).ravel())
            terms = s.filters * len(taps)
            for channel in range(0, s.channels, rows):
                out = channel * self.x.channel + p * s.pitch + s.pad
                words.append([packed, start, terms, out, channel, min(rows, s.channels - channel)])
                packed += terms * rows
            start += terms
        w: Any = self.problem["w"]
        weights: Any = self.workspace.shared(s.group * packed)
        arguments = {"tiles": Tiles(len(words), self.table(words)), "shifts": self.table(np.concatenate(shifts))}
        arguments |= {"sources": self.table(np.concatenate(sources)), "rows": rows, "single": rows == 1}
        arguments |= {"w": Filters(w, s.filters * s.channels * s.taps, s.taps), "weights": Rows(weights, packed)}
        arguments |= {"dy": self.dy, "dx": self.x}
        pack_bytes = 8 * packed / len(words)
        self.steps.append(shared_out(products.pack_weights, s.group * len(words), pack_bytes, arguments))
        return arguments

    def correlate(self, arguments: Mapping[str, Any], images: Images) -> None:
        s = self.sizes
        blocks = -(-images.count * s.grid // s.tile)
        unit_products = s.tile * s.channels * s.filters * s.taps
        arguments = {**arguments, "blocks": blocks}
        self.steps.append(_fixed_parts(products.correlate, s.group * blocks, unit_products, arguments))
