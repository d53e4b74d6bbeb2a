"""Writing a row of a result that is computed from any number of arrays."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector, first, full, lanes, store, store_masked, store_streaming, to_line


def row_writer(value: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = value(arrays, i, whole, mask, numbers) for i in [begin, end); past the cache if `stream`.

    `value` reads its arrays with `opgrad.cpu.loops.columns.get`: a whole vector, or the lanes of the mask.
    """

    @inline
    def write(out: Any, begin: int, end: int, stream: int, arrays: Any, numbers: Any) -> None:
        w, i = lanes(out), begin
        every = full(out, 0.0) == full(out, 0.0)
        if stream:
            head = min(to_line(out, i), end - i)
            if head >= 0:
                body = i + head
                while i < body:  # twice where a line holds more elements than a vector
                    mask = first(out, body - i)
                    store_masked(out, i, value(arrays, i, False, mask, numbers), mask)
                    i = min(i + w, body)
                while i + w <= end:
                    store_streaming(out, i, value(arrays, i, True, every, numbers))
                    i += w
        while i + w <= end:
            store(out, i, value(arrays, i, True, every, numbers))
            i += w
        if i < end:
            mask = first(out, end - i)
            store_masked(out, i, value(arrays, i, False, mask, numbers), mask)

    return write
