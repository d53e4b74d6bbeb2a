"""Dropout and its gradient. Philox 4x32-10 of an element's index decides, as `opgrad.ops.reference.dropout` defines it.

The four words of an evaluation belong to neighbouring elements. Words are the lower halves of 64-bit lanes, so that a
multiplication gives both halves of a product; upper halves may hold anything.
"""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import elementwise, mapped, write_same

LOW: Final = 0xFFFFFFFF
SIGN: Final = 0x80000000
MULTIPLIER_A, MULTIPLIER_C = 0xD2511F53, 0xCD9E8D57
KEY_STEP_LOW, KEY_STEP_HIGH = 0x9E3779B9, 0xBB67AE85


@inline
def _round(words, key: int, number: int):
    """One round; its key is that of the evaluation plus `number` steps."""
    a, b, c, d = words
    low = key + number * KEY_STEP_LOW & LOW
    high = (key >> 32) + number * KEY_STEP_HIGH & LOW
    first_product, second_product = v.word_product(a, MULTIPLIER_A), v.word_product(c, MULTIPLIER_C)
    return (second_product >> 32) ^ b ^ low, second_product, (first_product >> 32) ^ d ^ high, first_product


@inline
def philox_words(group: Vector, seed: int, offset: int):
    """Philox 4x32-10 for the counters (offset, group) and the key `seed`, each 64 bits, lower half first."""
    words = v.like(group, offset), v.like(group, offset >> 32), group, group >> 32
    # Ten calls, since LLVM leaves a loop as it is, with its keys spread over a vector in each round: 2.5 times as slow.
    words = _round(_round(words, seed, 0), seed, 1)
    words = _round(_round(words, seed, 2), seed, 3)
    words = _round(_round(words, seed, 4), seed, 5)
    words = _round(_round(words, seed, 6), seed, 7)
    return _round(_round(words, seed, 8), seed, 9)


@inline
def _decisions(values, words: Vector, threshold: int) -> Vector:
    # The comparison is one of signed numbers: with the sign turned over on both sides it is that of unsigned ones.
    return v.select((words ^ SIGN) > threshold - SIGN, v.full(values, 1.0), v.full(values, 0.0))


@inline
def _store_inside(values, count: int, i: int, kept: Vector) -> None:
    """Write the lanes for elements i, i + 1, … of a run that belong to it."""
    if i >= 0 and i + v.lanes(values) <= count:
        v.store(values, i, kept)
    else:
        v.store_masked(values, i, kept, v.first(values, count - i) ^ v.first(values, -i))


@inline
def keep_run(values, count: int, index: int, seed: int, offset: int, threshold: int) -> None:
    """values[i] = 1 if the word of element index + i is larger than `threshold`, else 0; i < count."""
    w, i = v.lanes(values), -(index & 3)
    group = v.progression(values, index + i, 4)
    while i < count:
        a, b, c, d = philox_words(group, seed, offset)
        _store_inside(values, count, i, _decisions(values, v.interleave_words(a, b, c, d), threshold))
        group = group + w
        i += w


BLOCK: Final = 1 << 12  # elements whose mask is still in the first-level cache when it is read again


@inline
def _kept(x: Vector, mask: Vector, scale: float) -> Vector:
    return v.select(mask != 0.0, x * scale, 0.0)


write_kept, write_true = mapped(_kept), mapped(lambda x: v.like(x, 1.0))
GRADIENT, WHOLE_GRADIENT = elementwise(_kept), elementwise(lambda dy, unused: dy)


@kernel
def drop(units: Units, n, x: Pointer, seed: Pointer, y: Pointer, mask: Pointer, threshold, scale: Float, stream):
    """A unit is a block of elements; the mask is written first."""
    for unit in units:
        begin = unit * BLOCK
        count = min(BLOCK, n - begin)
        keep_run(mask + begin, count, begin, v.load_one(seed, 0), 0, threshold)
        write_kept(y + begin, 0, count, stream, (x + begin, mask + begin), (scale,))


@kernel
def keep_all(units: Units, n, x: Pointer, y: Pointer, mask: Pointer, stream):
    for unit in units:
        begin, end = unit * BLOCK, min((unit + 1) * BLOCK, n)
        write_same(y, begin, end, stream, (x,), ())
        write_true(mask, begin, end, stream, (x,), ())
