"""Broken Triton kernels, launched through Triton on the stand-in for the driver; a script that prints what is found."""

import json
import sys

from ptx import driver

DEVICE = driver.start(90)

import numpy as np  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from opgrad.cuda.execute import Address, device  # noqa: E402

SIZE, BLOCK, GRID = 1000, 256, (4, 1, 1)


@triton.jit
def double(y, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < n, 0), at < n)


@triton.jit
def double_without_mask(y, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at), at < n)


def aligned(size):
    memory = np.zeros(4 * size + 64, np.uint8)
    place = -memory.ctypes.data % 64
    return memory[place : place + 4 * size].view(np.float32)


def attempt(kernel, *numbers, others=None):
    """What the driver says of a launch; others: what it is launched with, after it was compiled for `numbers`."""
    x, y = aligned(SIZE), aligned(SIZE)
    x[:] = np.arange(SIZE)
    DEVICE.take_back()
    DEVICE.lend(x, "x")
    DEVICE.lend(y, "y", written=False)
    compiled = kernel.warmup(*map(address, (y, x)), *numbers, BLOCK, grid=GRID, enable_fp_fusion=False)
    given = others(y.ctypes.data, x.ctypes.data, *numbers) if others else (y.ctypes.data, x.ctypes.data, *numbers)
    try:
        compiled[GRID](*given, BLOCK, stream=7)
    except RuntimeError as error:
        return str(error)
    return "right" if np.array_equal(y, 2 * x) else f"wrong: {y[:4]}"


def address(array):
    return Address("float32", array.ctypes.data)


def main():
    return {
        "right": attempt(double, 1000),
        "without a mask": attempt(double_without_mask, 1000),
        "another alignment": attempt(double, 1000, others=lambda y, x, n: (y, x + 4, n)),
        "another number": attempt(double, 992, others=lambda y, x, n: (y, x, n + 8)),
        "a number for an address": attempt(double, 1000, others=lambda y, x, n: (y, 16 * n, n)),
        "streams": [each.stream for each in DEVICE.launches],
        "properties": vars(device()),
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
