"""Normalization: which kernels a shape asks for, and their working memory."""

import math
from typing import Any

from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.loops.fold import BLOCK, CHUNK
from opgrad.cpu.kernels.normalization import layer, layer_grad
from opgrad.cpu.kernels.normalization.bundles import Affine, Statistics
from opgrad.cpu.kernels.normalization.layer_grad import GradientKernels, RowBlocks
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.normalization import batch
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Workspace, whole_vectors

LONGEST_ROW = 1 << 15  # elements: three arrays' rows of float32 still fit the second-level cache
FEW_ROWS = 16


def layer_normalization(problem: Problem) -> Program:
    return _forward(problem, layer.LAYER if problem["bias"] is not None else layer.LAYER_NO_BIAS)


def simplified_layer_normalization(problem: Problem) -> Program:
    return _forward(problem, layer.SIMPLIFIED)


def layer_normalization_grad(problem: Problem) -> Program:
    return _backward(problem, layer_grad.LAYER)


def simplified_layer_normalization_grad(problem: Problem) -> Program:
    return _backward(problem, layer_grad.SIMPLIFIED)


def _sizes(problem: Problem) -> tuple[int, int]:
    """The number of rows and their length."""
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def _arguments(problem: Problem, *names: str) -> dict[str, Any]:
    """What all kernels are given: operands, the statistics, whether to write past the cache."""
    operands = {name: problem.operands.get(name) for name in names}
    statistics = Statistics(problem.operands.get("mean"), problem["inv_std"])
    return {**operands, "statistics": statistics, "stream": partition.streams(problem.bytes)}


def _forward(problem: Problem, kernel: Kernel) -> Program:
    rows, n = _sizes(problem)
    if not rows:
        return Program(())
    arguments = _arguments(problem, "x", "y") | {"n": n, "epsilon": problem.attributes["epsilon"]}
    arguments["affine"] = Affine(problem["scale"], problem.operands.get("bias"))
    return Program([shared_out(kernel, rows, problem.bytes / rows, arguments)])


def _backward(problem: Problem, kernels: GradientKernels) -> Program:
    rows, n = _sizes(problem)
    if not n:
        return Program(())
    workspace = Workspace(precision(problem))
    per_block = CHUNK if rows >= FEW_ROWS * CHUNK else FEW_ROWS
    blocks, step = partition.count(rows, per_block), whole_vectors(n, workspace.precision)
    arguments = {**_arguments(problem, "dy", "x", "scale", "dx", "dscale", "dbias")}
    arguments |= {"shape": RowBlocks(rows, n, per_block), "n": n, "blocks": blocks}
    arguments |= {"sums": Rows(workspace.shared(blocks * 2 * step), step)}
    split = n > LONGEST_ROW or (rows < FEW_ROWS and n > 2 * layer_grad.STRIP)
    steps = []
    if split and rows:
        steps = _split_rows(problem, kernels, workspace, arguments)
    elif blocks:
        steps = [shared_out(kernels.rows, blocks, problem.bytes / blocks, arguments)]
    steps.append(Step(kernels.add_blocks, n, arguments, layer_grad.STRIP))
    return Program(steps, workspace)


def _split_rows(
    problem: Problem, kernels: GradientKernels, workspace: Workspace, arguments: dict[str, Any]
) -> list[Step]:
    rows, n, _ = arguments["shape"]
    per_row = partition.count(n, BLOCK)
    partial, coefficients = workspace.shared(2 * rows * per_row), workspace.shared(2 * rows)
    arguments = arguments | {"per_row": per_row, "partial": partial, "coefficients": coefficients}
    units = arguments["blocks"] * partition.count(n, layer_grad.STRIP)
    return [
        Step(kernels.row_sums, rows * per_row, arguments),
        Step(layer_grad.row_coefficients, 1, arguments),
        shared_out(kernels.strips, units, problem.bytes / units, arguments),
    ]


def batch_norm_internal(problem: Problem) -> Program:
    return batch.forward(problem)


def batch_normalization_grad(problem: Problem) -> Program:
    return batch.backward(problem)
