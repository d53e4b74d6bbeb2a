"""Tasks of kernels, called as plans call them."""

import ctypes

import numpy as np

TASK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def run_task(task, words, part=0):
    """Call the task at an address with its arguments as words."""
    arguments = np.array(words, np.int64)
    TASK(task)(arguments.ctypes.data, part)
