"""Dropout in kernels: Philox 4x32-10 of each element's index, as `opgrad.ops.reference.random` defines it."""

import triton
import triton.language as tl

MULTIPLIER_A: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLIER_C: tl.constexpr = tl.constexpr(0xCD9E8D57)
KEY_STEP_LOW: tl.constexpr = tl.constexpr(0x9E3779B9)
KEY_STEP_HIGH: tl.constexpr = tl.constexpr(0xBB67AE85)
ROUNDS: tl.constexpr = tl.constexpr(10)


@triton.jit
def lower(number):
    """The lower 32 bits of 64."""
    return number.to(tl.uint32)


@triton.jit
def upper(number):
    """The upper 32 bits of 64."""
    return (number.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)


@triton.jit
def philox(group, seed, offset):
    """The four words for the counter (offset, group) and the key `seed`, each 64 bits, lower half first."""
    low, high = lower(seed).to(tl.uint64), upper(seed).to(tl.uint64)
    a, b = tl.zeros_like(lower(group)) + lower(offset), tl.zeros_like(lower(group)) + upper(offset)
    c, d = lower(group), upper(group)
    for step in tl.static_range(ROUNDS):
        first, second = a.to(tl.uint64) * MULTIPLIER_A, c.to(tl.uint64) * MULTIPLIER_C
        # Keys are added up in 64 bits: the interpreter warns of sums that wrap around.
        a, b = upper(second) ^ b ^ lower(low + step * KEY_STEP_LOW), lower(second)
        c, d = upper(first) ^ d ^ lower(high + step * KEY_STEP_HIGH), lower(first)
    return a, b, c, d


@triton.jit
def word_of(place, seed, offset):
    """The random word of each place, an int64."""
    a, b, c, d = philox(place & -4, seed, offset)
    which = place & 3
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def words_of_neighbours(group, seed, offset):
    """The random words of rows of places, given those that begin groups of four neighbours: [rows, 4 * columns]."""
    a, b, c, d = philox(group, seed, offset)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words, [group.shape[0], 4 * group.shape[1]])
