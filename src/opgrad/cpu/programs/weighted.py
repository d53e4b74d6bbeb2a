"""The tables of the kernels whose rows are weighted sums of other rows."""

from opgrad.contract import Array
from opgrad.cpu.kernels.loops.weighted import Along


def along(size: int, count: int, pairs: tuple[Array, Array, Array], tables: list[Array]) -> Along:
    """The kernels' description of an axis. Its tables are appended to `tables`, which keeps them alive.

    pairs: three arrays of the same length: an element of the result, one of its sources, and that source's weight.
    """
    elements, sources, weights = pairs
    order = elements.argsort(kind="stable")
    starts = elements[order].searchsorted(range(size + 1))
    found = [starts.astype("int64"), sources[order].astype("int64"), weights[order].astype("float64")]
    tables += found
    return Along(size, count, *(each.ctypes.data for each in found))
