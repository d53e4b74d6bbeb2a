"""Loads and stores of the lanes that a mask names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from opgrad.cpu.compiler.lowering.operations import (
    I1,
    I32,
    VectorType,
    has,
    integers,
    intrinsic,
    is_x86,
    mangled,
    splat,
)

WORD = 4  # bytes: AVX2 has no instruction that masks anything smaller


def masked_load(builder: Any, address: Any, kind: ir.VectorType, size: int, mask: Any) -> Any:
    """The elements of `size` bytes for which the mask holds; 0 elsewhere, where memory is not touched."""
    if not _in_words(size):
        return _load(builder, address, kind, mask)
    words, whole, single = _parts(builder, kind.count, size, mask)
    found = builder.bitcast(_load(builder, address, words, whole), kind)
    lanes, so_far = VectorType("i32", kind.count), cgutils.alloca_once_value(builder, found)
    with _each_lane(builder, single) as lane:
        one = builder.load(_element(builder, address, kind, lane), align=1)
        here = builder.icmp_signed("==", integers(lanes, range(kind.count)), splat(builder, kind.count, lane))
        builder.store(builder.select(here, splat(builder, kind.count, one), builder.load(so_far)), so_far)
    return builder.load(so_far)


def masked_store(builder: Any, value: Any, address: Any, size: int, mask: Any) -> None:
    """Write the elements of `size` bytes for which the mask holds; elsewhere memory is not touched."""
    if not _in_words(size):
        _store(builder, value, address, mask)
        return
    words, whole, single = _parts(builder, value.type.count, size, mask)
    _store(builder, builder.bitcast(value, words), address, whole)
    with _each_lane(builder, single) as lane:
        one = builder.extract_element(value, lane)
        builder.store(one, _element(builder, address, value.type, lane), align=1)


def load_first(builder: Any, addresses: list[Any], kind: ir.VectorType, size: int, count: Any) -> list[Any]:
    """The first `count` elements at each address, at least one and not all, and 0 behind them.

    Where masks take long, the elements are loaded in pieces of 1, 2, 4 …, of which each moves those before it up.
    """
    if _masks_at_once(size, loads=True):
        mask = _first(builder, kind.count, count)
        return [_load(builder, address, kind, mask) for address in addresses]
    values = [ir.Constant(kind, None) for _ in addresses]
    for piece in _pieces(kind.count):
        up = [*range(kind.count, kind.count + piece), *range(kind.count - piece)]
        before, skipped = builder.block, values
        with _if_counted(builder, count, piece):
            begin, part = builder.and_(count, count.type(-2 * piece)), ir.VectorType(kind.element, piece)
            loaded = [
                _widened(builder, builder.load(_element(builder, address, part, begin, part), align=1), kind.count)
                for address in addresses
            ]
            pairs = zip(values, loaded, strict=True)
            taken = [builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, len(up)), up)) for pair in pairs]
            inside = builder.block
        values = joined(builder, kind, [(skipped, before), (taken, inside)])
    return values


def store_first(builder: Any, values: list[Any], addresses: list[Any], size: int, count: Any) -> None:
    """Write the first `count` elements of each value to its address, at least one and not all.

    Where masks take long, as the stores of AMD's processors before Zen 5 do, they are written in pieces of …, 4, 2, 1.
    """
    kind = values[0].type
    if _masks_at_once(size, loads=False):
        mask = _first(builder, kind.count, count)
        for value, address in zip(values, addresses, strict=True):
            _store(builder, value, address, mask)
        return
    undefined = ir.Constant(kind, ir.Undefined)
    for piece in reversed(_pieces(kind.count)):
        before, skipped = builder.block, values
        with _if_counted(builder, count, piece):
            begin = builder.and_(count, count.type(-2 * piece))
            low = ir.Constant(ir.VectorType(I32, piece), list(range(piece)))
            down = ir.Constant(ir.VectorType(I32, kind.count), [*range(piece, kind.count), *range(piece)])
            taken = []
            for value, address in zip(values, addresses, strict=True):
                stored = builder.shuffle_vector(value, undefined, low)
                builder.store(stored, _element(builder, address, kind, begin, stored.type), align=1)
                taken.append(builder.shuffle_vector(value, undefined, down))
            inside = builder.block
        values = joined(builder, kind, [(skipped, before), (taken, inside)])


def joined(builder: Any, kind: Any, found: list[tuple[list[Any], Any]]) -> list[Any]:
    """The values of that list whose block has led here."""
    values = [builder.phi(kind) for _ in found[0][0]]
    for those, block in found:
        for value, incoming in zip(values, those, strict=True):
            value.add_incoming(incoming, block)
    return values


def _masks_at_once(size: int, loads: bool) -> bool:
    """Whether a masked load, or store, of elements of this size is one short instruction."""
    return is_x86() and has("avx512bw" if size < WORD else "avx2" if loads else "avx512f")


def _first(builder: Any, lanes: int, count: Any) -> Any:
    limit = splat(builder, lanes, builder.trunc(count, I32))
    return builder.icmp_signed("<", integers(VectorType("i32", lanes), range(lanes)), limit)


def _pieces(lanes: int) -> list[int]:
    return [1 << bit for bit in range(lanes.bit_length() - 1)]


def _if_counted(builder: Any, count: Any, piece: int) -> Any:
    """A block that is executed if a count has a piece of so many elements."""
    return builder.if_then(builder.icmp_signed("!=", builder.and_(count, count.type(piece)), count.type(0)))


def _widened(builder: Any, part: Any, lanes: int) -> Any:
    """A vector of which the first lanes are those of the part."""
    pick = [*range(part.type.count), *[0] * (lanes - part.type.count)]
    return builder.shuffle_vector(part, part, ir.Constant(ir.VectorType(I32, lanes), pick))


def _in_words(size: int) -> bool:
    """Whether elements of this size are moved by words of four bytes, and by themselves where a word is incomplete.

    LLVM would test each lane and jump: 16 times for a vector with AVX2, each time with a copy of the loop's rest behind
    it.
    """
    return size < WORD and is_x86() and not has("avx512bw")


def _parts(builder: Any, lanes: int, size: int, mask: Any) -> tuple[ir.VectorType, Any, Any]:
    """The type of the vector as words, which words the mask holds whole, and the other lanes that it holds, as bits."""
    words = ir.VectorType(I32, lanes * size // WORD)
    elements = ir.VectorType(ir.IntType(8 * size), lanes)
    filled = builder.bitcast(builder.sext(mask, elements), words)
    whole = builder.icmp_signed("==", filled, ir.Constant(words, [-1] * words.count))
    in_whole = builder.bitcast(builder.sext(whole, words), elements)
    in_whole = builder.icmp_signed("!=", in_whole, ir.Constant(elements, None))
    single = builder.bitcast(builder.and_(mask, builder.not_(in_whole)), ir.IntType(lanes))
    return words, whole, builder.zext(single, I32) if lanes < 32 else single


@contextmanager
def _each_lane(builder: Any, bits: Any) -> Iterator[Any]:
    """A loop over the lanes whose bits are set, of which it yields the number.

    At the end of a row there is at most one such lane in elements of two bytes, and three in those of one.
    """
    before = builder.block
    begin, body, end = (builder.append_basic_block(name) for name in ("lanes", "lane", "lanes.end"))
    builder.branch(begin)
    builder.position_at_end(begin)
    left = builder.phi(I32)
    builder.cbranch(builder.icmp_unsigned("!=", left, I32(0)), body, end)
    builder.position_at_end(body)
    yield intrinsic(builder, "llvm.cttz", I32, [left, I1(1)])
    left.add_incoming(bits, before)
    left.add_incoming(builder.and_(left, builder.sub(left, I32(1))), builder.block)
    builder.branch(begin)
    builder.position_at_end(end)


def _element(builder: Any, address: Any, kind: ir.VectorType, lane: Any, part: Any = None) -> Any:
    """The address of an element of a vector, or of the part that begins with it."""
    element = builder.gep(builder.bitcast(address, kind.element.as_pointer()), [lane])
    return builder.bitcast(element, part.as_pointer()) if part else element


def _load(builder: Any, address: Any, kind: ir.VectorType, mask: Any) -> Any:
    arguments = [builder.bitcast(address, kind.as_pointer()), I32(1), mask, ir.Constant(kind, None)]
    return intrinsic(builder, "llvm.masked.load", kind, arguments, f"{mangled(kind)}.p0")


def _store(builder: Any, value: Any, address: Any, mask: Any) -> None:
    arguments = [value, builder.bitcast(address, value.type.as_pointer()), I32(1), mask]
    intrinsic(builder, "llvm.masked.store", ir.VoidType(), arguments, f"{mangled(value.type)}.p0")
