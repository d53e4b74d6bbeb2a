"""Programs of stages: softmax and its gradients with any dtypes, strides and attributes.

Forward    read x, logit_scale, where | softmax | stats | saved, result_scale, dropout, post-ops, out_scale, write y
Gradient   the same way back from dy, with the post-ops' inputs computed again from y | softmax | logit_scale, write dx
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import Any, Final

from opgrad.contract import DTYPES, Spec, layout
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.kernels.fused import post_ops, stages
from opgrad.cpu.kernels.fused.post_ops import copy, drop, fill, mask_out, multiply
from opgrad.cpu.kernels.fused.stages import keep, read, write
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.transpose import group_tiles, tile_size
from opgrad.cpu.kernels.softmax.split import STATS
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.layout import Limits, few, in_place_limits
from opgrad.cpu.programs.program import Operands, Program, shared_out
from opgrad.cpu.programs.workspace import Scratch, Workspace
from opgrad.fused.primitive import STATE, gradient_name
from opgrad.random import keep_threshold, kept_scale

CHUNK: Final = 1 << 11  # elements, 8 KiB of float32; with as many of an operand they stay in the first-level cache
STRIP_BYTES: Final = 1 << 20  # of a strip of columns; 256 KiB took 1.5 times as long, as memory is read in shorter runs
STRIPS: Final = 16  # the least number of strips, so that threads can share them
NARROWEST: Final = 64  # columns of the narrowest strip, which fill a cache line even if each has one byte
LEAST: Final = 1e-37
MEMORY, BUFFERS = True, False


@dataclass(frozen=True)
class Buffer:
    """A buffer in a part's private memory, by its offset in bytes.

    moves: whether it holds a whole block, not a chunk.
    """

    offset: int
    moves: bool


@dataclass
class Blocks:
    """How a problem is cut into blocks, with the buffers and tables of the stages that are added."""

    problem: Problem
    first: str  # the operand whose memory order the loops follow
    precision: str
    columns: bool
    per_block: int
    chunk_size: int
    buffers: dict[str, Buffer] = field(default_factory=dict)
    tables: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workspace = Workspace(self.precision)

    @property
    def limits(self) -> Limits:
        return in_place_limits(vector_lanes(self.precision))

    @property
    def item(self) -> int:
        return 8 if self.precision == "float64" else 4

    @property
    def block_elements(self) -> int:
        return self.per_block * self.problem.n

    @property
    def chunk_elements(self) -> int:
        return self.chunk_size * self.per_block if self.columns else min(self.chunk_size, self.block_elements)

    def reserve(self, elements: int) -> int:
        """Reserve private memory for so many numbers; return its offset in bytes."""
        return self.workspace.private(elements).offset

    def block(self, name: str) -> Buffer:
        """The buffer of this name, for a whole block."""
        return self.buffers.get(name) or self.buffers.setdefault(name, Buffer(self.reserve(self.block_elements), True))

    def chunk(self, name: str) -> Buffer:
        """The buffer of this name, for a chunk."""
        return self.buffers.get(name) or self.buffers.setdefault(name, Buffer(self.reserve(self.chunk_elements), False))

    # --- stages, as lists of words ----------------------------------------------------------------------------------

    def read(self, name: str, to: Buffer, scale: float = 1.0) -> list[int]:
        return self._memory(read, name, to, scale, own=0)

    def write(self, name: str, source: Buffer, scale: float = 1.0) -> list[int]:
        return self._memory(write, name, source, scale, own=partition.streams(self.problem.bytes))

    def _memory(self, kernel: Kernel, name: str, values: Buffer, scale: float, own: int) -> list[int]:
        spec = self.problem.specs[name]
        table = self._table(spec.shape, spec.strides, own)
        number = self.problem[name].number
        return self._stage_in_memory(kernel, values, storage(spec), number, table, scale)

    def _stage_in_memory(
        self, kernel: Kernel, values: Buffer, dtype: str, source: int, table: int, alpha: float = 0.0
    ) -> list[int]:
        task, unused = kernel.task((self.precision, dtype), "stage"), [values.offset, values.moves] * 2
        return _stage(task, MEMORY, values, source, unused, alpha, table=table)

    def keep(self, to: Buffer) -> list[int]:
        """Dropout's decisions."""
        shape = self.problem.specs[self.first].shape
        strides = layout.contiguous(shape, tuple(range(len(shape))), 1)
        table = self._table(shape, strides, keep_threshold(self.problem.attributes["dropout"]))
        return self._stage_in_memory(keep, to, "int64", self.problem[STATE].number, table)

    def of_buffers(self, kernel: Kernel, values: Buffer, *operands: Buffer | None, **numbers: float) -> list[int]:
        """The stage of a kernel of `post_ops`; numbers: alpha and beta."""
        operand, third = (*(each or values for each in operands), values, values)[:2]
        buffers = [operand.offset, operand.moves, third.offset, third.moves]
        task = kernel.task((self.precision,) * 3, "stage")
        return _stage(task, BUFFERS, values, stages.BUFFER, buffers, **numbers)

    def _table(self, shape: Sequence[int], strides: Sequence[int], own: int) -> int:
        loops = layout.steps(shape, strides, self.problem.orders[self.first])[::-1]
        words = [own, len(loops), *(word for loop in loops for word in loop)]
        self.tables.append((ctypes.c_int64 * len(words))(*words))
        return ctypes.addressof(self.tables[-1])

    # --- the program ------------------------------------------------------------------------------------------------

    def program(
        self,
        kernels: Mapping[str, Kernel],
        before: Sequence[list[int]],
        of_rows: Sequence[list[int]],
        after: Sequence[list[int]],
        other: Buffer | None = None,
        inf_as_zero: bool = False,
    ) -> Program:
        """The program's only step: it takes each block through these stages, and between them a softmax kernel."""
        problem, layout = self.problem, self._layout(kernels)
        strips = partition.count(problem.inner, self.per_block)
        width = vector_lanes(self.precision)
        tiles = max(2 * tile_size(min(problem.n, self.limits.transposed), width), group_tiles(width))
        if layout == "split":
            tiles = 2 * STATS * partition.count(problem.n, BLOCK)
        plan = [
            self.columns,
            self.per_block,
            problem.outer,
            problem.n,
            problem.inner,
            strips,
            self.chunk_size,
            self.item,
        ]
        plan += [kernels[layout].task((self.precision,) * 4, "stage"), other.offset if other else 0]
        plan += [self.block_stats.offset, self.reserve(tiles), inf_as_zero]
        plan += [len(before), len(of_rows), len(after)]
        for stage in (*before, *of_rows, *after):
            plan += stage
        self.tables.append((ctypes.c_int64 * len(plan))(*plan))
        units = problem.outer * strips if self.columns else partition.count(problem.outer, self.per_block)
        arguments = {"operands": Operands(), "space": Scratch(0, "uint8", private=True)}
        arguments["plan"] = ctypes.addressof(self.tables[-1])
        step = shared_out(stages.blocks, units, problem.bytes / units, arguments)
        return Program((step,), self.workspace, name=f"stages, {layout}, {self.precision}", tables=self.tables)

    def _layout(self, kernels: Mapping[str, Kernel]) -> str:
        if self.columns:
            return "columns"
        if self.problem.n <= self.limits.transposed:
            return "transposed"
        if "split" in kernels and few(self.problem.outer, self.problem.n):
            return "split"
        return "groups" if "groups" in kernels and self.problem.n <= self.limits.grouped else "rows"

    @property
    def block_stats(self) -> Buffer:
        """One number for each row of a block."""
        return self.buffers.get("stats") or self.buffers.setdefault("stats", Buffer(self.reserve(self.per_block), True))


def storage(spec: Spec) -> str:
    """The name under which a stage gets an operand's dtype.

    As int32, its elements would be integers, used as indices.
    """
    return "int32_number" if spec.dtype.name == "int32" else spec.dtype.name


def _stage(
    task: int, memory: bool, values: Buffer, source: int, buffers: list[int],
    alpha: float = 0.0, beta: float = 0.0, table: int = 0,
) -> list[int]:  # fmt: skip
    """The words of a stage, as opgrad.cpu.kernels.fused.stages has them."""
    return [task, memory, values.offset, values.moves, source, *buffers, _bits(alpha), _bits(beta), table]


def _bits(value: float) -> int:
    return int(unpack("q", pack("d", value))[0])


def precision_of(problem: Problem, first: str, results: Sequence[str]) -> str:
    """The dtype of the computation."""
    double = any(problem.specs[name].dtype == DTYPES["float64"] for name in (first, *results))
    return "float64" if double else "float32"


def is_exact(problem: Problem) -> bool:
    """Whether sums keep what is rounded off their terms: for 2 ulp in place of 4, and for a sum that is a result."""
    return problem.attributes["accumulation"] == "strict" or "stats" in problem.specs


def cut(problem: Problem, first: str, results: Sequence[str]) -> Blocks:
    """Cut the problem into blocks: some rows, or a strip of columns."""
    precision = precision_of(problem, first, results)
    lanes, n = vector_lanes(precision), max(problem.n, 1)
    if problem.inner > 1:
        item = DTYPES[precision].itemsize
        widest = max(min(STRIP_BYTES // (n * item), problem.outer * problem.inner // STRIPS), NARROWEST)
        per_block = min(widest, problem.inner, CHUNK) // lanes * lanes or lanes
        return Blocks(problem, first, precision, True, per_block, max(1, CHUNK // per_block))
    per_block = max(1, CHUNK // n)
    if n <= in_place_limits(lanes).grouped:
        per_block = -(-per_block // lanes) * lanes
    return Blocks(problem, first, precision, False, per_block, CHUNK)


# --- forward -------------------------------------------------------------------------------------------------------


def forward(problem: Problem, kernels: Mapping[str, Kernel]) -> Program:
    """softmax or log_softmax, by its kernels in place."""
    # A row without elements still has a log-sum-exp, which is -inf.
    if not problem.outer * problem.inner or not (problem.n or "stats" in problem.specs):
        return Program((), name="nothing to do")
    blocks, attributes = cut(problem, "x", ("y",)), problem.attributes
    values, applied = blocks.block("values"), attributes["post_ops"]
    before = _read_scaled(blocks, "x", values, factors(attributes["logit_scale"]))
    before += _masked(blocks, values, float("-inf"))
    of_rows = [blocks.write("stats", blocks.block_stats)] if "stats" in problem.specs else []
    after = [blocks.write("saved", values)] if "saved" in problem.specs else []
    # Scales go into the last writing; result_scale only where nothing stands between.
    after += _scaled(blocks, values, attributes["result_scale"]) if applied else []
    last = quotient(1.0 if applied else attributes["result_scale"], attributes["out_scale"])
    after += _dropped(blocks, values)
    if "mask" in problem.specs:
        after.append(blocks.write("mask", blocks.chunk("kept")))
    for each in applied:
        after += _read_operands(blocks, each, shared=True)
        after.append(_applied(blocks, each, values, shared=True))
    after += _write_scaled(blocks, "y", values, last)
    return blocks.program(kernels, before, of_rows, after, inf_as_zero=attributes["inf_as_zero"])


def quotient(scale: float, divisor: float) -> list[float]:
    """Factors of scale / divisor that are normal in float32 too: 0 / 1e-40 is 0, but 0 * (1 / 1e-40) would be NaN."""
    if scale == 0.0 or LEAST < abs(scale / divisor) < 1 / LEAST:
        return [scale / divisor]
    return [*factors(scale), *(1.0 / each for each in factors(divisor))]


def factors(scale: float) -> list[float]:
    if scale == 0.0 or LEAST < abs(scale) < 1 / LEAST:
        return [scale]
    root = math.sqrt(abs(scale))
    return [*factors(root), *factors(math.copysign(root, scale))]


def _read_scaled(blocks: Blocks, name: str, values: Buffer, by: Sequence[float]) -> list[list[int]]:
    first, *others = by
    return [blocks.read(name, values, first), *(blocks.of_buffers(multiply, values, alpha=each) for each in others)]


def _write_scaled(blocks: Blocks, name: str, values: Buffer, by: Sequence[float]) -> list[list[int]]:
    *others, last = by
    return [*(blocks.of_buffers(multiply, values, alpha=each) for each in others), blocks.write(name, values, last)]


def _scaled(blocks: Blocks, values: Buffer, by: float) -> list[list[int]]:
    return [] if by == 1.0 else [blocks.of_buffers(multiply, values, alpha=factor) for factor in factors(by)]


def _masked(blocks: Blocks, values: Buffer, otherwise: float) -> list[list[int]]:
    if "where" not in blocks.problem.specs:
        return []
    mask = blocks.chunk("operand 0")
    return [blocks.read("where", mask), blocks.of_buffers(mask_out, values, mask, alpha=otherwise)]


def _dropped(blocks: Blocks, values: Buffer) -> list[list[int]]:
    """The stages of dropout, whose decisions go to the buffer "kept"."""
    probability = blocks.problem.attributes["dropout"]
    if probability is None:
        return []
    kept = blocks.chunk("kept")
    if probability == 0.0:
        return [blocks.of_buffers(fill, kept, alpha=1.0)]
    return [blocks.keep(kept), blocks.of_buffers(drop, values, kept, alpha=kept_scale(probability))]


def _operand_buffers(blocks: Blocks, each: Any, shared: bool) -> list[Buffer]:
    names = [f"operand {number}" if shared else operand for number, operand in enumerate(each.operands)]
    return [blocks.chunk(name) for name in names]


def _read_operands(blocks: Blocks, each: Any, shared: bool) -> list[list[int]]:
    """The stages that read a post-op's operands, into buffers of its own, or into buffers that all post-ops share."""
    buffers = _operand_buffers(blocks, each, shared)
    return [blocks.read(name, buffer) for name, buffer in zip(each.operands, buffers, strict=True)]


def _applied(blocks: Blocks, each: Any, values: Buffer, shared: bool) -> list[int]:
    operands = _operand_buffers(blocks, each, shared)
    return blocks.of_buffers(post_ops.VALUES[each.name], values, *operands, alpha=each.alpha, beta=each.beta)


# --- backward ------------------------------------------------------------------------------------------------------


def gradient(problem: Problem, kernels: Mapping[str, Kernel]) -> Program:
    """softmax_grad or log_softmax_grad, by its kernels in place."""
    if not problem.outer * problem.n * problem.inner:
        return Program((), name="nothing to do")
    blocks, attributes = cut(problem, "dy", ("y", "dx")), problem.attributes
    g, y = blocks.block("values"), blocks.block("y")
    # The scales commute with what follows, but the post-ops' operands have their gradients before.
    first = quotient(1.0 if attributes["post_ops"] else attributes["result_scale"], attributes["out_scale"])
    before = [blocks.read("y", y), *_forward_again(blocks, y), *_read_scaled(blocks, "dy", g, first)]
    for number, each in reversed(list(enumerate(attributes["post_ops"]))):
        before += _back(blocks, number, each, g)
    if attributes["post_ops"]:
        before += _scaled(blocks, g, attributes["result_scale"])
    probability = attributes["dropout"]
    if probability:
        before.append(blocks.of_buffers(drop, g, blocks.chunk("kept"), alpha=kept_scale(probability)))
    before += _masked(blocks, g, 0.0)
    after = _write_scaled(blocks, "dx", g, factors(attributes["logit_scale"]))
    return blocks.program(kernels, before, (), after, other=y)


def _forward_again(blocks: Blocks, y: Buffer) -> list[list[int]]:
    """The stages that compute each post-op's input again, into a buffer of its own, and dropout's decisions."""
    attributes = blocks.problem.attributes
    found, applied = [], attributes["post_ops"]
    if applied:
        v = blocks.chunk("input 0")
        found += [blocks.of_buffers(copy, v, y), *_scaled(blocks, v, attributes["result_scale"])]
        found += _dropped(blocks, v)
    elif attributes["dropout"]:
        found.append(blocks.keep(blocks.chunk("kept")))
    for number, each in enumerate(applied):
        found += _read_operands(blocks, each, shared=False)
        if number + 1 < len(applied):
            v = blocks.chunk(f"input {number + 1}")
            found.append(blocks.of_buffers(copy, v, blocks.chunk(f"input {number}")))
            found.append(_applied(blocks, each, v, shared=False))
    return found


def _back(blocks: Blocks, number: int, each: Any, g: Buffer) -> list[list[int]]:
    """The stages that take g back through one post-op, and write the gradient of its operand if that is a result."""
    s, operands = blocks.chunk(f"input {number}"), _operand_buffers(blocks, each, shared=False)
    found = []
    result = gradient_name(each.operands[-1]) if each.operands else ""
    third = operands[0] if operands else None
    if result in blocks.problem.specs:
        t = blocks.chunk("operand's gradient")
        found += [blocks.of_buffers(copy, t, g)]
        found.append(blocks.of_buffers(post_ops.OPERAND_GRADIENTS[each.name], t, s, third))
        found.append(blocks.write(result, t))
    kernel = post_ops.GRADIENTS[each.name]
    found.append(blocks.of_buffers(kernel, g, s, third, alpha=each.alpha, beta=each.beta))
    return found
