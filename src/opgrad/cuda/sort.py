"""Indices sorted on the device: by the slice that they name and, for one slice, as they come.

A key is (index << BITS) | position, so that keys are unique and their order is the one that sums are taken in. Runs
of keys are sorted by counting, for each key, those that are smaller. Then passes merge FAN runs at a time: a key's
place is the number of smaller keys in all runs of its group, found by binary search. Nothing of this waits for
another program, and every key is handled on its own, so that even 16,384 keys keep the whole device busy.

Triton's own sort takes 2 to 5 seconds to compile for 1,024 keys and leaves most of the device idle: a run is one
program then, of 700 shuffles for each thread in a row. The counting compiles in less than half a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from opgrad.cuda.execute import Launch, Scratch, Space
from opgrad.cuda.regimes import power_of_2

KEY_BITS = 63  # of a signed 64-bit number
OWN = 32  # keys of a program that sorts a run
OTHERS = 64  # keys that it compares them with at a time
NARROW_BITS = 31  # of keys that are kept in 32-bit numbers
SEARCHES = 1024  # of a program that merges: FAN runs for each key
ROWS = 128  # whose starts one program looks for


@dataclass(frozen=True)
class SortPasses:
    """Sorts of up to `keys` keys: how long a run may get by counting, and how many are merged at a time.

    Counting costs a key as many comparisons as its run is long; merging a load for each of the fan * log2(run) steps
    of its searches.
    """

    keys: int
    run: int
    fan: int


# Few keys: each launch costs more than what it does, and one pass merges 16 runs of 1,024. Many keys: a fan of 4
# needs twice the passes of a fan of 16, but half of its steps. Counted, not measured.
PASSES = (SortPasses(1 << 16, 1024, 16), SortPasses(1 << KEY_BITS, 256, 4))


@triton.jit
def slice_of(index, size):
    """The slice that an index names, counted from the front; `size` for an index outside [-size, size)."""
    index = index.to(tl.int64)
    front = tl.where(index < 0, index + size, index)
    return tl.where((index < -size) | (index >= size), size, front)


@triton.jit
def key_of(indices, position, count, size, BITS: tl.constexpr, KEY: tl.constexpr, LARGEST: tl.constexpr):
    """The keys of positions, LARGEST behind the last."""
    inside = position < count
    index = tl.load(indices + position, mask=inside, other=0)
    return tl.where(inside, (slice_of(index, size) << BITS) + position, LARGEST).to(KEY)


@triton.jit
def sort_runs(
    indices, keys, count, size,
    BITS: tl.constexpr, LARGEST: tl.constexpr, RUN: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """keys = those of the indices, every RUN of them sorted; a program finds the places of OWN."""
    KEY: tl.constexpr = keys.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * OWN
    run = first // RUN * RUN
    own = first + tl.arange(0, OWN)
    key = key_of(indices, own, count, size, BITS, KEY, LARGEST)
    before = tl.zeros([OWN, OTHERS], tl.int32)
    for start in range(0, RUN, OTHERS):
        others = key_of(indices, run + start + tl.arange(0, OTHERS), count, size, BITS, KEY, LARGEST)
        before += (others[None, :] < key[:, None]).to(tl.int32)
    tl.store(keys + run + tl.sum(before, axis=1), key, mask=own < count)


@triton.jit
def smaller(keys, length, key, found, longest):
    """How many of `length` sorted keys are smaller than `key`; `longest`, a power of 2, is not below length.

    found: zeros of the shape and dtype of the result.
    """
    stride = tl.cast(longest, found.dtype)
    while stride > 0:
        ahead = found + stride
        inside = ahead <= length
        there = tl.load(keys + ahead - 1, mask=inside, other=0)
        found = tl.where(inside & (there < key), ahead, found)
        stride //= 2
    return found


@triton.jit
def merge_runs(source, destination, count, run, FAN: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    """destination = source with every FAN runs merged into one; a program finds the places of BLOCK keys."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    span = tl.cast(run, tl.int64) * FAN
    group = first // span * span
    own = first + tl.arange(0, BLOCK)
    key = tl.load(source + own, mask=own < count, other=0)
    start = tl.arange(0, FAN).to(PLACE) * run
    length = tl.minimum(tl.maximum(count - group - start, 0), run).to(PLACE)
    found = tl.zeros([FAN, BLOCK], PLACE)
    before = smaller(source + group + start[:, None], length[:, None], key[None, :], found, run)
    tl.store(destination + group + tl.sum(before, axis=0), key, mask=own < count)


@triton.jit
def find_starts(keys, starts, count, size, longest, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """starts[v] = the place of the first key whose slice is v or behind it, for v = 0 .. size."""
    PLACE: tl.constexpr = starts.dtype.element_ty
    v = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = (v << BITS).to(keys.dtype.element_ty)
    found = smaller(keys, count, key, tl.zeros([BLOCK], PLACE), longest)
    tl.store(starts + v, found, mask=v <= size)


@dataclass(frozen=True)
class SortedKeys:
    """The launches that sort indices, and where they leave what they found.

    A key's position is its lowest `bits` bits; starts[v] is the first place of slice v, starts[size] the number of
    valid indices.
    """

    launches: Sequence[Launch]
    keys: Scratch
    starts: Scratch
    bits: int
    passes: int


def sort(operator: str, indices: Any, count: int, size: int, space: Space) -> SortedKeys:
    """Sort at least one index into an axis of `size`; scratch memory is taken from `space`.

    Raises NotImplementedError if a key needs more than 63 bits.
    """
    bits = (count - 1).bit_length()
    needed = size.bit_length() + bits
    if needed > KEY_BITS:
        raise NotImplementedError(
            f"{operator}: {count} indices into an axis of size {size} need keys of {needed} bits, on CUDA they have "
            f"{KEY_BITS}; the CPU sorts without keys"
        )
    number = "int32" if needed <= NARROW_BITS else "int64"
    place = "int32" if count < 1 << 29 else "int64"  # 4 runs of at most that length, end to end, must fit
    plan = next(each for each in PASSES if count <= each.keys)
    passes = 0
    while -(-count // plan.fan**passes) > plan.run:
        passes += 1
    run = power_of_2(-(-count // plan.fan**passes))
    source, destination = space.take(count, number), space.take(count if passes else 0, number)
    given = {"indices": indices, "keys": source, "count": count, "size": size, "BITS": bits}
    own = min(OWN, run)
    largest = (1 << 31 if number == "int32" else 1 << 63) - 1
    arguments = given | {"LARGEST": largest, "RUN": run, "OWN": own, "OTHERS": min(OTHERS, run)}
    launches = [Launch(sort_runs, (triton.cdiv(count, own),), arguments)]
    for _ in range(passes):
        block = min(SEARCHES // plan.fan, run)
        arguments = {"source": source, "destination": destination, "count": count, "run": run}
        constants = {"FAN": plan.fan, "BLOCK": block, "PLACE": tl.int32 if place == "int32" else tl.int64}
        launches.append(Launch(merge_runs, (triton.cdiv(count, block),), arguments | constants))
        source, destination = destination, source
        run *= plan.fan
    starts = space.take(size + 1, place)
    longest = 1 << count.bit_length() - 1
    arguments = given | {"keys": source, "starts": starts, "longest": longest, "BLOCK": ROWS}
    launches.append(Launch(find_starts, (triton.cdiv(size + 1, ROWS),), arguments))
    return SortedKeys(launches, source, starts, bits, passes)
