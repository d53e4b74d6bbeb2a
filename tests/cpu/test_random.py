"""Philox and dropout's decisions: known answers, every index, the kernel against NumPy."""

import numpy as np
import pytest
from guards import Placed
from tasks import run_task

from opgrad.cpu.compiler.decorators import kernel
from opgrad.cpu.compiler.simd import Pointer
from opgrad.cpu.kernels.dropout import keep_run
from opgrad.ops.reference.dropout import keep_mask, keep_threshold, philox, philox_4x32

WORD = 0xFFFFFFFF
# Known answers of Random123 for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# Decisions of oneDNN 3.13.2: probability, seed, offset, which of 40 elements are kept.
DECISIONS = [
    (0.25, 843921, 1238976, "1110011111010110110110011010111101110111"),
    (0.5, 12345678, 1, "0001000101101101100100100111010011000111"),
]
SEEDS = [(0, 0), (843921, 1238976), (-1, -(2**40) + 3), (2**63 - 12345, 2**62 + 2**32), (-(2**63), 1)]


@kernel
def keep(values: Pointer, count, index, seed, offset, threshold):
    keep_run(values, count, index, seed, offset, threshold)


def by_kernel(dtype, count, index, seed, offset, threshold, begin=0):
    """The decisions of a run, whose surroundings must stay as they are."""
    guarded = Placed((begin + count + 3,), dtype)
    guarded.array[:] = 7
    values = guarded.array[begin : begin + count]
    words = [guarded.array[begin:].ctypes.data, count, index, seed, offset, threshold]
    run_task(keep.task([values.dtype.name]), words)
    assert guarded.untouched()
    assert (guarded.array[:begin] == 7).all()
    assert (guarded.array[begin + count :] == 7).all()
    return values


def expected(count, index, seed, offset, threshold):
    return philox(np.arange(index, index + count), seed, offset) > threshold


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(int(word) for word in philox_4x32(counter, key)) == words


@pytest.mark.parametrize(("probability", "seed", "offset", "kept"), DECISIONS)
def test_known_decisions(probability, seed, offset, kept):
    wanted = [c == "1" for c in kept]
    assert keep_mask((40,), probability, seed, offset).tolist() == wanted
    assert keep_mask((2, 4, 5), probability, seed, offset).ravel().tolist() == wanted
    for dtype in ("float32", "float64"):
        assert by_kernel(dtype, 40, 0, seed, offset, keep_threshold(probability)).tolist() == wanted


def test_index_seed_and_offset_stand_in_their_places():
    seed, offset, index = 0x299F31D0_A4093822, 0x85A308D3_243F6A88, 0x03707344_13198A2C
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2C, 0x03707344)
    words = [int(word) for word in philox_4x32(counter, (0xA4093822, 0x299F31D0))]
    assert [int(philox(index + i, seed, offset)) for i in range(4)] == words
    assert philox(np.arange(8).reshape(2, 4), 0, 0).shape == (2, 4)
    assert [int(word) for word in philox(np.arange(4), 0, 0)] == list(KNOWN[0][2])


def test_ends_of_probability():
    assert keep_mask((3, 5), 0, 1, 2).all()
    assert not keep_mask((1000,), 1, 1, 2).any()
    assert keep_mask((0, 3), 0.5, 1, 2).shape == (0, 3)
    with pytest.raises(ValueError, match=r"keep_mask: probability is 1.5, expected a number from 0 to 1"):
        keep_mask((3,), 1.5, 1, 2)
    with pytest.raises(ValueError, match="probability is nan"):
        keep_mask((3,), float("nan"), 1, 2)


def test_seeds_and_offsets_count_modulo_64_bits():
    e = np.arange(10)
    np.testing.assert_array_equal(philox(e, -1, -2), philox(e, 2**64 - 1, 2**64 - 2))
    assert (philox(e, 1, 2) != philox(e, 1 + 2**33, 2)).any()
    assert (philox(e, 1, 2) != philox(e, 1, 2 + 2**33)).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("seed", "offset"), SEEDS)
def test_kernel_on_neighbours(dtype, seed, offset):
    for index in (0, 1, 2, 3, 2**32 - 6, 2**32, 2**40 + 1, 2**62 + 3):
        for count in (*range(12), 31, 32, 33, 70):
            given = by_kernel(dtype, count, index, seed, offset, 2**31, begin=count % 5)
            np.testing.assert_array_equal(given, expected(count, index, seed, offset, 2**31))


def test_thresholds_are_unsigned():
    words = philox(np.arange(1000), 1, 2)
    for threshold in (0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, int(words[3]), int(words[3]) - 1):
        given = by_kernel("float32", 200, 0, 1, 2, threshold)
        np.testing.assert_array_equal(given, words[:200] > threshold)
