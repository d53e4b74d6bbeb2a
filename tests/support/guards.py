"""Memory around an array whose every byte must stay as it was, and the ways in which the array lies in it."""

import numpy as np

from opgrad.contract import DTYPES

EDGE = 192  # bytes on either side: more than the widest vector
SENTINEL = 0xA5


def _dense(shape, item, order):
    strides = [0] * len(shape)
    for axis in order:
        strides[axis] = item
        item *= max(shape[axis], 1)
    return strides


def c_order(shape, item):
    return _dense(shape, item, range(len(shape))[::-1])


def fortran(shape, item):
    return _dense(shape, item, range(len(shape)))


def permuted(shape, item):
    """The middle axis last in memory."""
    axes = list(range(len(shape)))[::-1]
    return _dense(shape, item, axes[len(axes) // 2 :] + axes[: len(axes) // 2])


def gapped(shape, item):
    return c_order([size + 3 for size in shape], item)


def every_second(shape, item):
    return c_order(shape, 2 * item)


def backwards(shape, item):
    return [-stride for stride in c_order(shape, item)]


def some_backwards(shape, item):
    return [-stride if axis % 2 else stride for axis, stride in enumerate(fortran(shape, item))]


def in_records(shape, item):
    """A field of a packed record: strides are no multiple of the item's size."""
    return c_order(shape, 2 * item + 1)


LAYOUTS = (c_order, fortran, permuted, gapped, every_second, backwards, some_backwards, in_records)


class Placed:
    """An uninitialised array with these strides, in the middle of sentinel bytes; `offset` shifts it."""

    def __init__(self, shape, dtype, layout=c_order, offset=0):
        dtype = DTYPES[str(dtype)]
        strides = layout(shape, dtype.itemsize)
        steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size]
        before, behind = -sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + dtype.itemsize
        memory = np.full(before + behind + 2 * EDGE + 64 + offset, SENTINEL, np.uint8)
        start = EDGE + offset + -(memory.ctypes.data + EDGE) % 64 + before
        self.memory, self.array = memory, np.ndarray(shape, dtype, memory, start, strides)

    def untouched(self):
        """Whether nothing but the array's elements was written."""
        kept = self.array.copy()
        bytes_in_place = np.ndarray(
            (*self.array.shape, self.array.itemsize),
            np.uint8,
            self.memory,
            self.array.ctypes.data - self.memory.ctypes.data if self.array.size else 0,
            (*self.array.strides, 1),
        )
        bytes_in_place[...] = SENTINEL
        around = bool((self.memory == SENTINEL).all())
        self.array[...] = kept
        return around

    def unwritten(self):
        """Whether nothing was written at all."""
        return bool((self.memory == SENTINEL).all())


def laid_out(array, layout=c_order, offset=0):
    """The same numbers in other memory."""
    placed = Placed(array.shape, array.dtype, layout, offset)
    placed.array[...] = array
    return placed.array
