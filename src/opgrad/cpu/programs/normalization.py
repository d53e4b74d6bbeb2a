"""The programs of layer and batch normalization: which kernels a shape asks for, and their working memory."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from opgrad.contract import DTYPES
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import normalization as kernels
from opgrad.cpu.kernels.loops.fold import BLOCK, CHUNK
from opgrad.cpu.programs.building import ProgramSteps, row_sizes
from opgrad.cpu.runtime.plan import Program, ceil_div, round_up

LONGEST_ROW = 1 << 15  # elements: three arrays' rows of float32 still fit the second-level cache
FEW_ROWS = 16
# Batches are normalized channel by channel if there are at least FEW_CHANNELS, which threads share, and if the arrays
# of a channel, which are read twice, have at most CHANNEL_BYTES, so that they stay in the second-level cache.
CHANNEL_BYTES, FEW_CHANNELS = 1 << 19, 8


# --- layer normalization -------------------------------------------------------------------------------------------


def _statistics(problem: Problem) -> dict[str, Any]:
    """The mean of each row, if there is one, and 1 / standard deviation."""
    return {"means": problem.operands.get("mean"), "inv_stds": problem["inv_std"]}


def _forward(problem: Problem, kernel: Kernel) -> Program:
    steps, (rows, n) = ProgramSteps(problem), row_sizes(problem, "x")
    bias = problem.operands.get("bias") or problem["scale"]  # without one any array of that length
    steps.add(kernel, rows, n=n, bias=bias, **_statistics(problem))
    return steps


def _backward(problem: Problem, layer: kernels.GradientKernels) -> Program:
    steps, (rows, n) = ProgramSteps(problem), row_sizes(problem, "x")
    if not n:
        return steps
    per_block = CHUNK if rows >= FEW_ROWS * CHUNK else FEW_ROWS
    blocks, step = ceil_div(rows, per_block), round_up(n, steps.lanes)
    arguments = {"rows": rows, "n": n, "per_block": per_block, "blocks": blocks, "coefficients": None}
    sums: Any = Rows(steps.workspace.shared(blocks * 2 * step), step)
    arguments |= {"sums": sums, **_statistics(problem)}
    if n > LONGEST_ROW or (rows < FEW_ROWS and n > 2 * kernels.ROW_STRIP):
        per_row = ceil_div(n, BLOCK)  # threads share a row
        partial_sums, coefficients = steps.workspace.shared(2 * rows * per_row), steps.workspace.shared(2 * rows)
        arguments |= {"per_row": per_row, "partial": partial_sums, "coefficients": coefficients}
        steps.add_parts(layer.row_sums, rows * per_row, **arguments)
        steps.add_parts(kernels.row_coefficients, **arguments)
        steps.add(layer.strips, blocks * ceil_div(n, kernels.ROW_STRIP), **arguments)
    else:
        steps.add(layer.rows, blocks, **arguments)
    dscale, dbias = problem["dscale"], problem.operands.get("dbias")
    results = {"first": dscale, "second": dbias, "has_second": dbias is not None}
    steps.add_parts(kernels.join_sums, n, kernels.ROW_STRIP, blocks=blocks, partial=sums, **results)
    return steps


def layer_normalization(problem: Problem) -> Program:
    return _forward(problem, kernels.LAYER if problem["bias"] is not None else kernels.LAYER_NO_BIAS)


simplified_layer_normalization = partial(_forward, kernel=kernels.SIMPLIFIED)
layer_normalization_grad = partial(_backward, layer=kernels.LAYER_GRADIENT)
simplified_layer_normalization_grad = partial(_backward, layer=kernels.SIMPLIFIED_GRADIENT)


# --- batch normalization -------------------------------------------------------------------------------------------


def batch_norm_internal(problem: Problem) -> Program:
    trains = problem.attributes["training_mode"]
    steps = _BatchSteps(problem, ("x", "y"), kernels.Normalized, kernels.BY_PLANES, kernels.BY_COLUMNS)
    if trains and steps.elements:
        steps.by_channels()
    else:
        steps.add_parts(kernels.take_statistics, **steps.arguments, empty=trains)
        steps.written()
    return steps


def batch_normalization_grad(problem: Problem) -> Program:
    steps = _BatchSteps(
        problem, ("dy", "x", "dx"), kernels.Differentiated, kernels.BY_PLANES_BACKWARD, kernels.BY_COLUMNS_BACKWARD
    )
    if not steps.elements:
        steps.clear("dscale")
        steps.clear("dbias")
        return steps
    if steps.is_short and steps.planes.channels:  # by columns, the mean is read once for every column
        steps.widen(Rows(problem["mean"], 0), 1)
    steps.by_channels()
    return steps


class _BatchSteps(ProgramSteps):
    """The steps for N x C x size elements: by planes, or by columns where planes are shorter than a vector.

    names: the arrays that are read, and the one that is written. given: the bundle of what has a number for a channel.
    """

    def __init__(
        self, problem: Problem, names: Sequence[str], given: type[Any], by_planes: kernels.PlaneKernels,
        by_columns: kernels.ColumnKernels,
    ):  # fmt: skip
        super().__init__(problem)
        samples, channels, *plane = problem.specs["x"].shape
        size, self.by_planes, self.by_columns = math.prod(plane), by_planes, by_columns
        self.is_short = size < self.lanes
        self.planes = kernels.Planes(
            samples, channels, size, ceil_div(size, kernels.TILE), max(1, kernels.TILE // max(size, 1))
        )
        self.elements = samples * size
        *self.read, written = (problem[name] for name in names)
        self.table = self._rows(by_planes.numbers, channels)
        values = {**problem.operands, **problem.attributes, "inverse": 1 / max(self.elements, 1)}
        self.arguments = {"arrays": tuple(self.read), "out": written, "planes": self.planes, "table": self.table}
        self.arguments |= {"samples": samples, "channels": channels, "size": size}
        self.arguments["given"] = given(**{name: values.get(name) for name in given._fields})
        if self.is_short:
            self.columns = columns = channels * size
            blocks, strips = ceil_div(samples, kernels.SAMPLES), ceil_div(columns, kernels.STRIP)
            self.units, self.joined = blocks * strips, self._rows(2, columns)
            first: Any = self.joined.data
            wide: Any = self._rows(by_planes.numbers, columns)
            numbers = [Rows(wide.data.moved(row * wide.step), 0) for row in range(by_planes.numbers)]
            operands = (*(Rows(each, columns) for each in self.read), *numbers)
            self.arguments |= {"operands": operands, "wide": wide, "first": first}
            self.arguments |= {"second": first.moved(self.joined.step), "has_second": True}
            self.arguments |= {"shape": kernels.ColumnStrips(samples, columns, strips), "blocks": blocks}
            self.arguments["partial"] = self._rows(2 * blocks, columns)

    def _rows(self, count: int, n: int) -> Rows:
        """Working memory of so many rows of whole vectors."""
        step = round_up(n, self.lanes)
        return Rows(self.workspace.shared(count * step), step)

    def widen(self, table: Rows, rows: int) -> None:
        """Add the step that repeats the first rows of a table for every column of their channels."""
        self.add_parts(kernels.widen, **{**self.arguments, "table": table, "rows": rows})

    def by_channels(self) -> None:
        """Add the steps for sums over each channel, for what follows from them, and for the elements.

        By planes channel by channel if the arrays of one that are read stay in the cache, otherwise step by step. By
        columns the sums of a channel are those of its columns, which are joined as if they were one block.
        """
        planes, size = self.planes, self.planes.size
        if not planes.channels:
            return
        if self.is_short:
            sums = kernels.BlockSums(self.joined.data, 1, 0, size, size, self.joined.step)
            block = planes._replace(size=1, tiles=1, per_block=planes.samples)
            self.add(self.by_columns.sum_blocks, self.units, **self.arguments)
            self.add_parts(self.by_columns.join_blocks, self.columns, kernels.STRIP, **self.arguments)
            self.add_parts(self.by_planes.join_blocks, **{**self.arguments, "planes": block, "sums": sums})
        else:
            blocks = ceil_div(planes.samples * planes.tiles, planes.per_block)
            sums = kernels.BlockSums(self.workspace.shared(2 * planes.channels * blocks), blocks, 2, 2 * blocks, 1, 1)
            read_bytes = len(self.read) * self.elements * DTYPES[self.problem["x"].dtype].itemsize
            if planes.channels >= FEW_CHANNELS and read_bytes <= CHANNEL_BYTES:
                self.add(self.by_planes.whole_channels, planes.channels, **self.arguments, sums=sums)
                return
            self.add(self.by_planes.sum_blocks, planes.channels * blocks, **self.arguments, sums=sums)
            self.add_parts(self.by_planes.join_blocks, **self.arguments, sums=sums)
        self.written()

    def written(self) -> None:
        """Add the steps that write the elements with the numbers in the table, if there are elements."""
        planes = self.planes
        if self.elements * planes.channels and self.is_short:
            self.widen(self.table, self.by_planes.numbers)
            self.add(self.by_columns.write, self.units, **self.arguments)
        elif self.elements * planes.channels:
            self.add(self.by_planes.write, planes.samples * planes.channels * planes.tiles, **self.arguments)
