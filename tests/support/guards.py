"""Memory around an array whose every byte must stay as it was."""

import numpy as np

from opgrad.contract import DTYPES

EDGE = 192  # bytes on either side: more than the widest vector
SENTINEL = 0xA5


class Guarded:
    """An uninitialised array in the middle of sentinel bytes; `offset` shifts it off its alignment."""

    def __init__(self, shape, dtype, offset=0):
        kind = DTYPES[str(dtype)]
        size = kind.itemsize * int(np.prod(shape))
        self.memory = np.full(size + 2 * EDGE + offset, SENTINEL, np.uint8)
        self.inside = slice(EDGE + offset, EDGE + offset + size)
        self.array = np.ndarray(shape, kind, self.memory, EDGE + offset)

    def untouched(self):
        """Whether nothing around the array was written."""
        around = np.delete(self.memory, self.inside)
        return bool((around == SENTINEL).all())

    def unwritten(self):
        """Whether nothing was written at all."""
        return bool((self.memory == SENTINEL).all())
