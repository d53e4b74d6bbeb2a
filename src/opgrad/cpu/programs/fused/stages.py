"""Programs of stages: softmax and its gradients with any dtypes, strides and attributes.

Kernels that are compiled for a form (`fusing`) do not make stages superfluous:

* A kernel reads operands whose outer axes make at most two loops and whose vectors are contiguous, and at most seven of
  them. Stages read any operand a block at a time, so that none is copied as a whole.
* A kernel has rows that are long enough for vectors. Short rows are transposed or grouped in a stage's buffer.
* Stages are compiled one by one, for all chains together. The first call with a chain of three or four post-ops takes
  0.25 s by stages, and 0.65 to 0.87 s as a kernel of its own, which is then 7 to 14 % faster (256 x 1000 float32, one
  thread of a Zen 5). A program that tries many chains, as the tests do, chooses stages by `OPGRAD_FUSION=never`.

Both apply the same formulas (`chain.formula_of`, `post_ops.GRADIENTS`). What stands here for a second time is the order
in which a gradient goes back through the post-ops, which stages do in buffers, and kernels in registers.
"""

from collections.abc import Callable, Mapping, Sequence
from struct import pack, unpack
from typing import Final

from opgrad.contract import DTYPES, arrangement
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.decorators import Kernel, inline, vector_lanes
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused import stages
from opgrad.cpu.kernels.fused.chain import formula_of
from opgrad.cpu.kernels.fused.post_ops import GRADIENTS, OPERAND_GRADIENTS, on_buffers
from opgrad.cpu.kernels.fused.stages import BlockCut, Softmax, Stages
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.transpose import group_tiles, tile_size
from opgrad.cpu.kernels.softmax.split import STATS
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.fused import formulas
from opgrad.cpu.programs.layout import in_place_limits, layout_in_buffers
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.program import Operands, Program
from opgrad.cpu.runtime.workspace import Scratch
from opgrad.ops.reference.primitive import STATE, Applied, gradient_name
from opgrad.ops.reference.random import keep_threshold

CHUNK: Final = 1 << 11  # elements, 8 KiB of float32; with as many of an operand they stay in the first-level cache
STRIP_BYTES: Final = 1 << 20  # of a strip of columns; 256 KiB took 1.5 times as long, as memory is read in shorter runs
STRIPS: Final = 16  # the least number of strips, so that threads can share them
NARROWEST: Final = 64  # columns of the narrowest strip, which fill a cache line even if each has one byte

InPlace = Mapping[str, Kernel]  # kernels in place, by layout


def cut(problem: Problem, precision: str) -> BlockCut:
    """Cut the problem into blocks: some rows, or a strip of columns."""
    lanes, n, outer, inner = vector_lanes(precision), max(problem.n, 1), problem.outer, problem.inner
    if inner > 1:
        item = DTYPES[precision].itemsize
        widest = max(min(STRIP_BYTES // (n * item), outer * inner // STRIPS), NARROWEST)
        per_block = min(widest, inner, CHUNK) // lanes * lanes or lanes
        strips = partition.count(inner, per_block)
        return BlockCut(per_block, outer, problem.n, inner, strips, inner, per_block, max(1, CHUNK // per_block))
    per_block = max(1, CHUNK // n)
    if n <= in_place_limits(lanes).grouped:
        per_block = -(-per_block // lanes) * lanes
    return BlockCut(per_block, outer, problem.n, 1, 0, CHUNK, CHUNK, 1)


class StageProgram(ProgramSteps):
    """How a problem is cut into blocks, with the buffers, tables and stages of its program's only step.

    first: the operand whose memory order the loops follow. A stage is a list of the words that
    opgrad.cpu.kernels.fused.stages reads; buffers are given by their places in its table of addresses.
    """

    def __init__(self, problem: Problem, first: str, results: Sequence[str]):
        super().__init__(problem, formulas.precision_of(problem, (first, *results)))
        self.first, self.precision = first, self.workspace.precision
        self.cut = cut(problem, self.precision)
        self.count = 1 + max(each.number for each in problem.operands.values() if each is not None)
        self.offsets: list[int] = []
        self.names: dict[str, int] = {}
        block = self.cut.per_block * problem.n
        self.chunk = min(self.cut.row * self.cut.together, block)
        self.values = self.buffer("values", block)
        self.other = self.buffer("other", block if first == "dy" else 0)
        self.stats = self.buffer("stats", self.cut.per_block)

    def buffer(self, name: str, elements: int | None = None) -> int:
        """The buffer of this name, which is made for a chunk unless a number of elements is given."""
        if name not in self.names:
            self.names[name] = self.count + len(self.offsets)
            self.offsets.append(self.workspace.private(self.chunk if elements is None else elements).offset)
        return self.names[name]

    # --- stages -------------------------------------------------------------------------------------------------------

    def read(self, name: str, to: int, scale: float = 1.0) -> list[int]:
        return self._in_memory(stages.read, name, to, scale, own=0)

    def write(self, name: str, source: int, scale: float = 1.0) -> list[int]:
        return self._in_memory(stages.write, name, source, scale, own=partition.streams(self.problem.bytes))

    def _in_memory(self, kernel: Kernel, name: str, buffer: int, scale: float, own: int) -> list[int]:
        spec, task = self.problem.specs[name], (self.precision, formulas.storage(self.problem.specs[name]))
        table = self._table(spec.shape, spec.strides, own)
        return _stage(kernel.task(task, "stage"), (buffer, self.problem[name].number), scale, table=table)

    def decide(self) -> list[int]:
        """Dropout's decisions."""
        shape, probability = self.problem.specs[self.first].shape, self.problem.attributes["dropout"]
        threshold = keep_threshold(probability) if probability else stages.NOTHING_DROPPED
        table = self._table(shape, arrangement.contiguous(shape, tuple(range(len(shape))), 1), threshold)
        task = stages.keep.task((self.precision, "int64"), "stage")
        return _stage(task, (self.buffer("kept"), self.problem[STATE].number), table=table)

    def change(self, formula: Callable[..., Vector], arrays: Sequence[int], alpha: float, beta: float) -> list[int]:
        """The stage that applies a formula to buffers, of which it overwrites the first."""
        return _stage(on_buffers(formula).task((self.precision,) * 3, "stage"), arrays, alpha, beta)

    def apply(self, applied: Sequence[Applied], values: int) -> list[list[int]]:
        """The stages that read each formula's operands, into buffers that all formulas share, and apply it."""
        found = []
        for each in applied:
            buffers = [self.buffer(f"operand {number}") for number in range(len(each.operands))]
            found += [self.read(name, buffer) for name, buffer in zip(each.operands, buffers, strict=True)]
            given = [self.buffer("kept")] if each.name == "dropout" else buffers
            found.append(self.change(formula_of(each.name), [values, *given], each.alpha, each.beta))
        return found

    def _table(self, shape: Sequence[int], strides: Sequence[int], own: int) -> int:
        loops = arrangement.steps(shape, self.problem.orders[self.first], strides)[::-1]
        return self.tables.add([own, len(loops), *(word for loop in loops for word in (*loop, 0))])

    # --- the program --------------------------------------------------------------------------------------------------

    def around(self, in_place: InPlace, *several: Sequence[list[int]], inf_as_zero: bool = False) -> Program:
        """The program of these stages: those before softmax, those of its rows, and those behind it."""
        problem, cut = self.problem, self.cut
        layout = layout_in_buffers(problem, in_place, self.lanes)
        task = in_place[layout].task((self.precision,) * 4, "stage")
        tile, (_, other, stats, *_) = self.workspace.private(self._tiles(layout)).offset, self.offsets
        addresses = self.workspace.private(self.count + len(self.offsets), "int64")
        words = [*self.offsets, *(word for group in several for stage in group for word in stage)]
        self.add(
            stages.blocks,
            problem.outer * cut.strips or partition.count(problem.outer, cut.per_block),
            cut=cut,
            stages=Stages(self.tables.add(words), self.count, len(self.offsets), *map(len, several)),
            softmax=Softmax(task, other, stats, tile, inf_as_zero),
            operands=Operands(),
            space=Scratch(0, self.precision, private=True),
            addresses=addresses,
            item=self.item,
        )
        return self.program(f"stages, {layout}, {self.precision}")

    def _tiles(self, layout: str) -> int:
        """Numbers that a kernel in place needs besides the block."""
        if layout == "split":
            return 2 * STATS * partition.count(self.problem.n, BLOCK)
        transposed = tile_size(min(self.problem.n, in_place_limits(self.lanes).transposed), self.lanes)
        return max(2 * transposed, group_tiles(self.lanes))


def _stage(task: int, arrays: Sequence[int], alpha: float = 0.0, beta: float = 0.0, table: int = 0) -> list[int]:
    """The words of a stage. Arrays that it has not are the first one."""
    three = [*arrays, arrays[0], arrays[0]][:3]
    return [task, *three, *unpack("2q", pack("2d", alpha, beta)), table]


_copied = inline(lambda values, operand, third, alpha, beta: operand)

# --- forward ----------------------------------------------------------------------------------------------------------


def forward(problem: Problem, in_place: InPlace) -> Program:
    """softmax or log_softmax, by its kernels in place."""
    # A row without elements still has a log-sum-exp, which is -inf.
    if not problem.outer * problem.inner or not (problem.n or "stats" in problem.specs):
        return Program((), name="nothing to do")
    blocks, wanted = StageProgram(problem, "x", ("y",)), problem.specs
    values, probability = blocks.values, problem.attributes["dropout"]
    scale, inner = _factor(formulas.before(problem))
    last, outer = _factor(formulas.after(problem)[::-1])
    before = [blocks.read("x", values, scale), *blocks.apply(inner, values)]
    of_rows = [blocks.write("stats", blocks.stats)] if "stats" in wanted else []
    after = [blocks.write("saved", values)] if "saved" in wanted else []
    after += [blocks.decide()] if probability or "mask" in wanted else []
    after += [blocks.write("mask", blocks.buffer("kept"))] if "mask" in wanted else []
    after += [*blocks.apply(outer[::-1], values), blocks.write("y", values, last)]
    return blocks.around(in_place, before, of_rows, after, inf_as_zero=problem.attributes["inf_as_zero"])


def _factor(applied: Sequence[Applied]) -> tuple[float, Sequence[Applied]]:
    """The factor with which these formulas begin, 1 if there is none, and the other formulas."""
    if applied and applied[0].name == "times":
        return applied[0].alpha, applied[1:]
    return 1.0, applied


# --- backward ---------------------------------------------------------------------------------------------------------


def gradient(problem: Problem, in_place: InPlace) -> Program:
    """softmax_grad or log_softmax_grad, by its kernels in place."""
    if not problem.outer * problem.n * problem.inner:
        return Program((), name="nothing to do")
    blocks, (first, inputs, applied, rest, after) = StageProgram(problem, "dy", ("y", "dx")), formulas.gradient(problem)
    g, y = blocks.values, blocks.other
    scale, others = _factor(first)
    last, behind = _factor(after[::-1])
    before = [blocks.decide()] if problem.attributes["dropout"] else []
    before += [blocks.read("y", y), *_forward_again(blocks, y, inputs, applied)]
    before += [blocks.read("dy", g, scale), *blocks.apply(others, g)]
    for number, each in reversed(list(enumerate(applied))):
        before += _back(blocks, number, each, g)
    before += blocks.apply(rest, g)
    return blocks.around(in_place, before, (), [*blocks.apply(behind[::-1], g), blocks.write("dx", g, last)])


def _forward_again(
    blocks: StageProgram, y: int, inputs: Sequence[Applied], applied: Sequence[Applied]
) -> list[list[int]]:
    """The stages that read the post-ops' operands and compute their inputs again, into buffers of their own."""
    found, before = [], y
    for number, each in enumerate(applied):
        s = blocks.buffer(f"input {number}")
        found.append(blocks.change(_copied, [s, before], 0.0, 0.0))
        if number == 0:
            found += blocks.apply(inputs, s)
        else:
            made = applied[number - 1]
            given = [s, *map(blocks.buffer, made.operands)]
            found.append(blocks.change(formula_of(made.name), given, made.alpha, made.beta))
        found += [blocks.read(name, blocks.buffer(name)) for name in each.operands]
        before = s
    return found


def _back(blocks: StageProgram, number: int, each: Applied, g: int) -> list[list[int]]:
    """The stages that take g back through one post-op, and write the gradient of its operand if that is a result."""
    arrays, found = [blocks.buffer(f"input {number}"), *map(blocks.buffer, each.operands[:1])], []
    result = gradient_name(each.operands[-1]) if each.operands else ""
    if result in blocks.problem.specs:
        t = blocks.buffer("operand's gradient")
        found.append(blocks.change(_copied, [t, g], 0.0, 0.0))
        found.append(blocks.change(OPERAND_GRADIENTS[each.name], [t, *arrays], 0.0, 0.0))
        found.append(blocks.write(result, t))
    return [*found, blocks.change(GRADIENTS[each.name], [g, *arrays], each.alpha, each.beta)]
