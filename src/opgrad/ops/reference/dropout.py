"""Dropout as an attribute of softmax, and its decisions: Philox 4x32-10 of an element's index alone.

Philox is a function of a 128-bit counter and a 64-bit key, not a state (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). Here the key is the seed; the counter's lower half is the offset and its upper half the
element's index with its last two bits cleared, which choose one of the four words that come out. These are the words
of PyTorch's CUDA engine philox_engine(seed, subsequence, offset), whose offset counts groups of four words, too, and
whose subsequence, there a thread, is the upper half.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor, prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from opgrad.contract import integer, number, shown
from opgrad.contract.signature import record

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
BLOCK = 1 << 16  # elements at a time: what is in work fits into the cache

Words = NDArray[np.uint64]


def philox_4x32(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """The four words of Philox 4x32-10, in uint64 arrays.

    counter: four arrays of 32-bit words that broadcast to one shape, the lowest first. key: two words, the lower first.
    """
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    half, mask = np.uint64(32), np.uint64(WORD)
    for step in range(ROUNDS):
        low, high = (np.uint64((word + step * by) & WORD) for word, by in zip(key, KEY_STEPS, strict=True))
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (second >> half) ^ b ^ low, second & mask
        c, d = (first >> half) ^ d ^ high, first & mask
    return a, b, c, d


def philox(indices: Any, seed: int, offset: int) -> NDArray[np.uint32]:
    """The random word of each element: word `index & 3` of Philox 4x32-10 for the counter (offset, index & ~3).

    indices: integers of any shape, the elements' places. seed: the key. offset: the lower half of the counter; of both
    the lowest 64 bits count.

    Returns a uint32 array of the shape of `indices`.
    """
    index = np.asarray(indices).astype(np.uint64)
    group = index & ~np.uint64(3)
    counter = (offset & WORD, offset >> 32 & WORD, group & np.uint64(WORD), group >> np.uint64(32))
    words = philox_4x32(counter, (seed & WORD, seed >> 32 & WORD))
    return np.choose((index & np.uint64(3)).astype(np.intp), words).astype(np.uint32)


def keep_threshold(probability: float) -> int:
    """The largest word that is dropped, where probability is not 0; see `keep_mask`."""
    return floor(WORD * probability)


def kept_scale(probability: float) -> float:
    """What dropout multiplies the elements with that it keeps; 0 where it keeps none."""
    return 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)


def keep_mask(shape: tuple[int, ...], probability: float, seed: int, offset: int) -> NDArray[np.bool_]:
    """Which elements dropout keeps, as bool: those whose word is above floor((2^32 - 1) * probability).

    shape: of the result; elements are counted in C order. probability: how likely an element is dropped, from 0 (none
    is) to 1 (all are). seed, offset: see `philox`. Raises ValueError for a probability outside of [0, 1].
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"keep_mask: probability is {probability}, expected a number from 0 to 1")
    size = prod(shape)
    if probability == 0:
        return np.ones(shape, np.bool_)
    kept = np.empty(size, np.bool_)
    threshold = np.uint32(keep_threshold(probability))
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        kept[begin:end] = philox(np.arange(begin, end), seed, offset) > threshold
    return kept.reshape(shape)


@record("seed", "offset")
@dataclass(eq=False, slots=True)
class Dropout:
    """Each element is dropped with this probability, by its own decision; the others are divided by 1 - probability.

    probability: from 0 (nothing is dropped) to 1 (all are, which gives 0). seed, offset: 64-bit integers. An element's
    decision depends on them and on its place in C order alone, not on layout, threads or device. Calls with the same
    seed and offset decide alike: give each call its own. mask: also return which elements were kept, as bool.

    Raises TypeError for a probability that is no number, a seed or an offset that is no int; ValueError for values
    outside these ranges. Random numbers are those of Philox-4x32-10 (`opgrad.ops.reference.dropout`).
    """

    probability: float
    seed: int = 0
    offset: int = 0
    mask: bool = False
    # Seed and offset as kernels read them: another array for others, so that a call that runs keeps its own. Native
    # code finds it in the object.
    words: NDArray[np.int64] = field(init=False, repr=False)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # seeds change: no key of a plan

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _CHECKS[name](value) if name in _CHECKS else value)
        if name in ("seed", "offset"):
            self.words = np.array((self.seed, getattr(self, "offset", 0)), np.int64)


def _probability(value: Any) -> float:
    found = number("Dropout: probability", value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"Dropout: probability is {found}, expected 0 to 1")
    return found


def _mask(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"Dropout: mask is {shown(value)}, expected a bool")
    return value


def _word(name: str, value: Any) -> int:
    """A 64-bit integer in the range of int64; the upper half of uint64 stands for the negative ones."""
    found = integer(f"Dropout: {name}", value, beyond=2**64)
    return found - 2**64 if found >= 2**63 else found


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "probability": _probability,
    "seed": functools.partial(_word, "seed"),
    "offset": functools.partial(_word, "offset"),
    "mask": _mask,
}
