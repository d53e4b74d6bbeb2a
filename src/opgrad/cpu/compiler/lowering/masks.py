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


def _element(builder: Any, address: Any, kind: ir.VectorType, lane: Any) -> Any:
    return builder.gep(builder.bitcast(address, kind.element.as_pointer()), [lane])


def _load(builder: Any, address: Any, kind: ir.VectorType, mask: Any) -> Any:
    arguments = [builder.bitcast(address, kind.as_pointer()), I32(1), mask, ir.Constant(kind, None)]
    return intrinsic(builder, "llvm.masked.load", kind, arguments, f"{mangled(kind)}.p0")


def _store(builder: Any, value: Any, address: Any, mask: Any) -> None:
    arguments = [value, builder.bitcast(address, value.type.as_pointer()), I32(1), mask]
    intrinsic(builder, "llvm.masked.store", ir.VoidType(), arguments, f"{mangled(value.type)}.p0")
