"""Other ways of going over rows, which no operator takes: what they would gain, `regimes.py` measures on a device.

    persistent   as many programs as fit the device go over the rows; while a row is reduced, the next is on its way to
                 shared memory
    kept         the end of a long row stays in registers, so that the second pass reads less of it again
    looped       two passes over long rows, as opgrad.cuda.rows makes them, without ends that are not aligned

SHORT: exp is 2 instructions, as results of 16 bits allow, where 8 are needed for 1 ulp of float32. HINT: what is told
to the L2 cache: 1, results are streamed; 2, they and what is read for the last time are dropped first; 3, what is read
again is kept, too.
"""

import triton
import triton.language as tl

from opgrad.cuda.numbers import LOG2_E, MINUS_INFINITY, exp


@triton.jit
def power(x, SHORT: tl.constexpr):
    return tl.exp2(x * LOG2_E) if SHORT else exp(x)


@triton.jit
def read(pointers, inside, OTHER: tl.constexpr, HINT: tl.constexpr, LAST: tl.constexpr):
    if HINT >= 2 and LAST:
        x = tl.load(pointers, mask=inside, other=OTHER, eviction_policy="evict_first")
    elif HINT == 3:
        x = tl.load(pointers, mask=inside, other=OTHER, eviction_policy="evict_last")
    else:
        x = tl.load(pointers, mask=inside, other=OTHER)
    return x.to(tl.float32)


@triton.jit
def write(pointers, x, inside, HINT: tl.constexpr):
    if HINT == 1:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=inside, cache_modifier=".cs")
    elif HINT > 1:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def softmax_persistent(
    x, y, rows, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SHORT: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    k = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        first = row.to(tl.int64) * N
        tile = read(x + first + k, k < N, MINUS_INFINITY, HINT, True)
        e = power(tile - tl.max(tile, 0), SHORT)
        write(y + first + k, e * (1.0 / tl.sum(e, 0)), k < N, HINT)


@triton.jit
def softmax_grad_persistent(
    dy, y, dx, rows, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SHORT: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    k = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        first = row.to(tl.int64) * N
        a = read(dy + first + k, k < N, 0.0, HINT, True)
        b = read(y + first + k, k < N, 0.0, HINT, True)
        write(dx + first + k, b * (a - tl.sum(a * b, 0)), k < N, HINT)


@triton.jit
def softmax_kept(
    x, y, rows, N: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SHORT: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """KEPT = 0: all of the row is read twice."""
    REST: tl.constexpr = N - KEPT
    first, k = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    m, d = MINUS_INFINITY, 0.0
    if KEPT:
        end = REST + tl.arange(0, KEPT)
        kept = read(x + first + end, end < N, MINUS_INFINITY, HINT, True)
    for start in tl.range(0, REST, BLOCK, num_stages=STAGES):
        tile = read(x + first + start + k, start + k < REST, MINUS_INFINITY, HINT, False)
        larger = tl.maximum(m, tl.max(tile, 0))
        d = d * power(m - larger, SHORT) + tl.sum(power(tile - larger, SHORT), 0)
        m = larger
    if KEPT:
        larger = tl.maximum(m, tl.max(kept, 0))
        d = d * power(m - larger, SHORT) + tl.sum(power(kept - larger, SHORT), 0)
        m = larger
        write(y + first + end, power(kept - m, SHORT) * (1.0 / d), end < N, HINT)
    last: tl.constexpr = (REST - 1) // BLOCK * BLOCK
    for done in tl.range(0, REST, BLOCK, num_stages=STAGES):
        column = last - done + k
        tile = read(x + first + column, column < REST, MINUS_INFINITY, HINT, True)
        write(y + first + column, power(tile - m, SHORT) * (1.0 / d), column < REST, HINT)


@triton.jit
def softmax_grad_kept(
    dy, y, dx, rows, N: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SHORT: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = N - KEPT
    first, k = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    total = 0.0
    if KEPT:
        end = REST + tl.arange(0, KEPT)
        kept_a = read(dy + first + end, end < N, 0.0, HINT, True)
        kept_b = read(y + first + end, end < N, 0.0, HINT, True)
    for start in tl.range(0, REST, BLOCK, num_stages=STAGES):
        a = read(dy + first + start + k, start + k < REST, 0.0, HINT, False)
        b = read(y + first + start + k, start + k < REST, 0.0, HINT, False)
        total += tl.sum(a * b, 0)
    if KEPT:
        total += tl.sum(kept_a * kept_b, 0)
        write(dx + first + end, kept_b * (kept_a - total), end < N, HINT)
    last: tl.constexpr = (REST - 1) // BLOCK * BLOCK
    for done in tl.range(0, REST, BLOCK, num_stages=STAGES):
        column = last - done + k
        a = read(dy + first + column, column < REST, 0.0, HINT, True)
        b = read(y + first + column, column < REST, 0.0, HINT, True)
        write(dx + first + column, b * (a - total), column < REST, HINT)
