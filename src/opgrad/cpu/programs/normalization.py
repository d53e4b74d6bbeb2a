"""The programs of layer and batch normalization: which kernels a shape asks for, and their working memory."""

import math
from collections.abc import Sequence
from typing import Any

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.loops.fold import BLOCK, CHUNK
from opgrad.cpu.kernels.normalization import batch, batch_columns, layer, layer_grad
from opgrad.cpu.kernels.normalization.batch import TILE, BlockSums, Differentiated, Normalized, PlaneKernels, Planes
from opgrad.cpu.kernels.normalization.batch_columns import SAMPLES, STRIP, ColumnKernels, ColumnStrips
from opgrad.cpu.kernels.normalization.bundles import Affine, Statistics
from opgrad.cpu.kernels.normalization.layer_grad import GradientKernels, RowBlocks
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Workspace, whole_vectors

LONGEST_ROW = 1 << 15  # elements: three arrays' rows of float32 still fit the second-level cache
FEW_ROWS = 16
# A channel's arrays that are read twice shall fit the second-level cache; fewer channels are split.
CHANNEL_BYTES, FEW_CHANNELS = 1 << 19, 8


# --- layer normalization -------------------------------------------------------------------------------------------


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
    arguments |= {"shape": RowBlocks(rows, n, per_block), "n": n, "blocks": blocks, "coefficients": None}
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


# --- batch normalization -------------------------------------------------------------------------------------------


def batch_norm_internal(problem: Problem) -> Program:
    trains = problem.attributes["training_mode"]
    steps = _BatchSteps(problem, ("x", "y"), Normalized, batch.FORWARD, batch_columns.FORWARD)
    if trains and steps.elements:
        return steps.program(steps.by_channels())
    taking = steps.step(batch.take_statistics, empty=trains)
    return steps.program([taking, *steps.written()])


def batch_normalization_grad(problem: Problem) -> Program:
    steps = _BatchSteps(problem, ("dy", "x", "dx"), Differentiated, batch.BACKWARD, batch_columns.BACKWARD)
    channels = steps.planes.channels
    if channels and not steps.elements:
        sizes = {name: channels * problem.specs[name].dtype.itemsize for name in ("dscale", "dbias")}
        return steps.program([zero_step(problem[name], channels, size) for name, size in sizes.items()])
    # By columns, the mean is read once for every column.
    mean = [steps.widened(Rows(problem["mean"], 0), 1)] if steps.is_short and channels else []
    return steps.program([*mean, *steps.by_channels()])


class _BatchSteps:
    """The steps for N x C x size elements: by planes, or by columns where planes are shorter than a vector.

    names: the arrays that are read, and the one that is written. given: the bundle of what has a number for a channel.
    """

    def __init__(
        self,
        problem: Problem,
        names: Sequence[str],
        given: type[Any],
        by_planes: PlaneKernels,
        by_columns: ColumnKernels,
    ):
        samples, channels, *plane = problem.specs["x"].shape
        size, self.problem, self.workspace = math.prod(plane), problem, Workspace(precision(problem))
        self.by_planes, self.by_columns = by_planes, by_columns
        self.is_short = size < vector_lanes(self.workspace.precision)
        self.planes = Planes(samples, channels, size, partition.count(size, TILE), max(1, TILE // max(size, 1)))
        self.elements = samples * size
        *self.read, written = (problem[name] for name in names)
        self.table = self._rows(by_planes.numbers, channels)
        values = {**problem.operands, **problem.attributes, "inverse": 1 / max(self.elements, 1)}
        self.arguments = {"arrays": tuple(self.read), "out": written, "planes": self.planes, "table": self.table}
        self.arguments |= {"samples": samples, "channels": channels, "size": size}
        self.arguments["given"] = given(**{name: values.get(name) for name in given._fields})
        self.arguments["stream"] = partition.streams(problem.bytes)
        if self.is_short:
            self._take_columns(samples, channels * size)

    def _take_columns(self, samples: int, columns: int) -> None:
        """Add what kernels by columns are given: sizes and memory."""
        blocks, strips = partition.count(samples, SAMPLES), partition.count(columns, STRIP)
        self.columns, self.units, self.joined = columns, blocks * strips, self._rows(2, columns)
        wide: Any = self._rows(self.by_planes.numbers, columns)
        numbers = [Rows(wide.data.moved(row * wide.step), 0) for row in range(self.by_planes.numbers)]
        operands = (*(Rows(each, columns) for each in self.read), *numbers)
        self.arguments |= {"operands": operands, "wide": wide, "joined": self.joined}
        self.arguments |= {"shape": ColumnStrips(samples, columns, strips), "blocks": blocks}
        self.arguments["partial"] = self._rows(2 * blocks, columns)

    def _rows(self, count: int, n: int) -> Rows:
        """Working memory of so many rows of whole vectors."""
        step = whole_vectors(n, self.workspace.precision)
        return Rows(self.workspace.shared(count * step), step)

    def step(self, kernel: Kernel, **more: Any) -> Step:
        return Step(kernel, 1, {**self.arguments, **more})

    def _shared_out(self, kernel: Kernel, units: int, **more: Any) -> Step:
        """The step whose units touch all arrays once."""
        return shared_out(kernel, units, self.problem.bytes / units, {**self.arguments, **more})

    def program(self, steps: Sequence[Step]) -> Program:
        return Program(steps, self.workspace)

    def widened(self, table: Rows, rows: int) -> Step:
        return self.step(batch_columns.widen, table=table, rows=rows)

    def by_channels(self) -> list[Step]:
        """Sums over each channel, what follows from them, and the elements."""
        if not self.planes.channels:
            return []
        return self._sums_of_columns() if self.is_short else self._sums_of_planes()

    def _sums_of_planes(self) -> list[Step]:
        """Channel by channel if the arrays of one that are read stay in the cache, otherwise step by step."""
        kernels, planes = self.by_planes, self.planes
        blocks = partition.count(planes.samples * planes.tiles, planes.per_block)
        sums = BlockSums(self.workspace.shared(2 * planes.channels * blocks), blocks, 2, 2 * blocks, 1, 1)
        read_bytes = len(self.read) * self.elements * DTYPES[self.problem["x"].dtype].itemsize
        if planes.channels >= FEW_CHANNELS and read_bytes <= CHANNEL_BYTES:
            return [self._shared_out(kernels.whole_channels, planes.channels, sums=sums)]
        summing = self._shared_out(kernels.sum_blocks, planes.channels * blocks, sums=sums)
        return [summing, self.step(kernels.join_blocks, sums=sums), *self.written()]

    def _sums_of_columns(self) -> list[Step]:
        """The sums of a channel are those of its columns, which are joined as if they were one block."""
        kernels, size = self.by_columns, self.planes.size
        summing = self._shared_out(kernels.sum_blocks, self.units)
        joining = Step(kernels.join_blocks, self.columns, self.arguments, STRIP)
        sums = BlockSums(self.joined.data, 1, 0, size, size, self.joined.step)
        block = self.planes._replace(size=1, tiles=1, per_block=self.planes.samples)
        return [summing, joining, self.step(self.by_planes.join_blocks, sums=sums, planes=block), *self.written()]

    def written(self) -> list[Step]:
        """The steps that write the elements with the numbers in the table; none if there are no elements."""
        planes = self.planes
        if not self.elements * planes.channels:
            return []
        if self.is_short:
            return [
                self.widened(self.table, self.by_planes.numbers),
                self._shared_out(self.by_columns.write, self.units),
            ]
        return [self._shared_out(self.by_planes.write, planes.samples * planes.channels * planes.tiles)]
