"""Normalization: which kernels a shape asks for, and their working memory."""

import math
from dataclasses import dataclass
from typing import Any

from opgrad.cpu.compiler.native import Kernel
from opgrad.cpu.normalization import batch as channel_program
from opgrad.cpu.normalization import layer as row_norm
from opgrad.cpu.normalization import layer_grad as row_grad
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, Step
from opgrad.cpu.runtime.pieces import Pieces, whole_vectors
from opgrad.problem import Problem

LONGEST_ROW = 1 << 15  # elements: three arrays' rows of float32 still fit the second-level cache
FEW_ROWS = 16


@dataclass(frozen=True)
class RowKernels:
    rows: Kernel
    row_sums: Kernel
    strips: Kernel
    blocks: Kernel


LAYER = RowKernels(row_grad.LAYER_ROWS, row_grad.LAYER_ROW_SUMS, row_grad.LAYER_STRIPS, row_grad.LAYER_BLOCKS)
SIMPLIFIED = RowKernels(
    row_grad.SIMPLIFIED_ROWS, row_grad.SIMPLIFIED_ROW_SUMS, row_grad.SIMPLIFIED_STRIPS, row_grad.SIMPLIFIED_BLOCKS
)


def layer_normalization(problem: Problem) -> Program:
    made = row_norm.LAYER if problem["bias"] is not None else row_norm.LAYER_NO_BIAS
    return _forward(problem, made)


def simplified_layer_normalization(problem: Problem) -> Program:
    return _forward(problem, row_norm.SIMPLIFIED)


def layer_normalization_grad(problem: Problem) -> Program:
    return _backward(problem, LAYER)


def simplified_layer_normalization_grad(problem: Problem) -> Program:
    return _backward(problem, SIMPLIFIED)


def _sizes(problem: Problem) -> tuple[int, int]:
    """The number of rows and their length."""
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def _given(problem: Problem, *names: str) -> dict[str, Any]:
    return {name: problem.operands.get(name) for name in names}


def _forward(problem: Problem, made: Kernel) -> Program:
    rows, n = _sizes(problem)
    if not rows:
        return Program(())
    per = partition.per_part(rows, problem.bytes / rows)
    arguments = {
        **_given(problem, "x", "scale", "bias", "y", "mean", "inv_std"),
        "per_part": per,
        "units": rows,
        "n": n,
        "inverse": 1 / max(n, 1),
        "epsilon": problem.attributes["epsilon"],
        "stream": partition.streams(problem.bytes),
    }
    return Program([Step(made, partition.count(rows, per), arguments)])


def _backward(problem: Problem, made: RowKernels) -> Program:
    rows, n = _sizes(problem)
    if not n:
        return Program(())
    space, stride = Pieces(problem), whole_vectors(n, problem)
    per_unit = row_grad.CHUNK if rows >= FEW_ROWS * row_grad.CHUNK else FEW_ROWS
    blocks = partition.count(rows, per_unit)
    given = {
        **_given(problem, "dy", "x", "scale", "mean", "inv_std", "dx", "dscale", "dbias"),
        "rows": rows,
        "per_unit": per_unit,
        "blocks": blocks,
        "n": n,
        "stride": stride,
        "inverse": 1 / n,
        "sums": space.take(blocks * 2 * stride),
        "stream": partition.streams(problem.bytes),
    }
    split = n > LONGEST_ROW or (rows < FEW_ROWS and n > 2 * row_grad.STRIP)
    steps = _split_rows(problem, made, space, given) if split else _whole_rows(problem, made, given)
    steps.append(Step(made.blocks, partition.count(n, row_grad.STRIP), given))
    return Program(steps, space.bytes)


def _whole_rows(problem: Problem, made: RowKernels, given: dict[str, Any]) -> list[Step]:
    units = given["blocks"]
    if not units:
        return []
    per = partition.per_part(units, problem.bytes / units)
    return [Step(made.rows, partition.count(units, per), given | {"per_part": per, "units": units})]


def _split_rows(problem: Problem, made: RowKernels, space: Pieces, given: dict[str, Any]) -> list[Step]:
    rows, n = given["rows"], given["n"]
    if not rows:
        return []
    blocks, strips = partition.count(n, row_grad.BLOCK), partition.count(n, row_grad.STRIP)
    given = given | {"partial": space.take(2 * rows * blocks), "coefficients": space.take(2 * rows)}
    units = given["blocks"] * strips
    summing = {"per_part": 1, "units": rows * blocks, "blocks": blocks}
    per = partition.per_part(units, problem.bytes / units)
    writing = {"per_part": per, "units": units, "strips": strips}
    return [
        Step(made.row_sums, rows * blocks, given | summing),
        Step(row_grad.row_coefficients, 1, given | summing),
        Step(made.strips, partition.count(units, per), given | writing),
    ]


def batch_norm_internal(problem: Problem) -> Program:
    return channel_program.forward(problem)


def batch_normalization_grad(problem: Problem) -> Program:
    return channel_program.backward(problem)
