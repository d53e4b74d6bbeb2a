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

from opgrad.contract import Array
from opgrad.cpu.compiler.native import kernel, vector_lanes
from opgrad.cpu.compiler.simd import Pointer
from opgrad.cpu.convolution import products, signals
from opgrad.cpu.convolution.grid import Layout
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.problem import Problem
from opgrad.windows import MOST_AXES, Axis, convolution_axes

CHUNK_BYTES: Final = 8 << 20  # of signals
PART_PRODUCTS: Final = 1 << 18  # 5 µs of them: less is not worth another part
MOST_PARTS: Final = 64
UNITS: Final = 32  # that the dot products make at least, if there are so many tiles
MOST_COLUMNS: Final = 48  # of a unit of dot products: a block of 4 KiB of each stays in the second-level cache
ONE_WINDOW: Final = Axis(1, 1, 1)


@kernel
def copy_out(part, per_part, n, sums: Pointer, y: Pointer):
    begin = part * per_part
    signals.copy(y + begin, sums + begin, min(per_part, n - begin))


@kernel
def clear_out(part, n, y: Pointer):
    signals.clear(y, n)


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
    width: int  # of a tile
    lanes: int

    @property
    def front(self) -> int:
        """The zeros before a signal; there are as many behind it."""
        return _up(self.reach, self.lanes)

    @property
    def pitch(self) -> int:
        """From one signal to the next: not a multiple of 4 KiB, whose addresses compete for places in the cache."""
        size = 2 * self.front + _up(self.images * self.grid, self.width)
        return size + self.lanes if size * 4 % 4096 == 0 else size


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def conv_grad(problem: Problem) -> Program:
    shapes = {name: problem.specs[name].shape for name in ("dy", "x", "w")}
    wanted = [name for name in ("dx", "dw", "db") if problem.operands.get(name) is not None]
    if not all(math.prod(shape) for shape in shapes.values()):
        return _nothing(problem, wanted)
    found = convolution_axes(shapes, problem.attributes)
    layout = Layout((ONE_WINDOW,) * (MOST_AXES - len(found)) + found)
    sizes = _sizes(problem, shapes, layout)
    return _Steps(problem, layout, sizes, wanted).program()


def _nothing(problem: Problem, wanted: Sequence[str]) -> Program:
    """Sums of nothing; only the bias may have a gradient, if x has no channels, and then M is 0 too."""
    sizes = {name: math.prod(problem.specs[name].shape) for name in wanted}
    steps = [Step(clear_out, 1, {"n": n, "y": problem[name]}) for name, n in sizes.items() if n]
    return Program(steps)


def _sizes(problem: Problem, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> Sizes:
    dtype, group = precision(problem), problem.attributes["group"]
    (batch, channels), (filters, _) = shapes["x"][:2], shapes["w"][:2]
    phases, grid, lanes = len(layout.phases), math.prod(layout.grid), vector_lanes(dtype)
    image_bytes = (8 if dtype == "float64" else 4) * grid * (filters + channels * phases)
    images = max(1, min(batch, CHUNK_BYTES // image_bytes))
    return Sizes(
        batch, group, filters // group, channels // group, len(layout.taps), phases, grid, layout.reach, images,
        products.COLUMNS * lanes, lanes,
    )  # fmt: skip


class _Steps:
    """Puts the steps together; scratch memory holds packed filters, sums, and the signals of dy and x (or dx)."""

    def __init__(self, problem: Problem, layout: Layout, sizes: Sizes, wanted: Sequence[str]):
        self.problem, self.layout, self.sizes, self.wanted = problem, layout, sizes, wanted
        self.dtype = precision(problem)
        self.item = 8 if self.dtype == "float64" else 4
        self.end = 8 * STATUS_WORDS
        self.tables: list[Array] = []
        self.steps: list[Step] = []

    def space(self, numbers: int) -> Scratch:
        """Scratch memory for so many numbers."""
        start = _up(self.end, 64)
        self.end = start + numbers * self.item
        return Scratch(start, self.dtype)

    def table(self, values: Any) -> int:
        """The address of a table of words."""
        self.tables.append(np.ascontiguousarray(values, np.int64))
        return int(self.tables[-1].ctypes.data)

    def program(self) -> Program:
        s = self.sizes
        dy_signals = self.space(s.group * s.filters * s.pitch)
        x_signals = self.space(s.group * s.channels * s.phases * s.pitch)
        sums = {name: self.space(math.prod(self.problem.specs[name].shape)) for name in self.wanted if name != "dx"}
        correlate = self.correlation(dy_signals, x_signals) if "dx" in self.wanted else None
        for first in range(0, s.batch, s.images):
            images = min(s.images, s.batch - first)
            self.lay_out("dy", dy_signals, first, images)
            if "db" in sums:
                self.totals(dy_signals, sums["db"], first, images)
            if "dw" in sums:
                self.lay_out("x", x_signals, first, images)
                self.dots(dy_signals, x_signals, sums["dw"], first, images)
            if correlate is not None:
                self.correlate(correlate, images)
                self.take_back(x_signals, first, images)
        for name, numbers in sums.items():
            n = math.prod(self.problem.specs[name].shape)
            per = partition.per_part(n, 2 * self.item)
            arguments = {"per_part": per, "n": n, "sums": numbers, "y": self.problem[name]}
            self.steps.append(Step(copy_out, partition.count(n, per), arguments))
        return Program(self.steps, self.end, name="conv_grad", tables=self.tables)

    def spread(self, made: Any, units: int, per: int, arguments: Mapping[str, Any]) -> None:
        self.steps.append(Step(made, partition.count(units, per), {**arguments, "per_part": per, "units": units}))

    # --- images to signals and back ---------------------------------------------------------------------------------

    def lay_out(self, name: str, to: Scratch, first: int, images: int) -> None:
        s = self.sizes
        if name == "dy":
            counts = [axis.count for axis in self.layout.along]
            facts = self.images([[(0, count, 0) for count in counts]], counts, (1, 1, 1), s.filters)
        else:
            facts = self.x_images()
        units = facts["channels"] * facts["phases"]
        here = {"front": s.front, "pitch": s.pitch, "first_image": first, "images": images}
        per = partition.per_part(units, 2 * self.item * images * s.grid)
        self.spread(signals.lay_out, units, per, {**facts, **here, "x": self.problem[name], "signals": to})

    def take_back(self, of: Scratch, first: int, images: int) -> None:
        s, facts = self.sizes, self.x_images()
        units = facts["channels"] * images
        here = {"front": s.front, "pitch": s.pitch, "first_image": first, "images": images}
        per = partition.per_part(units, 2 * self.item * s.grid * s.phases)
        self.spread(
            signals.take_back,
            units,
            per,
            {**facts, **here, "covered": self.layout.covered, "x": self.problem["dx"], "signals": of},
        )

    def x_images(self) -> dict[str, int]:
        along = self.layout.along
        sizes, strides = [axis.size for axis in along], tuple(axis.stride for axis in along)
        return self.images(self.layout.sources, sizes, strides, self.sizes.channels)

    def images(self, sources: Any, sizes: Sequence[int], steps: Sequence[int], channels: int) -> dict[str, int]:
        """What the kernels are told of images: their sizes, and where their elements stand in the grid."""
        along = [list(each) for each in zip(sizes, steps, self.layout.grid, strict=True)]
        ranges = [[list(each) for each in phase] for phase in sources]
        if along[2][0] == along[2][2] and along[1][1] == along[2][1] == 1:
            # Rows without anything between them are one long row.
            along = [along[0], [1, 1, 1], [along[1][0] * along[2][0], 1, along[1][2] * along[2][2]]]
            ranges = [[d, [0, 1, 0], [each * sizes[2] for each in h]] for d, h, _ in ranges]
        (depth, step_d, _), (height, step_h, grid_h), (width, step_w, grid_w) = along
        return {
            "phases": len(ranges),
            "phase_table": self.table(ranges),
            "channels": channels * self.sizes.group,
            "depth": depth,
            "height": height,
            "width": width,
            "step_d": step_d,
            "step_h": step_h,
            "step_w": step_w,
            "grid_h": grid_h,
            "grid_w": grid_w,
            "grid": self.sizes.grid,
            "filled": all(math.prod(high - low for low, high, _ in each) == self.sizes.grid for each in ranges),
        }

    # --- products ---------------------------------------------------------------------------------------------------

    def per_part(self, units: int, unit_products: int) -> int:
        """How many units of so many products make a part."""
        wanted = max(units * unit_products / MOST_PARTS, PART_PRODUCTS)
        return max(1, min(units, round(wanted / unit_products)))

    def totals(self, dy: Scratch, sums: Scratch, first: int, images: int) -> None:
        s = self.sizes
        rows, length = s.group * s.filters, _up(images * s.grid, s.lanes)
        per = partition.per_part(rows, length * self.item)
        arguments = {"per_part": per, "rows": rows, "length": length, "pitch": s.pitch, "front": s.front}
        memory = {"add": first, "signals": dy, "sums": sums}
        self.steps.append(Step(products.totals, partition.count(rows, per), arguments | memory))

    def dots(self, dy: Scratch, x: Scratch, sums: Scratch, first: int, images: int) -> None:
        s = self.sizes
        taps = np.array([phase * s.pitch + shift + s.front for phase, shift in self.layout.taps])
        shifts = np.arange(s.channels)[:, None] * (s.phases * s.pitch) + taps
        columns, tiles = s.channels * s.taps, -(-s.filters // products.ROWS)
        length = _up(images * s.grid, s.lanes)
        ranges = max(-(-columns // MOST_COLUMNS), min(-(-columns // products.COLUMNS), -(-UNITS // (tiles * s.group))))
        per_range = _up(-(-columns // ranges), products.COLUMNS)
        ranges = -(-columns // per_range)
        tiles_per_range = -(-tiles // min(tiles, -(-UNITS // (ranges * s.group))))
        row_ranges = -(-tiles // tiles_per_range)
        units = s.group * row_ranges * ranges
        arguments = {
            "row_ranges": row_ranges,
            "rows_per_range": tiles_per_range * products.ROWS,
            "ranges": ranges,
            "per_range": per_range,
            "rows": s.filters,
            "columns": columns,
            "length": length,
            "shifts": self.table(shifts),
            "add": first,
            "one": s.filters == 1,
            "a": dy,
            "a_group": s.filters * s.pitch,
            "a_row": s.pitch,
            "front": s.front,
            "x": x,
            "x_group": s.channels * s.phases * s.pitch,
            "sums": sums,
        }
        self.spread(
            products.dots, units, self.per_part(units, tiles_per_range * products.ROWS * per_range * length), arguments
        )

    def correlation(self, dy: Scratch, dx: Scratch) -> dict[str, Any]:
        """Packs the filters; the arguments of `correlate` but those that depend on the number of images."""
        s = self.sizes
        rows = 1 if s.channels == 1 else products.ROWS
        tiles, shifts, sources, packed, start = [], [], [], 0, 0
        for p in range(s.phases):
            taps = [(k, shift) for k, (phase, shift) in enumerate(self.layout.taps) if phase == p]
            m = np.arange(s.filters)[:, None]
            shifts.append((m * s.pitch - np.array([shift for _, shift in taps])).ravel())
            sources.append((m * (s.channels * s.taps) + np.array([k for k, _ in taps])).ravel())
            terms = s.filters * len(taps)
            for channel in range(0, s.channels, rows):
                out = (channel * s.phases + p) * s.pitch + s.front
                tiles.append([packed, start, terms, out, channel, min(rows, s.channels - channel)])
                packed += terms * rows
            start += terms
        weights, tile_table = self.space(s.group * packed), self.table(tiles)
        packing = {
            "tile_count": len(tiles),
            "tiles": tile_table,
            "sources": self.table(np.concatenate(sources)),
            "rows": rows,
            "channel_step": s.taps,
            "source_group": s.filters * s.channels * s.taps,
            "w": self.problem["w"],
            "weights": weights,
            "weight_group": packed,
        }
        units = s.group * len(tiles)
        self.spread(products.pack_weights, units, partition.per_part(units, 8 * packed / len(tiles)), packing)
        return {
            "tiles": tile_table,
            "tile_count": len(tiles),
            "shifts": self.table(np.concatenate(shifts)),
            "row_step": s.phases * s.pitch,
            "one": rows == 1,
            "signals": dy,
            "signal_group": s.filters * s.pitch,
            "front": s.front,
            "weights": weights,
            "weight_group": packed,
            "out": dx,
            "out_group": s.channels * s.phases * s.pitch,
        }

    def correlate(self, arguments: Mapping[str, Any], images: int) -> None:
        s = self.sizes
        blocks = -(-images * s.grid // s.width)
        units = s.group * blocks
        per = self.per_part(units, s.width * s.channels * s.filters * s.taps)
        self.spread(products.correlate, units, per, {**arguments, "blocks": blocks})
