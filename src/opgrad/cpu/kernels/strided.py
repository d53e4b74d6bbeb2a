"""Tables of axes, by which kernels find where an element of arrays with any strides lies."""

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import load_word


@inline
def both_offsets(table: int, axes: int, number: int) -> tuple[int, int]:
    """Where element `number`, in C order, lies in two arrays that are walked through together.

    For each axis, the innermost first, the table has its size and its stride in each of the arrays.
    """
    a, b, rest = 0, 0, number
    for each in range(axes):
        axis = table + 24 * each
        above = rest // load_word(axis, 0)
        index = rest - above * load_word(axis, 0)
        a += index * load_word(axis, 1)
        b += index * load_word(axis, 2)
        rest = above
    return a, b
