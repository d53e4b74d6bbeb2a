"""Words, atomics and calls through addresses in compiled code; a structure is its address, a field a word behind it."""

import ctypes
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AttributeTemplate, builtin_registry
from numba.extending import lower_getattr_generic, lower_setattr_generic, models, register_model, typeof_impl

from opgrad.cpu.compiler import words
from opgrad.cpu.compiler.lowering.operations import BYTES, I1, I8, I32, I64, defines, emits, intrinsic, is_arm, is_x86
from opgrad.cpu.compiler.words import CACHE_LINE


def word_at(builder: Any, address: Any, index: Any, kind: Any, size: int) -> Any:
    offset = builder.add(address, builder.mul(index, I64(size)))
    return builder.inttoptr(offset, kind.as_pointer())


def loads(operation: Any, kind: Any, size: int, result: Any, extend: str | None = None) -> None:
    @emits(operation, result)
    def _(builder: Any, _: Any, a: Any, i: Any) -> Any:
        value = builder.load(word_at(builder, a, i, kind, size))
        return getattr(builder, extend)(value, I64) if extend else value


def stores(operation: Any, kind: Any, size: int, taken: Any) -> None:
    @emits(operation, types.none, None, taken)
    def _(builder: Any, _: Any, a: Any, i: Any, x: Any) -> None:
        value = builder.trunc(x, kind) if taken is types.int64 and size < 8 else x
        builder.store(value, word_at(builder, a, i, kind, size))


loads(words.load_word, I64, 8, types.int64)
loads(words.load_i32, I32, 4, types.int64, "sext")
loads(words.load_u8, I8, 1, types.int64, "zext")
loads(words.load_f64, ir.DoubleType(), 8, types.float64)
stores(words.store_word, I64, 8, types.int64)
stores(words.store_i32, I32, 4, types.int64)
stores(words.store_u8, I8, 1, types.int64)
stores(words.store_f64, ir.DoubleType(), 8, types.float64)


@emits(words.copy_bytes, types.none)
def _(builder: Any, _: Any, target: Any, source: Any, n: Any) -> None:
    addresses = [builder.inttoptr(a, BYTES) for a in (target, source)]
    intrinsic(builder, "llvm.memcpy", ir.VoidType(), [*addresses, n, I1(0)], "p0.p0.i64")


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


@emits(words.atomic_load, types.int64)
def _(builder: Any, _: Any, a: Any) -> Any:
    return builder.load_atomic(builder.inttoptr(a, I64.as_pointer()), "seq_cst", 8)


@emits(words.atomic_store, types.none, types.int64)
def _(builder: Any, _: Any, a: Any, x: Any) -> None:
    builder.store_atomic(x, builder.inttoptr(a, I64.as_pointer()), "seq_cst", 8)


@emits(words.atomic_add, types.int64, types.int64)
def _(builder: Any, _: Any, a: Any, x: Any) -> Any:
    return builder.atomic_rmw("add", builder.inttoptr(a, I64.as_pointer()), x, "seq_cst")


@emits(words.atomic_swap_if, types.boolean, types.int64, types.int64)
def _(builder: Any, _: Any, a: Any, old: Any, new: Any) -> Any:
    pair = builder.cmpxchg(builder.inttoptr(a, I64.as_pointer()), old, new, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 1)


@emits(words.spin_hint, types.none)
def _(builder: Any, _: Any) -> None:
    if is_x86():
        intrinsic(builder, "llvm.x86.sse2", ir.VoidType(), [], "pause")
    elif is_arm():
        intrinsic(builder, "llvm.aarch64", ir.VoidType(), [I32(1)], "hint")  # yield


@emits(words.store_fence, types.none)
def _(builder: Any, _: Any) -> None:
    if is_x86():
        intrinsic(builder, "llvm.x86.sse", ir.VoidType(), [], "sfence")
    else:
        builder.fence("release", "singlethread")  # no instruction: there, stores of all kinds obey the same order


class ClassType(types.Dummy):
    """A class of structures, as a value."""

    def __init__(self, kind: type[words.Structure]):
        self.kind = kind
        super().__init__(f"Class({kind.__module__}.{kind.__qualname__})")


class StructureType(types.Type):
    """A structure of a class."""

    def __init__(self, kind: type[words.Structure]):
        self.kind = kind
        super().__init__(f"Structure({kind.__module__}.{kind.__qualname__})")

    def field(self, name: str) -> Any:
        """The number of the word that a field is."""
        return I64(self.kind._fields.index(name))


@register_model(StructureType)
class StructureModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: StructureType):
        super().__init__(manager, kind, I64)


register_model(ClassType)(models.OpaqueModel)


@typeof_impl.register(type(ctypes.Structure))
def _(kind: Any, context: Any) -> Any:
    return ClassType(kind) if issubclass(kind, words.Structure) else None


@defines(words.at)
def _(kind: Any, address: Any, number: Any = None) -> Any:
    def emit(context: Any, builder: Any, _: Any, base: Any, *numbers: Any) -> Any:
        size = I64(8 * len(kind.kind._fields))
        return builder.add(base, builder.mul(numbers[0], size)) if numbers else base

    return StructureType(kind.kind), emit


@emits(words.behind, types.int64)
def _(builder: Any, found: Any, base: Any) -> Any:
    return builder.add(base, I64(8 * len(found.kind._fields)))


@defines(words.place, literal=True)
def _(found: Any, field: Any) -> Any:
    if not isinstance(field, types.StringLiteral):
        return None

    def emit(context: Any, builder: Any, base: Any, _: Any) -> Any:
        return builder.add(base, builder.mul(found.field(field.literal_value), I64(8)))

    return types.int64, emit


@builtin_registry.register_attr
class _Fields(AttributeTemplate):  # type: ignore[misc, valid-type]
    key = StructureType

    def generic_resolve(self, found: StructureType, name: str) -> Any:
        return types.int64 if name == "address" or name in found.kind._fields else None


@lower_getattr_generic(StructureType)
def _(context: Any, builder: Any, found: Any, value: Any, name: str) -> Any:
    return value if name == "address" else builder.load(word_at(builder, value, found.field(name), I64, 8))


@lower_setattr_generic(StructureType)
def _(context: Any, builder: Any, signature: Any, values: Any, name: str) -> None:
    target, value = values
    builder.store(value, word_at(builder, target, signature.args[0].field(name), I64, 8))
