"""Arrays laid out anew: the same values with other strides, orders of axes and alignments."""

import numpy as np


def strided(array):
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def reversed_axes(array):
    back = (slice(None, None, -1),) * array.ndim
    return array[back].copy()[back]


def reversed_rows(array):
    return array[::-1].copy()[::-1]


def spaced_rows(array):
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + 5), array.dtype)
    wide[..., 2:-3] = array
    return wide[..., 2:-3]


def spaced_planes(array):
    wide = np.zeros((array.shape[0] * 2, *array.shape[1:]), array.dtype)
    wide[::2] = array
    return wide[::2]


def unaligned(array):
    memory = bytearray(1 + array.nbytes)
    memory[1:] = array.tobytes()
    return np.frombuffer(memory, array.dtype, array.size, 1).reshape(array.shape)


def fortran(array):
    return np.asfortranarray(array)


def swapped(array):
    return np.ascontiguousarray(array.swapaxes(0, -1)).swapaxes(0, -1)


SAME_LOOPS = [strided, reversed_rows, spaced_rows, spaced_planes, unaligned]


OTHER_LOOPS = [fortran, swapped, reversed_axes]


def relaid(arguments, change, names):
    """The same values in other memory."""
    return arguments | {
        name: change(arguments[name])
        for name in names
        if isinstance(arguments.get(name), np.ndarray) and arguments[name].ndim
    }


def selections(arguments):
    """All arrays at once, and each alone."""
    arrays = [name for name, value in arguments.items() if isinstance(value, np.ndarray)]
    return [arrays, *([name] for name in arrays)] if len(arrays) > 1 else [arrays]
