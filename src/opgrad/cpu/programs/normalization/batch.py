"""Batch normalization: which kernels a shape asks for, and their working memory."""

import math
from dataclasses import dataclass
from typing import Any

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.normalization import batch_columns as by_columns
from opgrad.cpu.kernels.normalization import batch_planes as by_planes
from opgrad.cpu.kernels.normalization import batch_planes_grad as by_planes_grad
from opgrad.cpu.kernels.normalization.batch_planes import TILE, BlockSums, Planes, Running
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Workspace, whole_vectors

# A channel's arrays that are read twice shall fit the second-level cache; fewer channels are split.
CHANNEL_BYTES, FEW_CHANNELS = 1 << 19, 8


@dataclass(frozen=True)
class PlaneKernels:
    """Sums of blocks, what follows from them for each channel, writing; and all three in one, channel by channel."""

    blocks: Kernel
    join: Kernel
    write: Kernel
    fused: Kernel


FORWARD = PlaneKernels(
    by_planes.moments_of_blocks, by_planes.moments_of_channels, by_planes.normalize_planes, by_planes.normalize_channels
)
BACKWARD = PlaneKernels(
    by_planes_grad.grad_blocks,
    by_planes_grad.grad_coefficients,
    by_planes_grad.grad_planes,
    by_planes_grad.grad_channels,
)


def forward(problem: Problem) -> Program:
    return _Forward(problem, by_planes.ROWS).program()


def backward(problem: Problem) -> Program:
    return _Backward(problem, by_planes_grad.ROWS).program()


class _Steps:
    """The steps for N x C x size elements and what they are given: tiles of planes, or columns where planes are short.

    `table_rows`: how many numbers the table has for a channel.
    """

    def __init__(self, problem: Problem, table_rows: int):
        samples, channels, *plane = problem.specs["x"].shape
        size = math.prod(plane)
        self.problem, self.workspace = problem, Workspace(precision(problem))
        self.is_short = size < vector_lanes(self.workspace.precision)
        self.planes = Planes(samples, channels, size, partition.count(size, TILE), max(1, TILE // max(size, 1)))
        self.elements = samples * size
        self.arguments = {**problem.operands, "samples": samples, "channels": channels, "size": size}
        self.arguments |= {"planes": self.planes, "inverse": 1 / max(self.elements, 1)}
        self.arguments |= {"table": self._rows(table_rows, channels), "stream": partition.streams(problem.bytes)}
        if self.is_short:
            self._take_columns(table_rows)

    def _rows(self, count: int, n: int) -> Rows:
        """Working memory of so many rows of whole vectors."""
        step = whole_vectors(n, self.workspace.precision)
        return Rows(self.workspace.shared(count * step), step)

    def _step(self, kernel: Kernel, **more: Any) -> Step:
        return Step(kernel, 1, {**self.arguments, **more})

    def _shared_out(self, kernel: Kernel, units: int, **more: Any) -> Step:
        """The step whose units touch all arrays once."""
        return shared_out(kernel, units, self.problem.bytes / units, {**self.arguments, **more})

    def _plane_steps(self, kernels: PlaneKernels, arrays: int) -> list[Step]:
        """Channel by channel if the arrays of one that are read stay in the cache, otherwise step by step."""
        channels, planes = self.planes.channels, self.planes
        blocks = partition.count(planes.samples * planes.tiles, planes.per_block)
        sums = BlockSums(self.workspace.shared(2 * channels * blocks), blocks, 2, 2 * blocks, 1, 1)
        if not channels:
            return []
        read_bytes = arrays * self.elements * DTYPES[self.problem["x"].dtype].itemsize
        if channels >= FEW_CHANNELS and read_bytes <= CHANNEL_BYTES:
            return [self._shared_out(kernels.fused, channels, sums=sums)]
        return [
            self._shared_out(kernels.blocks, channels * blocks, sums=sums),
            self._step(kernels.join, sums=sums),
            self._write_planes(kernels.write),
        ]

    def _write_planes(self, kernel: Kernel) -> Step:
        return self._shared_out(kernel, self.planes.samples * self.planes.channels * self.planes.tiles)

    def _take_columns(self, table_rows: int) -> None:
        """Add what kernels by columns are given: sizes and memory."""
        samples, channels, size, *_ = self.planes
        columns = channels * size
        blocks, strips = partition.count(samples, by_columns.SAMPLES), partition.count(columns, by_columns.STRIP)
        self.columns, self.units = columns, blocks * strips
        self.arguments |= {"shape": by_columns.ColumnStrips(samples, columns, strips), "blocks": blocks}
        self.arguments |= {"partial": self._rows(2 * blocks, columns), "joined": self._rows(2, columns)}
        self.arguments |= {"wide": self._rows(table_rows, columns)}

    def _join_columns(self, join: Kernel, coefficients: Kernel) -> list[Step]:
        """Join the sums of blocks of samples; what follows from them for each channel, a block with many sums."""
        data, step = self.arguments["joined"]
        samples, size = self.planes.samples, self.planes.size
        sums = BlockSums(data, 1, 0, size, size, step)
        planes = self.planes._replace(size=1, tiles=1, per_block=samples)
        joining = Step(join, self.columns, self.arguments, by_columns.STRIP)
        return [joining, self._step(coefficients, sums=sums, planes=planes)]

    def _widen(self, first: int, last: int) -> Step:
        return self._step(by_columns.widen, begin=first, end=last + 1)


class _Forward(_Steps):
    def program(self) -> Program:
        attributes = self.problem.attributes
        epsilon, momentum = attributes["epsilon"], attributes["momentum"]
        self.arguments["running"] = Running(self.arguments["inverse"], epsilon, momentum)
        steps = [self._step(by_planes.prepare_forward), *self._body(), self._step(by_planes.put_statistics_of_all)]
        return Program(steps, self.workspace)

    def _body(self) -> list[Step]:
        if not self.problem.attributes["training_mode"]:
            return [self._step(by_planes.take_running), *self._normalize()]
        if not self.elements:
            return [self._step(by_planes.take_none)]
        if not self.is_short:
            return self._plane_steps(FORWARD, 1)
        return self._moments_by_columns() + self._normalize()

    def _moments_by_columns(self) -> list[Step]:
        if not self.planes.channels:
            return []
        moments = self._shared_out(by_columns.moments_of_columns, self.units)
        return [moments, *self._join_columns(by_columns.join_moments, by_planes.moments_of_channels)]

    def _normalize(self) -> list[Step]:
        """Write y with the statistics in the table."""
        if not self.elements * self.planes.channels:
            return []
        if not self.is_short:
            return [self._write_planes(by_planes.normalize_planes)]
        widening = self._widen(by_planes.MEAN, by_planes.BIAS)
        return [widening, self._shared_out(by_columns.normalize_columns, self.units)]


class _Backward(_Steps):
    def program(self) -> Program:
        steps = [self._step(by_planes_grad.prepare_grad), *self._body(), self._step(by_planes_grad.put_grads)]
        return Program(steps, self.workspace)

    def _body(self) -> list[Step]:
        if not self.elements * self.planes.channels:
            return [self._step(by_planes_grad.no_grads)]
        return self._by_columns() if self.is_short else self._plane_steps(BACKWARD, 2)

    def _by_columns(self) -> list[Step]:
        return [
            self._widen(by_planes_grad.MEAN, by_planes_grad.MEAN),
            self._shared_out(by_columns.grad_sums, self.units),
            *self._join_columns(by_columns.join_sums, by_planes_grad.grad_coefficients),
            self._widen(by_planes_grad.FACTOR, by_planes_grad.FROM_BIAS),
            self._shared_out(by_columns.grad_columns, self.units),
        ]
