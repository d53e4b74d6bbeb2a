"""The tables of the kernels whose rows are weighted sums of other rows."""

from opgrad.contract import Array
from opgrad.cpu.kernels.loops.weighted import Along
from opgrad.cpu.programs.program import Tables


def along(size: int, count: int, pairs: tuple[Array, Array, Array], tables: Tables) -> Along:
    """The kernels' description of an axis, whose tables are added to `tables`.

    pairs: three arrays of the same length: an element of the result, one of its sources, and that source's weight.
    """
    elements, sources, weights = pairs
    order = elements.argsort(kind="stable")
    starts = elements[order].searchsorted(range(size + 1))
    addresses = tables.add(starts), tables.add(sources[order]), tables.add(weights[order], "float64")
    return Along(size, count, *addresses)
