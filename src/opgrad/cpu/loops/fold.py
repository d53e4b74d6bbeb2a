"""total = term(total, x[i], numbers): the vector loop that sums over an array."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector, first, full, lanes, load, load_masked


@inline
def plus(total: Vector, x: Vector) -> Vector:
    return total + x


def folded(term: Callable[..., Vector]) -> Callable[..., Vector]:
    """The sum over x[begin:end], lane by lane, where term(total, x[i], *numbers) adds to a total.

    Pairwise summation in two levels: `chunk` vectors are added to each other before they join the total, so that the
    error grows with a chunk's length and the number of chunks, not with their product. A term of 0 adds nothing.
    """

    @inline
    def fold(x: Any, begin: int, end: int, chunk: int, numbers: Any) -> Vector:
        w, i, total = lanes(x), begin, full(x, 0.0)
        while i + w <= end:
            partial, chunk_end = full(x, 0.0), min(i + chunk * w, end)
            while i + w <= chunk_end:
                partial = term(partial, load(x, i), *numbers)
                i += w
            total = total + partial
        if i < end:
            total = term(total, load_masked(x, i, first(x, end - i), 0.0), *numbers)
        return total

    return fold


sum_range = folded(plus)
