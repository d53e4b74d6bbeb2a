"""How the elements of an image are laid out in its signals: the grid of a signal, and the shift of a window's elements.

A window's element lies at s * q + r on an axis, for the stride s: q is its shift there, and r is its phase.
"""

import itertools
import math
from dataclasses import dataclass

from opgrad.base.locks import once
from opgrad.ops.reference.windows import WindowAxis


@dataclass(frozen=True)
class SignalLayout:
    """The layout of signals. `along` has three axes; those that an image lacks come first and have one element."""

    along: tuple[WindowAxis, ...]

    @once
    def elements(self) -> list[tuple[tuple[int, int], ...]]:
        """For each element of a window and each axis: q and r of its distance s * q + r from the first element."""
        kernels = itertools.product(*(range(axis.kernel) for axis in self.along))
        return [
            tuple(divmod(k * axis.dilation, axis.stride) for k, axis in zip(each, self.along, strict=True))
            for each in kernels
        ]

    @once
    def phases(self) -> list[tuple[int, ...]]:
        """The phases of a window's elements: for each, the remainder r on every axis."""
        return sorted({tuple(r for _, r in element) for element in self.elements})

    @once
    def ranges(self) -> list[list[tuple[int, int]]]:
        """For each phase and axis: the first q at which x has an element, and the q behind the last."""
        return [[_range(*each) for each in zip(self.along, r, strict=True)] for r in self.phases]

    @once
    def first(self) -> tuple[int, ...]:
        """The q of the grid's first element on each axis."""
        return tuple(min(low for low, _ in each) for each in zip(*self.ranges, strict=True))

    @once
    def grid(self) -> tuple[int, ...]:
        """The number of the grid's elements on each axis.

        A window that reaches beyond a row of dy, or of x, must meet zeros. The zeros behind a row are also those before
        the next one, so few are needed: a row of 7 elements takes 8 for windows of 3.
        """
        last = (max(high for _, high in each) for each in zip(*self.ranges, strict=True))
        reach = ((axis.kernel - 1) * axis.dilation // axis.stride for axis in self.along)
        each = zip(self.along, reach, self.first, last, strict=True)
        return tuple(max(axis.count + more - low, high) for axis, more, low, high in each)

    @once
    def taps(self) -> list[tuple[int, int]]:
        """For each element of a window: the number of its phase, and its shift in a signal of that phase."""
        found = []
        for element in self.elements:
            shift = 0
            for (q, _), low, size in zip(element, self.first, self.grid, strict=True):
                shift = shift * size + q - low
            found.append((self.phases.index(tuple(r for _, r in element)), shift))
        return found

    @once
    def reach(self) -> int:
        """The largest shift in either direction."""
        return max(abs(shift) for _, shift in self.taps)

    @once
    def sources(self) -> list[list[tuple[int, int, int]]]:
        """For each phase and axis: the grid's first element that x has, the one behind the last, that first in x."""
        return [
            [
                (low - begin, high - begin, low * axis.stride + part - axis.begin)
                for axis, part, (low, high), begin in zip(self.along, r, ranges, self.first, strict=True)
            ]
            for r, ranges in zip(self.phases, self.ranges, strict=True)
        ]

    @property
    def covered(self) -> bool:
        """Whether each element of x is in a signal."""
        found = sum(math.prod(high - low for low, high in ranges) for ranges in self.ranges)
        return found == math.prod(axis.size for axis in self.along)


def _range(axis: WindowAxis, r: int) -> tuple[int, int]:
    """The first q at which the axis has an element of phase r, and the q behind the last."""
    beyond = axis.count + (axis.kernel - 1) * axis.dilation // axis.stride
    low = max(0, -((r - axis.begin) // axis.stride))
    high = min(beyond, -((r - axis.begin - axis.size) // axis.stride))
    return low, max(low, high)
