"""Batch normalization: which kernels a shape asks for, and their working memory."""

import math
from dataclasses import dataclass
from typing import Any

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.normalization import batch_columns as column_norm
from opgrad.cpu.normalization import batch_planes as channel_norm
from opgrad.cpu.normalization import batch_planes_grad as channel_grad
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, Step
from opgrad.cpu.runtime.pieces import Pieces, whole_vectors
from opgrad.problem import Problem

# A channel's arrays that are read twice shall fit the second-level cache; fewer channels are split.
CHANNEL_BYTES, FEW_CHANNELS = 1 << 19, 8


@dataclass(frozen=True)
class Channels:
    """N x C x size elements; pieces of planes in blocks, or columns in blocks of samples where planes are short."""

    samples: int
    channels: int
    size: int
    lanes: int

    @property
    def count(self) -> int:
        return self.samples * self.size

    @property
    def is_short(self) -> bool:
        return self.size < self.lanes

    @property
    def cuts(self) -> int:
        return partition.count(self.size, channel_norm.CUT)

    @property
    def planes(self) -> int:
        """Pieces in a block."""
        return max(1, channel_norm.CUT // self.size)

    @property
    def blocks(self) -> int:
        """Blocks of a channel."""
        return partition.count(self.samples * self.cuts, self.planes)


def forward(problem: Problem) -> Program:
    shape, attributes = _channels(problem), problem.attributes
    given, space = _table(problem, shape, channel_norm.ROWS)
    given |= {"epsilon": attributes["epsilon"], "momentum": attributes["momentum"]}
    steps = [Step(channel_norm.prepare_forward, 1, given)]
    if not attributes["training_mode"]:
        steps.append(Step(channel_norm.take_running, 1, given))
        steps += _normalize(problem, shape, given, space)
    elif not shape.count:
        steps.append(Step(channel_norm.take_none, 1, given))
    elif shape.is_short:
        steps += _column_moments(problem, shape, given, space)
        steps += _normalize(problem, shape, given, space)
    else:
        steps += _plane_steps(problem, shape, given, space, 1, FORWARD)
    steps.append(Step(channel_norm.put_statistics_of_all, 1, given))
    return Program(steps, space.bytes)


def backward(problem: Problem) -> Program:
    shape = _channels(problem)
    given, space = _table(problem, shape, channel_grad.ROWS)
    steps = [Step(channel_grad.prepare_grad, 1, given)]
    if shape.count and shape.channels:
        if shape.is_short:
            steps += _column_grads(problem, shape, given, space)
        else:
            steps += _plane_steps(problem, shape, given, space, 2, BACKWARD)
    else:
        steps.append(Step(channel_grad.no_grads, 1, given))
    steps.append(Step(channel_grad.put_grads, 1, given))
    return Program(steps, space.bytes)


def _channels(problem: Problem) -> Channels:
    samples, channels, *plane = problem.specs["x"].shape
    return Channels(samples, channels, math.prod(plane), vector_lanes(precision(problem)))


@dataclass(frozen=True)
class PlaneKernels:
    """Sums of blocks, what follows from them for each channel, writing; and all three in turn."""

    blocks: Kernel
    join: Kernel
    write: Kernel
    fused: Kernel


FORWARD = PlaneKernels(
    channel_norm.moments_of_blocks,
    channel_norm.moments_of_channels,
    channel_norm.normalize_planes,
    channel_norm.normalize_channels,
)
BACKWARD = PlaneKernels(
    channel_grad.grad_blocks, channel_grad.grad_coefficients, channel_grad.grad_planes, channel_grad.grad_channels
)


def _table(problem: Problem, shape: Channels, rows: int) -> tuple[dict[str, Any], Pieces]:
    """All arguments but those of the layout, and the scratch memory so far."""
    space, stride = Pieces(problem), whole_vectors(shape.channels, problem)
    table = space.take(rows * stride)
    sizes = {"samples": shape.samples, "channels": shape.channels, "size": shape.size, "stride": stride}
    inverse = {"inverse": 1 / max(shape.count, 1), "inverse_samples": 1 / max(shape.samples, 1)}
    return {**problem.operands, **sizes, **inverse, "table": table, "stream": partition.streams(problem.bytes)}, space


def _units(problem: Problem, units: int) -> tuple[dict[str, Any], int]:
    """How units that touch all arrays once are cut into parts."""
    per = partition.per_part(units, problem.bytes / units)
    return {"per_part": per, "units": units}, partition.count(units, per)


def _plane_steps(
    problem: Problem, shape: Channels, given: dict[str, Any], space: Pieces, read: int, made: PlaneKernels
) -> list[Step]:
    """Channel by channel if `read` arrays of one stay in the cache, otherwise step by step."""
    channels, blocks = shape.channels, shape.blocks
    places = {"jump": 2, "pitch": 2 * blocks, "each": 1, "second": 1}
    sizes = {"cuts": shape.cuts, "planes": shape.planes, "blocks": blocks, "partial": space.take(2 * channels * blocks)}
    given = given | places | sizes
    if not channels:
        return []
    read_bytes = read * shape.count * DTYPES[problem["x"].dtype].itemsize
    if channels >= FEW_CHANNELS and read_bytes <= CHANNEL_BYTES:
        units, count = _units(problem, channels)
        return [Step(made.fused, count, given | units)]
    summing, sums = _units(problem, channels * blocks)
    return [
        Step(made.blocks, sums, given | summing),
        Step(made.join, 1, given),
        _write_planes(problem, shape, given, made.write),
    ]


def _write_planes(problem: Problem, shape: Channels, given: dict[str, Any], made: Kernel) -> Step:
    units, count = _units(problem, shape.samples * shape.channels * shape.cuts)
    return Step(made, count, given | units | {"cuts": shape.cuts})


def _columns(problem: Problem, shape: Channels, space: Pieces) -> tuple[dict[str, Any], int, int]:
    """The sizes and memory of the layout by columns, the number of parts, and that of strips."""
    columns = shape.channels * shape.size
    pitch = whole_vectors(columns, problem)
    blocks, strips = partition.count(shape.samples, column_norm.BLOCK), partition.count(columns, column_norm.STRIP)
    units, count = _units(problem, blocks * strips)
    sizes = {"columns": columns, "pitch": pitch, "blocks": blocks, "strips": strips}
    memory = {"partial": space.take(2 * blocks * pitch), "joined": space.take(2 * pitch)}
    return {**units, **sizes, **memory, "wide": space.take(channel_grad.ROWS * pitch)}, count, strips


def _spread(given: dict[str, Any], begin: int, end: int) -> Step:
    return Step(column_norm.spread, 1, given | {"begin": begin, "end": end})


def _joined(given: dict[str, Any], shape: Channels) -> dict[str, Any]:
    """Where the sums of a channel stand when its blocks are joined: one block with a sum for each column."""
    places = {"jump": 0, "pitch": shape.size, "each": shape.size, "second": given["pitch"], "partial": given["joined"]}
    return given | places | {"blocks": 1, "planes": shape.samples, "size": 1, "cuts": 1}


def _column_grads(problem: Problem, shape: Channels, given: dict[str, Any], space: Pieces) -> list[Step]:
    sizes, count, strips = _columns(problem, shape, space)
    given = given | sizes
    return [
        _spread(given, channel_grad.MEAN, channel_grad.MEAN + 1),
        Step(column_norm.grad_sums, count, given),
        Step(column_norm.join_sums, strips, given),
        Step(channel_grad.grad_coefficients, 1, _joined(given, shape)),
        _spread(given, channel_grad.FACTOR, channel_grad.FROM_BIAS + 1),
        Step(column_norm.grad_columns, count, given),
    ]


def _column_moments(problem: Problem, shape: Channels, given: dict[str, Any], space: Pieces) -> list[Step]:
    if not shape.channels:
        return []
    sizes, count, strips = _columns(problem, shape, space)
    given = given | sizes
    return [
        Step(column_norm.moments_of_columns, count, given),
        Step(column_norm.join_moments, strips, given),
        Step(channel_norm.moments_of_channels, 1, _joined(given, shape)),
    ]


def _normalize(problem: Problem, shape: Channels, given: dict[str, Any], space: Pieces) -> list[Step]:
    """Write y with the statistics in the table."""
    if not shape.count * shape.channels:
        return []
    if not shape.is_short:
        return [_write_planes(problem, shape, given, channel_norm.normalize_planes)]
    sizes, count, _ = _columns(problem, shape, space)
    given = given | sizes
    return [
        _spread(given, channel_norm.MEAN, channel_norm.BIAS + 1),
        Step(column_norm.normalize_columns, count, given),
    ]
