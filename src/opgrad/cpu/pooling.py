"""The gradients of pooling, a plane (one image's channel) or a row of one at a time.

A plane of x has `depth` x `height` x `width` elements, of which the first ones may be 1.
"""

import itertools
import math
from typing import Any, Final

import numpy as np

from opgrad.contract import Array
from opgrad.cpu.compiler.memory import load_f64, load_word, store_word
from opgrad.cpu.compiler.native import inline, kernel, vector_lanes
from opgrad.cpu.compiler.simd import (
    Pointer,
    first,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    number,
    store,
    store_masked,
    store_one,
)
from opgrad.cpu.gather import report_indices
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.loops.map import write_same
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.cpu.runtime.workspace import release_slot, take_slot, working_space
from opgrad.problem import Problem
from opgrad.ranges import wrong_maximum
from opgrad.windows import MOST_AXES, Axis, average_pool_axes

CHUNK: Final = 64  # terms that are added to each other before they join the total
ONE_WINDOW: Final = Axis(1, 1, 1)


@inline
def clear(x: Any, n: int) -> None:
    w, i = lanes(x), 0
    while i + w <= n:
        store(x, i, full(x, 0.0))
        i += w
    if i < n:
        store_masked(x, i, full(x, 0.0), first(x, n - i))


# --- max pooling ---------------------------------------------------------------------------------------------------


@kernel
def check_planes(part, per_part, planes, windows, size, indices: Pointer, found):
    """found[part] = the first place in this part whose index lies outside its plane, or -1."""
    wrong = -1
    for plane in range(part * per_part, min((part + 1) * per_part, planes)):
        outside = 0
        for j in range(plane * windows, (plane + 1) * windows):
            place = load_one(indices, j) - plane * size
            outside |= place | (size - 1 - place)  # negative if one of them is
        if outside < 0:
            for j in range(plane * windows, (plane + 1) * windows):
                place = load_one(indices, j) - plane * size
                if place < 0 or place >= size:
                    wrong = j
                    break
            break
    store_word(found, part, wrong)


@inline
def in_rows(place: int, depth: int, height: int, width: int) -> int:
    """Where the element stands that is number `place` of a plane counted with the first axis fastest."""
    d, h, w = place % depth, place // depth % height, place // (depth * height)
    return (d * height + h) * width + w


@kernel
def add_to_maxima(
    part, per_part, planes, windows, depth, height, width, columns_first,
    dy: Pointer, indices: Pointer, sums: Pointer,
):  # fmt: skip
    """sums = 0; sums[indices[j]] += dy[j], plane by plane."""
    size = depth * height * width
    for plane in range(part * per_part, min((part + 1) * per_part, planes)):
        into = sums + plane * size
        clear(into, size)
        for j in range(plane * windows, (plane + 1) * windows):
            place = load_one(indices, j) - plane * size
            if columns_first:
                place = in_rows(place, depth, height, width)
            store_one(into, place, load_one(into, place) + load_one(dy, j))


@kernel
def copy_planes(part, per_part, planes, size, sums: Pointer, dx: Pointer):
    begin, end = part * per_part * size, min((part + 1) * per_part, planes) * size
    write_same(dx, begin, end, 0, (sums,), ())


def max_pool_grad(problem: Problem) -> Program:
    shape, windows = problem.attributes["shape"], math.prod(problem.specs["dy"].shape[2:])
    planes, size = math.prod(shape[:2]), math.prod(shape[2:])
    if not planes or not size + windows:
        return Program(())
    per = partition.per_part(planes, problem.bytes / planes)
    made = partition.count(planes, per)
    dy, dx, indices = (problem[name] for name in ("dy", "dx", "indices"))
    # Half precision would round after each addition.
    summed = Scratch((8 * (STATUS_WORDS + made) + 63) & ~63) if dx.dtype in ("float16", "bfloat16") else dx
    depth, height, width = (1,) * (2 + MOST_AXES - len(shape)) + shape[2:]
    given = {
        "per_part": per,
        "planes": planes,
        "windows": windows,
        "size": size,
        "indices": indices,
        "found": Scratch(8 * STATUS_WORDS),
        "made": made,
        "scratch": Scratch(),
        "depth": depth,
        "height": height,
        "width": width,
        "columns_first": problem.attributes["storage_order"],
        "dy": dy,
        "sums": summed,
        "dx": dx,
    }
    steps = [Step(check_planes, made, given), Step(report_indices, 1, given), Step(add_to_maxima, made, given)]
    end = 8 * (STATUS_WORDS + made)
    if isinstance(summed, Scratch):
        steps.append(Step(copy_planes, made, given))
        end = summed.offset + 4 * planes * size
    return Program(steps, end, wrong_maximum(problem, "max_pool_grad"))


# --- average pooling -----------------------------------------------------------------------------------------------


@inline
def add_times(sums: Any, x: Any, n: int, factor: Any) -> None:
    """sums[0:n] += x * factor; up to a vector more of the sums may be written."""
    w, i = lanes(x), 0
    while i + w <= n:
        store(sums, i, load(sums, i) + load(x, i) * factor)
        i += w
    if i < n:
        store(sums, i, load(sums, i) + load_masked(x, i, first(x, n - i), 0.0) * factor)


@inline
def spread_some(
    line: Any, width: int, sums: Any, count: int, from_k: int, to_k: int, stride: int, dilation: int, begin: int
) -> None:
    """line[i] = the sum of the sums of the windows whose elements from_k to to_k i is, along one axis."""
    clear(line, width)
    for k in range(from_k, to_k):
        offset = k * dilation - begin
        low = max(0, -(offset // stride))
        high = min(count, (width - 1 - offset) // stride + 1)
        if stride == 1:
            if low < high:
                add_times(line + (low + offset), sums + low, high - low, 1.0)
        else:
            for o in range(low, high):
                i = o * stride + offset
                store_one(line, i, load_one(line, i) + load_one(sums, o))


@inline
def spread(
    line: Any, width: int, sums: Any, count: int, kernel: int, stride: int, dilation: int, begin: int, chunk: Any
) -> None:
    """line[i] = the sum of the sums of all windows that i is in."""
    spread_some(line, width, sums, count, 0, min(kernel, CHUNK), stride, dilation, begin)
    for k in range(CHUNK, kernel, CHUNK):
        spread_some(chunk, width, sums, count, k, min(k + CHUNK, kernel), stride, dilation, begin)
        add_times(line, chunk, width, 1.0)


@kernel
def share_out(
    part, per_part, rows, depth, height, width, deep, high, wide, kernel, stride, dilation, begin,
    starts_d, windows_d, shares_d, starts_h, windows_h, shares_h, new_h, shares_w, same_w,
    dy: Pointer, dx: Pointer, space: Pointer, space_size, scratch, slots,
):  # fmt: skip
    """Rows of dx: first the rows of dy are added whose windows it is in, then the sums are spread along the row.

    Along the first two axes, windows[starts[i]:starts[i+1]] are those that i is in; shares are 1 / elements of each
    window, new_h tells whether a row's windows differ from those of the row before.
    """
    slot = take_slot(scratch, slots)
    sums = space + slot * space_size
    line = sums + (wide + lanes(dx))
    chunk = line + (width + lanes(dx))  # long enough for a row of sums, too
    from_row = part * per_part
    for row in range(from_row, min(from_row + per_part, rows)):
        plane, d, h = row // (depth * height), row // height % depth, row % height
        if row == from_row or load_word(new_h, h):
            clear(sums, wide)
            for a in range(load_word(starts_d, d), load_word(starts_d, d + 1)):
                end_h = load_word(starts_h, h + 1)
                for b in range(load_word(starts_h, h), end_h, CHUNK):
                    clear(chunk, wide)
                    for c in range(b, min(b + CHUNK, end_h)):
                        od, oh = load_word(windows_d, a), load_word(windows_h, c)
                        share = load_f64(shares_d, od) * load_f64(shares_h, oh) * load_f64(shares_w, 0)
                        add_times(chunk, dy + ((plane * deep + od) * high + oh) * wide, wide, number(dx, share))
                    add_times(sums, chunk, wide, 1.0)
            if not same_w:
                for o in range(wide):
                    relative = load_f64(shares_w, o) / load_f64(shares_w, 0)
                    store_one(sums, o, load_one(sums, o) * number(dx, relative))
            spread(line, width, sums, wide, kernel, stride, dilation, begin, chunk)
        write_same(dx + row * width, 0, width, 0, (line,), ())
    release_slot(scratch, slot)


def _shares(axis: Axis, count_padding: bool) -> Array:
    """1 / elements of each window."""
    first = np.arange(axis.count) * axis.stride - axis.begin
    low = np.maximum(-(first // axis.dilation), 0)
    beyond = axis.size + (axis.end if count_padding else 0) - first
    elements = np.minimum(axis.kernel, -(-beyond // axis.dilation)) - (0 if count_padding else low)
    return 1.0 / np.maximum(elements, 1).astype(np.float64)


def _windows(axis: Axis) -> tuple[Array, Array, Array]:
    """Which windows each element is in: `starts`, `windows`, and whether they differ from the element before."""
    window, k = np.divmod(np.arange(axis.count * axis.kernel), axis.kernel)
    element = window * axis.stride - axis.begin + k * axis.dilation
    inside = (element >= 0) & (element < axis.size)
    element, window = element[inside], window[inside]
    order = np.lexsort((window, element))
    starts = np.searchsorted(element[order], np.arange(axis.size + 1))
    lists = [window[order][a:b].tobytes() for a, b in itertools.pairwise(starts)]
    new = [i == 0 or lists[i] != lists[i - 1] for i in range(axis.size)]
    return starts, window[order], np.array(new, np.int64)


def average_pool_grad(problem: Problem) -> Program:
    shape = problem.attributes["shape"]
    if not math.prod(shape):
        return Program(())
    along = average_pool_axes(problem.attributes)
    deep, high, wide = (ONE_WINDOW,) * (MOST_AXES - len(along)) + along
    rows = math.prod(shape[:-1])
    per = partition.per_part(rows, problem.bytes / rows)
    made = partition.count(rows, per)
    dtype = precision(problem)
    # Behind each of three rows there is room for a vector that `add_times` writes in part beyond it.
    longest = max(wide.count, wide.size)
    space, end = working_space(3 * (longest + vector_lanes(dtype)), dtype, made)
    padding = problem.attributes["count_include_pad"]
    (starts_d, windows_d, _), (starts_h, windows_h, new_h) = _windows(deep), _windows(high)
    shares_d, shares_h, shares_w = (_shares(axis, padding) for axis in (deep, high, wide))
    tables = {
        "starts_d": starts_d,
        "windows_d": windows_d,
        "starts_h": starts_h,
        "windows_h": windows_h,
        "new_h": new_h,
        "shares_d": shares_d,
        "shares_h": shares_h,
        "shares_w": shares_w,
    }
    tables = {name: np.ascontiguousarray(table) for name, table in tables.items()}
    given = {name: table.ctypes.data for name, table in tables.items()} | {
        "per_part": per,
        "rows": rows,
        "depth": deep.size,
        "height": high.size,
        "width": wide.size,
        "deep": deep.count,
        "high": high.count,
        "wide": wide.count,
        "kernel": wide.kernel,
        "stride": wide.stride,
        "dilation": wide.dilation,
        "begin": wide.begin,
        "same_w": bool((shares_w == shares_w[:1]).all()),
        "dy": problem["dy"],
        "dx": problem["dx"],
    }
    return Program([Step(share_out, made, given | space)], end, tables=list(tables.values()))
