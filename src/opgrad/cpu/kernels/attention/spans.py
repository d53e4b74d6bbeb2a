"""The table of spans, of queries that see some keys, from lengths or from where sequences start."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.compiler.words import store_word
from opgrad.cpu.kernels.attention.tiles import SPAN


@inline
def _report(status, position: int, number: int) -> None:
    store_word(status, 0, 1)
    store_word(status, 1, position)
    store_word(status, 2, number)


@kernel
def spans_of_lengths(batch, queries, keys, lengths: Pointer, spans, status):
    """A span for each batch entry: all queries see so many keys. Reports the first length outside of [0, keys]."""
    for entry in range(batch):
        length = v.load_one(lengths, entry)
        if length < 0 or length > keys:
            _report(status, entry, length)
            break
        store_word(spans, SPAN * entry, 0)
        store_word(spans, SPAN * entry + 1, queries)
        store_word(spans, SPAN * entry + 2, 0)
        store_word(spans, SPAN * entry + 3, length)


@inline
def _starts(starts, count: int, length: int, spans, word: int) -> int:
    """Write where sequences start and end, from a word of each span on; the first wrong position, or -1."""
    before = 0
    for place in range(count + 1):
        start = v.load_one(starts, place)
        if start < before or start > length:
            return place
        if place < count:
            store_word(spans, SPAN * place + word, start)
        if place:
            store_word(spans, SPAN * (place - 1) + word + 1, start)
        before = start
    return -1


@kernel
def spans_of_sequences(count, queries, keys, q: Pointer, k: Pointer, spans, status):
    """A span for each sequence.

    Reports the first start that is smaller than the one before it or larger than the length, those of keys behind all
    those of queries.
    """
    wrong = _starts(q, count, queries, spans, 0)
    if wrong >= 0:
        _report(status, wrong, v.load_one(q, wrong))
    else:
        wrong = _starts(k, count, keys, spans, 2)
        if wrong >= 0:
            _report(status, count + 1 + wrong, v.load_one(k, wrong))
