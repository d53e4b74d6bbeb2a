"""The product of matrices: every order of operands, sizes around tiles and chunks, and nothing outside of them."""

import ctypes
import mmap
import sys
from typing import NamedTuple

import numpy as np
import pytest
from tasks import run_task

from opgrad.cli.examples.arguments import error_in_ulp, tolerance
from opgrad.contract import DTYPES, FLOATS
from opgrad.cpu.compiler.decorators import kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Private, Rows, Units
from opgrad.cpu.kernels import gemm
from opgrad.cpu.kernels.gemm import Matrix, ProductSizes, product

ORDERS = ["NN", "NT", "TN", "TT"]
WIDTH = gemm.VECTORS * vector_lanes("float32")
SIZES = [
    (1, 1, 1),
    (1, WIDTH + 1, 3),
    (5, 3, gemm.CHUNK),
    (6, WIDTH, gemm.CHUNK + 1),
    (7, WIDTH - 1, 2 * gemm.CHUNK - 1),
    (8, 2 * WIDTH, 17),
    (11, WIDTH // 2 + 1, 40),
    (gemm.BLOCK_ROWS + 2, 5, 9),
    (13, gemm.BLOCK_PANELS * WIDTH + 3, gemm.CHUNK + 7),
    (4, 9, 0),
]
PAGE = mmap.PAGESIZE


class ProductBlocks(NamedTuple):
    """A product cut into blocks: how many of them are side by side, and the rows and columns of each."""

    across: int
    rows: int
    columns: int


@kernel
def products(
    units: Units, sizes: ProductSizes, blocks: ProductBlocks, a: Matrix, b: Matrix, c: Rows, add, left: Private,
    right: Private,
):  # fmt: skip
    """c (+)= a @ b; a unit is a block of c."""
    for unit in units:
        i, j = unit // blocks.across * blocks.rows, unit % blocks.across * blocks.columns
        own = ProductSizes(min(blocks.rows, sizes.rows - i), min(blocks.columns, sizes.columns - j), sizes.depth)
        own_a = Matrix(a.data + i * a.row, a.row, a.column)
        own_b = Matrix(b.data + j * b.column, b.row, b.column)
        product(c.data + (i * c.step + j), c.step, own_a, own_b, own, add, left, right)


@pytest.fixture
def before_a_wall():
    """What places an array so that a page that cannot be read begins behind its last element."""
    kept = []

    def place(array):
        size = -(-max(array.nbytes, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, size + PAGE)
        kept.append(memory)
        space = np.frombuffer(memory, np.uint8)
        placed = space[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
        placed[...] = array
        if sys.platform != "win32":
            wall = ctypes.c_void_p(space.ctypes.data + size)
            assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(PAGE), 0) == 0
        return placed

    return place


def stored(rng, rows, columns, dtype, transposed, more):
    """A matrix whose lines have `more` elements between them, NaN, and its distances from row to row and column."""
    shape = (columns, rows) if transposed else (rows, columns)
    whole = np.full((shape[0], shape[1] + more), np.nan, np.float32).astype(DTYPES[dtype])
    whole[:, : shape[1]] = rng.normal(size=shape).astype(DTYPES[dtype])
    flat = whole.reshape(-1)[: max(shape[0] - 1, 0) * whole.shape[1] + shape[1]]
    return flat, (shape[1] + more, 1)[:: -1 if transposed else 1]


def matrix(flat, rows, columns, strides):
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), [each * item for each in strides])


def run(sizes, blocks, a, b, c, c_row, add):
    """c (+)= a @ b for operands as `stored`, by the kernel, one block after another in any order."""
    (rows, columns, _), (block_rows, block_columns) = sizes, blocks
    across, down = -(-columns // block_columns), -(-rows // block_rows)
    left, right = gemm.space(vector_lanes(c.dtype.name))
    memory, in_use = np.full(left + right + 64, np.nan, c.dtype), np.zeros(1, np.int64)
    words = [1, across * down, memory.ctypes.data, 0, in_use.ctypes.data, 1, *sizes, across, *blocks]
    words += [a[0].ctypes.data, *a[1], b[0].ctypes.data, *b[1], c.ctypes.data, c_row, add, 0, left * c.itemsize]
    work = c.dtype.name
    task = products.task([a[0].dtype.name, b[0].dtype.name, work, work, work])
    for part in reversed(range(across * down)):
        run_task(task, words, part)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_products(order, dtype, rng, before_a_wall):
    for rows, columns, depth in SIZES:
        for add in (0, 1):
            work = "float64" if dtype == "float64" else "float32"
            a, a_steps = stored(rng, rows, depth, dtype, order[0] == "T", 3 * add)
            b, b_steps = stored(rng, depth, columns, dtype, order[1] == "T", 5 * add)
            a, b = before_a_wall(a), before_a_wall(b)
            whole = before_a_wall(np.full(max(rows - 1, 0) * (columns + 2) + columns, 7, work))
            c = matrix(whole, rows, columns, (columns + 2, 1))
            exact = [
                matrix(*each).astype(np.float64) for each in ((a, rows, depth, a_steps), (b, depth, columns, b_steps))
            ]
            expected = exact[0] @ exact[1] + 7 * add
            blocks = (31, WIDTH + 3) if add else (rows, columns)
            run((rows, columns, depth), blocks, (a, a_steps), (b, b_steps), whole, columns + 2, add)
            assert error_in_ulp(c, expected) <= tolerance(work, depth + 1), (rows, columns, depth, add)
            between = np.delete(whole, (np.arange(rows)[:, None] * (columns + 2) + np.arange(columns)).ravel())
            assert (between == 7).all()
