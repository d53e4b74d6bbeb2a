"""Words of memory, atomics and calls."""

from typing import Any

from llvmlite import ir
from numba.core import types

from opgrad.cpu.compiler import words
from opgrad.cpu.compiler.lowering.operations import BYTES, I1, I8, I32, I64, defines, intrinsic, is_arm, is_x86
from opgrad.cpu.compiler.words import CACHE_LINE


def word_at(builder: Any, address: Any, index: Any, kind: Any, size: int) -> Any:
    offset = builder.add(address, builder.mul(index, I64(size)))
    return builder.inttoptr(offset, kind.as_pointer())


def loads(operation: Any, kind: Any, size: int, result: Any, extend: str | None = None) -> None:
    @defines(operation)
    def _(address: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, a: Any, i: Any) -> Any:
            value = builder.load(word_at(builder, a, i, kind, size))
            return getattr(builder, extend)(value, I64) if extend else value

        return result, emit


def stores(operation: Any, kind: Any, size: int, taken: Any) -> None:
    @defines(operation)
    def _(address: Any, index: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, a: Any, i: Any, x: Any) -> None:
            x = context.cast(builder, x, value, taken)
            if taken is types.int64 and size < 8:
                x = builder.trunc(x, kind)
            builder.store(x, word_at(builder, a, i, kind, size))

        return types.none, emit


loads(words.load_word, I64, 8, types.int64)
loads(words.load_i32, I32, 4, types.int64, "sext")
loads(words.load_u8, I8, 1, types.int64, "zext")
loads(words.load_f64, ir.DoubleType(), 8, types.float64)
stores(words.store_word, I64, 8, types.int64)
stores(words.store_i32, I32, 4, types.int64)
stores(words.store_u8, I8, 1, types.int64)
stores(words.store_f64, ir.DoubleType(), 8, types.float64)


@defines(words.copy_bytes)
def _(target: Any, source: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, to: Any, start: Any, n: Any) -> None:
        addresses = [builder.inttoptr(a, BYTES) for a in (to, start)]
        intrinsic(builder, "llvm.memcpy", ir.VoidType(), [*addresses, n, I1(0)], "p0.p0.i64")

    return types.none, emit


@defines(words.stack_words, literal=True)
def _(count: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral):
        return None

    # Not cgutils.alloca_once, which fills the words with zeros: for the 9,000 of an onnxruntime node's key that takes
    # LLVM 9 s to compile, and each call a microsecond.
    def emit(context: Any, builder: Any, _: Any) -> Any:
        with builder.goto_entry_block():
            block = builder.alloca(ir.ArrayType(I64, count.literal_value))
        block.align = CACHE_LINE
        return builder.ptrtoint(block, I64)

    return types.int64, emit


@defines(words.named_address, literal=True)
def _(name: Any) -> Any:
    if not isinstance(name, types.StringLiteral):
        return None

    def emit(context: Any, builder: Any, _: Any) -> Any:
        symbol, module = name.literal_value, builder.module
        place = module.globals.get(symbol) or ir.GlobalVariable(module, I8, symbol)  # external: the linker knows it
        return builder.ptrtoint(place, I64)

    return types.int64, emit


@defines(words.call_address)
def _(address: Any, *arguments: Any) -> Any:
    def emit(context: Any, builder: Any, function: Any, *values: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * len(values))
        words = [context.cast(builder, v, t, types.int64) for v, t in zip(values, arguments, strict=True)]
        return builder.call(builder.inttoptr(function, kind.as_pointer()), words)

    return types.int64, emit


@defines(words.atomic_load)
def _(address: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(a, I64.as_pointer()), "seq_cst", 8)

    return types.int64, emit


@defines(words.atomic_store)
def _(address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, x: Any) -> None:
        x = context.cast(builder, x, value, types.int64)
        builder.store_atomic(x, builder.inttoptr(a, I64.as_pointer()), "seq_cst", 8)

    return types.none, emit


@defines(words.atomic_add)
def _(address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, x: Any) -> Any:
        x = context.cast(builder, x, value, types.int64)
        return builder.atomic_rmw("add", builder.inttoptr(a, I64.as_pointer()), x, "seq_cst")

    return types.int64, emit


@defines(words.atomic_swap_if)
def _(address: Any, expected: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, old: Any, new: Any) -> Any:
        old, new = (context.cast(builder, v, t, types.int64) for v, t in ((old, expected), (new, value)))
        pair = builder.cmpxchg(builder.inttoptr(a, I64.as_pointer()), old, new, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean, emit


@defines(words.spin_hint)
def _() -> Any:
    def emit(context: Any, builder: Any) -> None:
        if is_x86():
            intrinsic(builder, "llvm.x86.sse2", ir.VoidType(), [], "pause")
        elif is_arm():
            intrinsic(builder, "llvm.aarch64", ir.VoidType(), [I32(1)], "hint")  # yield

    return types.none, emit


@defines(words.store_fence)
def _() -> Any:
    def emit(context: Any, builder: Any) -> None:
        if is_x86():
            intrinsic(builder, "llvm.x86.sse", ir.VoidType(), [], "sfence")
        else:
            builder.fence("release", "singlethread")  # no instruction: there, stores of all kinds obey the same order

    return types.none, emit
