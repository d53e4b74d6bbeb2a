"""The programs of products with quantized weights."""

import math
from typing import Any, Final

from opgrad.contract.quantized import BYTE, quantized
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import gemm
from opgrad.cpu.kernels import quantized as kernels
from opgrad.cpu.programs.building import ProductSteps
from opgrad.cpu.programs.indexing import check_indices
from opgrad.cpu.runtime.plan import Address, Program, round_up

MOST_ROWS: Final = 512  # of a block of sums, for each of which the weights are unpacked anew
BLOCK_COLUMNS: Final = 256  # so that a block of sums stays in the second-level cache


def quantized_matmul_grad(problem: Problem) -> Program:
    shapes = problem.shapes
    sizes = quantized(shapes, dict(problem.attributes))
    if problem["b"].dtype == "int8" and problem.attributes["bits"] < BYTE:
        wrong = f"b has dtype int8, expected uint8, as bits is {problem.attributes['bits']}"
        raise TypeError(f"{problem.operator.name}: {wrong}")
    steps = ProductSteps(problem)
    if problem["g_idx"]:
        check_indices(steps, sizes.blocks[1], "g_idx")
    depth, columns = (problem.attributes[name] for name in ("N", "K"))
    rows = math.prod(shapes["dy"][:-1])
    if rows * columns:
        dy, dx = gemm.Matrix(problem["dy"], depth, 1), Rows(problem["dx"], columns)
        weights = weights_of(steps)
        add_product(steps, kernel_of(problem), gemm.ProductSizes(rows, columns, depth), dy, weights, dx)
    return steps


def kernel_of(problem: Problem, transposed: bool = False) -> Kernel:
    """The kernel of products with the weights, or with their transpose, as they lie in b."""
    by_rows = bool(problem.attributes["transB"]) != transposed
    return kernels.multiply_rows if by_rows else kernels.multiply_columns


def add_product(
    steps: ProductSteps, kernel: Kernel, sizes: gemm.ProductSizes, a: gemm.Matrix, b: Any, c: Rows,
    first: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    """Add the step that multiplies; first: the rows of a and of c with which the product begins."""
    across, down, private = -(-sizes.columns // BLOCK_COLUMNS), -(-sizes.rows // MOST_ROWS), steps.workspace.private
    block_rows, block_columns = -(-sizes.rows // down), min(BLOCK_COLUMNS, sizes.columns)
    blocks = {"across": across, "block_rows": block_rows, "block_columns": block_columns}
    blocks |= {"first_a": first[0], "first_c": first[1], "pitch": round_up(block_columns, steps.width) + gemm.SPARE}
    left, right = (private(size) for size in gemm.space(steps.lanes))
    memory = {"left": left, "right_panels": right, "sums": private(block_rows * blocks["pitch"])}
    units = across * -(-sizes.rows // block_rows)
    steps.add_parts(kernel, units, sizes=sizes, a=a, b=b, c=c, **blocks, **memory)


def weights_of(steps: ProductSteps) -> kernels.Weights:
    """The quantized weights of a problem. Raises ValueError for zero points that do not fit."""
    problem, add_table, operator = steps.problem, steps.tables.add, steps.problem.operator.name
    sizes = quantized({"b": problem.specs["b"].shape}, dict(problem.attributes))
    bits, zeros, given = problem.attributes["bits"], problem["zero_points"], problem.operands.get("g_idx")
    signed = problem.attributes["signed"] and problem["b"].dtype != "int8"
    limit = 1 << (bits - 1 if signed else bits)
    scales = kernels.Scales(problem["scales"], sizes.blocks[1], sizes.row_block, sizes.column_block)
    kind, row = kernels.NO_ZEROS, 0
    if zeros:
        packed = zeros.dtype == "uint8" and bits < BYTE
        kind, row = (kernels.PACKED_ZEROS, sizes.zero_bytes) if packed else (kernels.WHOLE_ZEROS, sizes.blocks[1])
        found = math.prod(problem.specs["zero_points"].shape)
        count = math.prod(sizes.packed_zeros if packed else sizes.blocks)
        if found != count:
            what = "bytes of packed ones" if packed else "one for each block"
            raise ValueError(f"{operator}: zero_points has {found} elements of {zeros.dtype}, expected {count}, {what}")
        if packed and problem.attributes["column_block"] == 1:
            raise ValueError(f"{operator}: zero_points is packed, expected floats, as column_block is 1")
    nothing = Address(add_table([0.0], steps.workspace.precision), steps.workspace.precision)
    groups: Any = given or Address(add_table([0], "int32"), "int32")
    zero_points = kernels.Zeros(zeros or nothing, kind, row, bits, problem.attributes["zero_point"])
    lines: Any = steps.workspace.private(kernels.space(steps.lanes))
    packed_bytes = problem["b"], sizes.row_bytes, bits, limit
    return kernels.Weights(*packed_bytes, scales, zero_points, groups, int(given is not None), lines)  # type: ignore[arg-type]
