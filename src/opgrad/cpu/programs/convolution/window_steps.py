"""The steps of a convolution's gradients by matrices of windows (`windows`)."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import convolution, gemm
from opgrad.cpu.kernels.convolution import Gathered, Images, WindowTables
from opgrad.cpu.programs.convolution.grid import SignalLayout
from opgrad.cpu.programs.convolution.steps import CHUNK_BYTES, GradientSteps, SignalSizes
from opgrad.cpu.runtime.program import round_up
from opgrad.ops.reference.windows import WindowAxis

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
