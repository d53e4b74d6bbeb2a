"""The programs of slices and elements that are picked by index or by range, and of their gradients.

Tuples of indices are first turned into numbers of slices; then the operator is gather with axis 0. Elements of an array
with one axis are such slices, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from opgrad.contract import Shape
from opgrad.contract.arrangement import slice_ranges
from opgrad.contract.signature import Operand, Problem, wrong_index
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels import indexing as kernels
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.kernels.loops.rows import buffer_size
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.plan import MAX_PART_BYTES, Program, Scratch, Tables, ceil_div, streams

MOST_PARTS: Final = 8  # since each part needs a count for every key
FEWEST_OF_PART: Final = 1 << 14  # positions


class Sorting:
    """Sorts `count` positions by keys from 0 to size - 1, once or several times with the same memory.

    Afterwards `starts` has the place where each key's positions begin, and, behind the last, `count`; `hot` has the
    number of hot keys, and these.
    """

    def __init__(self, steps: ProgramSteps, count: int, size: int):
        self.into, self.count = steps, count
        self.per_part = -(-count // max(1, min(MOST_PARTS, count // max(size, FEWEST_OF_PART))))
        parts, shared = ceil_div(count, self.per_part), steps.workspace.shared
        self.starts, self.hot = shared(size + 1, "int64"), shared(kernels.HOT + 2, "int64")
        self.arguments = {"parts": parts, "count": count, "size": size, "starts": self.starts, "hot": self.hot}
        self.arguments["counts"] = shared(parts * size, "int32")

    def add(self, sort: tuple[Kernel, Kernel], source: Any, target: Any) -> None:
        """Add the steps that sort the positions by the keys that `source` gives, and write them to `target`."""
        arguments = {**self.arguments, "source": source, "target": target}
        count_keys, move_positions = sort
        self.into.add_parts(count_keys, self.count, self.per_part, **arguments)
        self.into.add_parts(kernels.scan_counts, **arguments)
        self.into.add_parts(move_positions, self.count, self.per_part, **arguments)


INDICES_PER_PART = 1 << 13
# Where slices are copied, a slice is prefetched at least so many slices, and at least so many bytes, before its use:
# short slices are copied faster than memory answers.
SOON: Final = 3
SOON_BYTES: Final = 4096
NEAR: Final = 1 << 19  # bytes of x that the second-level cache holds, so that its slices need no prefetch
# Threads share a hot slice by pieces of its addends if slices have at most FEW_COLUMNS columns, otherwise by strips of
# columns. There are at most PIECES pieces, of at least SHORTEST_PIECE slices of dy each.
PIECES: Final = 128
SHORTEST_PIECE: Final = 256
FEW_COLUMNS: Final = 4096


def check(steps: ProgramSteps, kernel: Kernel, units: int, per_part: int, **arguments: Any) -> None:
    """Add the steps in which every part looks for a wrong index, and the first one is reported."""
    parts = ceil_div(units, per_part)
    found = steps.workspace.shared(parts, "int64")
    steps.add_parts(kernel, units, per_part, **arguments, found=found)
    steps.add_parts(kernels.report_indices, parts=parts, found=found, status=Scratch(), **arguments)


def check_indices(steps: ProgramSteps, size: int, name: str = "indices") -> None:
    """Add the steps that check the indices into an axis of this size. name: of the operand that holds them."""
    indices = steps.problem[name]
    count = math.prod(steps.problem.specs[name].shape)
    check(steps, kernels.check_indices, count, INDICES_PER_PART, size=size, indices=indices)
    steps.explain = wrong_index(steps.problem, size, name)


def gather(problem: Problem) -> Program:
    steps, shape, axis = ProgramSteps(problem), problem.specs["x"].shape, problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    check_indices(steps, size)
    copy_slices(steps, pre, kernels.Slices(math.prod(problem.specs["indices"].shape), size, post))
    return steps


def copy_slices(steps: ProgramSteps, pre: int, slices: kernels.Slices) -> None:
    """Add the step that copies slices of x to y."""
    x, y, item = steps.problem["x"], steps.problem["y"], steps.problem.specs["x"].dtype.itemsize
    slice_bytes, units = slices.post * item, pre * slices.count
    if not units * slice_bytes:
        return
    words = 0 if slice_bytes % 4 else slice_bytes // 4
    near = pre * slices.size * slice_bytes <= NEAR
    steps.add(
        kernels.copy_slices,
        units,
        2 * slice_bytes,
        slices=slices,
        item=item,
        words=words,
        x=Operand(x.number, "float32"),
        y=Rows(Operand(y.number, "float32"), words),
        soon=0 if near else max(SOON, SOON_BYTES // slice_bytes),
        buffer=steps.workspace.private(buffer_size(4), "float32"),
        stream=streams(2 * units * slice_bytes),
    )


def gather_grad(problem: Problem) -> Program:
    steps, shape, axis = ProgramSteps(problem), problem.attributes["shape"], problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count = math.prod(problem.specs["indices"].shape)
    check_indices(steps, size)
    if pre * size * post:
        check_count(problem, count)
        sum_slices(steps, pre, kernels.Slices(count, size, post))
    return steps


def check_count(problem: Problem, count: int) -> None:
    """Raise NotImplementedError if there are more slices than can be sorted."""
    if count > (most := kernels.MOST_SORTED):
        wrong = f"indices name {count} slices, expected at most {most} on the CPU"
        raise NotImplementedError(f"{problem.operator.name}: {wrong}")


def sum_slices(steps: ProgramSteps, pre: int, slices: kernels.Slices) -> None:
    """Add the steps that sort the slices of dy by where they go, and sum them."""
    count, size, _ = slices
    if not count:
        steps.clear("dx")
        return
    sorting, order = Sorting(steps, count, size), steps.workspace.shared(count + kernels.AHEAD, "int32")
    ranges = max(1, min(size, round(steps.problem.bytes / (pre * MAX_PART_BYTES))))
    arguments = {"slices": slices, "order": order, "starts": sorting.starts, "hot": sorting.hot}
    sorting.add(kernels.SLICES_BY_TARGET, steps.problem["indices"], order)
    steps.add(kernels.sum_slices, pre * ranges, ranges=ranges, per_range=-(-size // ranges), **arguments)
    sum_hot_slices(steps, pre, slices, arguments)


def sum_hot_slices(steps: ProgramSteps, pre: int, slices: kernels.Slices, arguments: dict[str, Any]) -> None:
    """Add the steps that sum the slices of dx that many slices go to.

    Where there are few columns, all of them of a piece of the addends: pieces stay in the second-level cache, and
    memory is read from end to end (65536 equal indices, slices of 256 numbers: 2.0 ms by strips, 1.7 by pieces; in
    bfloat16 1.35 and 0.66; Zen 5, 2 threads).
    """
    count, _, post = slices
    pieces = max(1, min(PIECES, count // SHORTEST_PIECE)) if pre * post <= FEW_COLUMNS else 1
    width = post if pieces > 1 else kernels.WIDE * steps.lanes
    strips = ceil_div(post, width)
    sums = steps.workspace.shared(pre * kernels.HOT * pieces * post) if pieces > 1 else steps.problem["dx"]
    arguments = {**arguments, "pieces": pieces, "width": width, "strips": strips, "sums": sums}
    steps.add_parts(kernels.sum_hot_slices, pre * pieces * strips, **arguments)
    if pieces > 1:
        steps.add_parts(kernels.add_pieces, pre, **arguments)


CACHED = 1 << 17  # bytes of a strip of x that stay in the second-level cache with all that goes through it
NARROW = 16  # lines of a strip at least, if there are so many side by side: a cache line of float32
MOST_BITS: Final = 11  # of a digit: the counts of a part, 8 KiB, stay in the first-level cache
FEW = 4  # elements for each number from which on this is used, since visiting every element costs more than sorting


# --- tuples of indices ----------------------------------------------------------------------------------------------


class NumberedSteps(ProgramSteps):
    """The steps that turn tuples of indices into numbers of slices; for those that follow, these are the indices."""

    def __init__(self, problem: Problem, batches: int, sizes: Shape, count: int):
        super().__init__(problem)
        self.numbers = self.workspace.shared(count, "int64")
        given = {"per_batch": count // max(batches, 1), "named": len(sizes), "sizes": self.tables.add(sizes)}
        check(self, kernels.number_tuples, count, INDICES_PER_PART, numbers=self.numbers, **given)
        # A number of a tuple is one of the axis at its place.
        self.explain = lambda position, value: wrong_index(problem, sizes[position % len(sizes)])(position, value)
        self.problem = replace(problem, operands={**problem.operands, "indices": self.numbers})
        self.slices = batches * math.prod(sizes)


def _tuples(problem: Problem, shape: Shape) -> tuple[NumberedSteps, int, int]:
    """The numbered slices, the elements of a slice, and how many tuples there are."""
    batch, indices = problem.attributes["batch_dims"], problem.specs["indices"].shape
    named_end = batch + indices[-1]
    count = math.prod(indices[:-1])
    steps = NumberedSteps(problem, math.prod(shape[:batch]), shape[batch:named_end], count)
    return steps, math.prod(shape[named_end:]), count


def gather_nd(problem: Problem) -> Program:
    steps, post, count = _tuples(problem, problem.specs["x"].shape)
    if post == 1:
        copy_lines(steps, AxisLines((steps.slices,), (count,), 0, steps.tables))
    else:
        copy_slices(steps, 1, kernels.Slices(count, steps.slices, post))
    return steps


def gather_nd_grad(problem: Problem) -> Program:
    return _summed(*_tuples(problem, problem.attributes["shape"]))


def _summed(steps: NumberedSteps, post: int, count: int) -> Program:
    """Numbers, then sums by destination: one by one if there are far more elements, else element by element.

    Single elements are added where they go: sorting them first takes five times as long.
    """
    slices = kernels.Slices(count, steps.slices, post)
    sparse = slices.size > FEW * count and count
    if slices.size * post and post == 1 and not sparse:
        sum_lines(steps, AxisLines((slices.size,), (count,), 0, steps.tables))
    elif slices.size * post:
        check_count(steps.problem, count)
        if sparse:
            sum_sorted_slices(steps, slices)
        else:
            sum_slices(steps, 1, slices)
    return steps


def sum_sorted_slices(steps: NumberedSteps, slices: kernels.Slices) -> None:
    """Add the steps that zero dx and add the slices of dy, which are sorted by the numbers of those of dx."""
    count, size, post = slices
    bits = max(1, (size - 1).bit_length())
    digit = -(-bits // -(-bits // MOST_BITS))  # as short as the number of passes allows
    sorting, shared = Sorting(steps, count, 1 << digit), steps.workspace.shared
    order, other_order = (shared(count + kernels.AHEAD, "int32") for _ in range(2))
    source, target = kernels.Sorted(steps.numbers, order, 0), kernels.Sorted(shared(count, "int64"), other_order, 0)
    steps.clear("dx")
    for shift in range(0, bits, digit):
        sorting.add(kernels.KEYS_BY_DIGIT, source._replace(shift=shift), target)
        source, target = target, source
    slice_bytes = post * steps.problem.specs["dy"].dtype.itemsize
    steps.add(kernels.sum_sorted, count, 2 * slice_bytes + 12, source=source, count=count, post=post)


# --- elements along an axis ----------------------------------------------------------------------------------------


class AxisLines:
    """Where the lines lie: `table` is the address of the axes that choose a strip's first line, the last axis first.

    `run` lines lie side by side, in the indices' array (n of them on the axis) as in x (size of them). `steps` are the
    strides of the axis in both. `covers`: whether all lines of x have indices.
    """

    def __init__(self, x: Shape, indices: Shape, axis: int, tables: Tables):
        self.n, self.size = indices[axis], x[axis]
        strides = [(math.prod(indices[each + 1 :]), math.prod(x[each + 1 :])) for each in range(len(x))]
        self.steps = strides[axis]
        self.run, first = 1, len(x)
        while first > axis + 1 and strides[first - 1] == (self.run, self.run):
            first -= 1
            self.run *= indices[first]
        others = [each for each in reversed(range(first)) if each != axis and indices[each] != 1]
        self.rows = math.prod(indices[each] for each in others)
        words = [(indices[each], *strides[each]) for each in others]
        self.axes, self.table = len(others), tables.add(words)
        self.covers = all(indices[each] == x[each] for each in range(len(x)) if each != axis)

    def strips(self, width: int) -> tuple[int, kernels.LineStrips]:
        """How many strips of `width` lines there are, and the kernels' argument about them."""
        strips = ceil_div(self.run, width)
        bundle = kernels.LineStrips(strips, width, self.run, self.table, self.axes, self.n, self.size, *self.steps)
        return self.rows * strips, bundle


def gather_elements(problem: Problem) -> Program:
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    return _along_axis(problem, shape, axis, copy_lines)


def gather_elements_grad(problem: Problem) -> Program:
    shape, axis = problem.attributes["shape"], problem.attributes["axis"].start
    count = math.prod(problem.specs["dy"].shape)
    if math.prod(shape) == shape[axis] and count == problem.specs["dy"].shape[axis]:
        return _summed(NumberedSteps(problem, 1, (shape[axis],), count), 1, count)
    return _along_axis(problem, shape, axis, sum_lines)


def _along_axis(problem: Problem, shape: Shape, axis: int, work: Callable[[ProgramSteps, AxisLines], None]) -> Program:
    steps = ProgramSteps(problem)
    check_indices(steps, shape[axis])
    work(steps, AxisLines(shape, problem.specs["indices"].shape, axis, steps.tables))
    return steps


def copy_lines(steps: ProgramSteps, lines: AxisLines) -> None:
    """Add the step that copies elements of x to y."""
    problem, count = steps.problem, math.prod(steps.problem.specs["indices"].shape)
    if not count:
        return
    item = problem.specs["x"].dtype.itemsize
    strips, bundle = lines.strips(_width(lines, item))
    blocks = max(1, round(count * 2 * item / (strips * MAX_PART_BYTES)))
    per_block = -(-lines.n // blocks)
    blocks = ceil_div(lines.n, per_block)
    x, y = (Operand(problem[name].number, f"int{8 * item}") for name in ("x", "y"))  # what is copied is not converted
    arguments = {"lines": bundle, "per_block": per_block, "blocks": blocks, "asked": 0}
    if blocks == 1 and lines.run == 1 and lines.steps == (1, 1) and lines.size * item <= CACHED:
        each = -(-lines.size // lines.n)
        arguments["asked"] = each if each * item <= CACHE_LINE else 0
    unit_bytes = count / (strips * blocks) * (2 * item + problem.specs["indices"].dtype.itemsize)
    steps.add(kernels.copy_elements, strips * blocks, unit_bytes, x=x, y=y, **arguments)


def _width(lines: AxisLines, item: int) -> int:
    """How many lines make a strip."""
    return max(1, min(lines.run, max(NARROW, CACHED // (max(lines.size, 1) * item))))


def sum_lines(steps: ProgramSteps, lines: AxisLines) -> None:
    """Add the steps that sum dy into dx."""
    dy, dx = (steps.problem.specs[name] for name in ("dy", "dx"))
    if not math.prod(dy.shape) or not lines.covers:
        steps.clear("dx")
    if not math.prod(dy.shape) or not math.prod(dx.shape):
        return
    strips, bundle = lines.strips(_width(lines, 4))
    if lines.n == 1 or (lines.n <= CHUNK and dx.dtype.itemsize > 2):
        steps.add(kernels.add_in_place, strips, lines=bundle)
        return
    most, private = lines.size * bundle.width, steps.workspace.private
    steps.add(kernels.add_apart, strips, lines=bundle, total=private(most), compensation=private(most), most=most)


# --- ranges --------------------------------------------------------------------------------------------------------


def slice_grad(problem: Problem) -> Program:
    """dx = 0; dx[taken] = dy, `taken` with a range for each axis."""
    steps, shape, taken = ProgramSteps(problem), problem.attributes["shape"], slice_ranges(dict(problem.attributes))
    size = math.prod(shape)
    if not size:
        return steps
    loops, (n, row) = _joined(shape, taken)
    rows, chosen = loops.pop() if loops else (1, range(1))
    table = steps.tables.add([(length, picked.start, picked.step, len(picked)) for length, picked in reversed(loops)])
    blocks, given = ceil_div(n, BLOCK), {"columns": _axis_range(row), "x": problem["dy"], "y": problem["dx"]}
    given |= {"rows": rows, "picked": _axis_range(chosen), "table": table, "axes": len(loops)}
    stream = streams(problem.bytes) and row.step == 1
    steps.add(kernels.scatter_rows, size // n * blocks, blocks=blocks, n=n, stream=stream, **given)
    return steps


def _axis_range(taken: range) -> kernels.AxisRange:
    return kernels.AxisRange(taken.start, taken.step, len(taken))


def _joined(shape: Sequence[int], taken: Sequence[range]) -> tuple[list[tuple[int, range]], tuple[int, range]]:
    """(size, range) of the axes that rows are chosen by, and of a row."""
    found: list[tuple[int, range]] = [(1, range(1))]
    for size, each in zip(shape, taken, strict=True):
        picked = each if len(each) > 1 else range(each.start, each.start + len(each))
        before, chosen = found[-1]
        if picked == range(size) and chosen == range(before):
            found[-1] = (before * size, range(before * size))
        else:
            found.append((size, picked))
    n, row = found.pop()
    if found and row == range(n) and found[-1][1].step == 1:
        before, chosen = found.pop()
        n, row = before * n, range(chosen.start * n, chosen.stop * n)
    return [axis for axis in found if axis != (1, range(1))], (n, row)
