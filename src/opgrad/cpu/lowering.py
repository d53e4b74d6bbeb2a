"""What the words of `opgrad.cpu.simd` and `opgrad.cpu.memory` mean: their Numba types and LLVM code.

Imported only when something has to be compiled. Each `@defines(word)` function takes the Numba types of
the arguments and returns the result's type with a function that emits the LLVM instructions.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, builtin_registry, signature
from numba.extending import overload, register_jitable, register_model

from opgrad.cpu import math, memory, native, simd

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
BYTES = I8.as_pointer()
CACHE_LINE = 64

# dtype in memory -> (type of an element in memory, its size in bytes)
STORAGE = {
    "float64": (ir.DoubleType(), 8),
    "float32": (ir.FloatType(), 4),
    "float16": (ir.HalfType(), 2),
    "bfloat16": (I16, 2),
    "int64": (I64, 8),
    "int32": (I32, 4),
}
ELEMENT = {"f32": ir.FloatType(), "f64": ir.DoubleType(), "i32": I32, "i64": I64, "i1": I1}
SCALAR = {"f32": types.float32, "f64": types.float64, "i32": types.int64, "i64": types.int64}


class PointerType(types.Type):
    """Address of elements of `storage`; computing happens in `element` (f32, f64 or i32, i64), `lanes` at a time."""

    def __init__(self, storage: str, precision: int):
        self.storage = storage
        self.element = ("i" if storage.startswith("int") else "f") + str(precision)
        self.bits = precision
        self.lanes = native.vector_lanes(f"float{precision}")
        self.memory, self.size = STORAGE[storage]
        super().__init__(f"Pointer({storage}, {precision}, {self.lanes})")


class VectorType(types.Type):
    """`lanes` numbers of kind f32, f64, i32, i64, or i1 (a mask)."""

    def __init__(self, element: str, lanes: int):
        self.element, self.lanes = element, lanes
        self.llvm = ir.VectorType(ELEMENT[element], lanes)
        super().__init__(f"Vector({element}, {lanes})")

    def of(self, element: str) -> "VectorType":
        return VectorType(element, self.lanes)


@register_model(PointerType)
class PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: PointerType):
        super().__init__(manager, kind, BYTES)


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType):
        super().__init__(manager, kind, kind.llvm)


DEFINITIONS: dict[Any, list[Callable[..., Any]]] = {}


def defines(word: Callable[..., Any], literal: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give `word` its typing and its code.

    The decorated function takes the arguments' types and returns (result type, emit(context, builder, *values)),
    or None where it does not apply; a word may have several.
    """

    def register(define: Callable[..., Any]) -> Callable[..., Any]:
        if word not in DEFINITIONS:
            _register_word(word, literal)
        DEFINITIONS.setdefault(word, []).append(define)
        return define

    return register


def _definition(word: Callable[..., Any], kinds: Any) -> Any:
    return next((found for define in DEFINITIONS[word] if (found := define(*kinds)) is not None), None)


def _register_word(word: Callable[..., Any], literal: bool) -> None:
    class Template(AbstractTemplate):
        key = word
        prefer_literal = literal

        def generic(self, args: Any, kws: Any) -> Any:
            found = _definition(word, args)
            return found and signature(found[0], *args)

    builtin_registry.register_global(word, types.Function(Template))

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _definition(word, sig.args)[1](context, builder, *values)
        return context.get_dummy_value() if sig.return_type == types.none else code

    lower_builtin(word, types.VarArg(types.Any))(emit)


# --- LLVM helpers -------------------------------------------------------------------------------------------


def constant(kind: VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind.llvm, [value] * kind.lanes)


def integers(kind: VectorType, values: Any) -> ir.Constant:
    return ir.Constant(kind.llvm, list(values))


def splat(builder: Any, kind: VectorType, value: Any) -> Any:
    undefined = ir.Constant(kind.llvm, ir.Undefined)
    one = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, kind.lanes), [0] * kind.lanes))


def mangled(kind: Any) -> str:
    """How LLVM spells a type inside the name of an intrinsic."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{mangled(kind.element)}"
    names = {ir.FloatType: "f32", ir.DoubleType: "f64", ir.HalfType: "f16"}
    return names.get(type(kind)) or f"i{kind.width}"


def intrinsic(builder: Any, name: str, result: Any, arguments: list[Any], suffix: str = "") -> Any:
    """Call the LLVM intrinsic `name`, with `suffix` or the result's type appended to the name."""
    full = f"{name}.{suffix or mangled(result)}"
    kind = ir.FunctionType(result, [a.type for a in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, full)
    return builder.call(function, arguments)


def is_x86() -> bool:
    return llvm.get_process_triple().startswith(("x86_64", "i686", "amd64"))


def has(feature: str) -> bool:
    return "+" + feature in native.host()[1].split(",")


def at(builder: Any, p: PointerType, base: Any, i: Any, kind: Any) -> Any:
    """The address of element i, typed for a load or store of `kind`."""
    offset = builder.mul(i, I64(p.size))
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


# --- conversion between memory and the precision of the computation ---------------------------------------


def half_to_float(builder: Any, h: Any, lanes: int) -> Any:
    """float16 bits to float32 without F16C: move the bits and multiply by 2**112, which also scales denormals."""
    word = VectorType("i32", lanes)
    number = VectorType("f32", lanes)
    wide = builder.zext(h, word.llvm)
    magnitude = builder.and_(wide, constant(word, 0x7FFF))
    sign = builder.shl(builder.and_(wide, constant(word, 0x8000)), constant(word, 16))
    shifted = builder.bitcast(builder.shl(magnitude, constant(word, 13)), number.llvm)
    scaled = builder.bitcast(builder.fmul(shifted, constant(number, 2.0**112)), word.llvm)
    special = builder.icmp_unsigned(">=", magnitude, constant(word, 0x7C00))
    scaled = builder.select(special, builder.or_(scaled, constant(word, 0x7F800000)), scaled)
    return builder.bitcast(builder.or_(scaled, sign), number.llvm)


def float_to_half(builder: Any, v: Any, lanes: int) -> Any:
    """float32 to float16 bits without F16C, to nearest even."""
    word, number = VectorType("i32", lanes), VectorType("f32", lanes)
    bits = builder.bitcast(v, word.llvm)
    magnitude = builder.and_(bits, constant(word, 0x7FFFFFFF))
    sign = builder.lshr(builder.and_(bits, constant(word, 0x80000000)), constant(word, 16))
    odd = builder.and_(builder.lshr(magnitude, constant(word, 13)), constant(word, 1))
    rebiased = builder.add(builder.add(magnitude, constant(word, 0x100000000 - (112 << 23) + 0xFFF)), odd)
    normal = builder.lshr(rebiased, constant(word, 13))
    # Adding 0.5 leaves a float16 denormal's bits at the bottom of the mantissa, rounded by the addition.
    moved = builder.fadd(builder.bitcast(magnitude, number.llvm), constant(number, 0.5))
    denormal = builder.sub(builder.bitcast(moved, word.llvm), constant(word, 126 << 23))
    nan = builder.icmp_unsigned(">", magnitude, constant(word, 0x7F800000))
    infinite = builder.select(nan, constant(word, 0x7E00), constant(word, 0x7C00))
    small = builder.icmp_unsigned("<", magnitude, constant(word, 113 << 23))
    large = builder.icmp_unsigned(">=", magnitude, constant(word, 143 << 23))
    result = builder.select(large, infinite, builder.select(small, denormal, normal))
    return builder.trunc(builder.or_(result, sign), ir.VectorType(I16, lanes))


def float_to_bfloat(builder: Any, v: Any, lanes: int) -> Any:
    """float32 to bfloat16 bits, to nearest even; the CPU's own instruction would flush denormals."""
    word = VectorType("i32", lanes)
    bits = builder.bitcast(v, word.llvm)
    odd = builder.and_(builder.lshr(bits, constant(word, 16)), constant(word, 1))
    rounded = builder.add(builder.add(bits, constant(word, 0x7FFF)), odd)
    nan = builder.fcmp_unordered("uno", v, v)
    quiet = builder.or_(bits, constant(word, 0x400000))
    result = builder.lshr(builder.select(nan, quiet, rounded), constant(word, 16))
    return builder.trunc(result, ir.VectorType(I16, lanes))


def to_odd_float(builder: Any, v: Any, lanes: int) -> Any:
    """float64 to float32 rounded to odd, so that a second rounding to 16 bits gives the value rounded once."""
    word, number, double = (VectorType(e, lanes) for e in ("i32", "f32", "f64"))
    near = builder.fptrunc(v, number.llvm)
    back = builder.fpext(near, double.llvm)
    bits = builder.bitcast(near, word.llvm)
    even = builder.icmp_unsigned("==", builder.and_(bits, constant(word, 1)), constant(word, 0))
    inexact = builder.and_(builder.fcmp_ordered("one", v, back), even)
    magnitude = [intrinsic(builder, "llvm.fabs", double.llvm, [x]) for x in (v, back)]
    larger = builder.fcmp_ordered(">", *magnitude)
    step = builder.select(larger, constant(word, 1), constant(word, -1))
    return builder.bitcast(builder.select(inexact, builder.add(bits, step), bits), number.llvm)


def widen(builder: Any, p: PointerType, v: Any, lanes: int) -> Any:
    """Elements as they stand in memory to the precision of the computation."""
    target = ir.VectorType(ELEMENT[p.element], lanes)
    if p.storage == "bfloat16":
        word = VectorType("i32", lanes)
        v = builder.bitcast(
            builder.shl(builder.zext(v, word.llvm), constant(word, 16)), ir.VectorType(ir.FloatType(), lanes)
        )
    elif p.storage == "float16":
        if is_x86() and not has("f16c"):
            v = half_to_float(builder, builder.bitcast(v, ir.VectorType(I16, lanes)), lanes)
        else:
            v = builder.fpext(v, ir.VectorType(ir.FloatType(), lanes))
    elif p.element == "i32":
        return builder.trunc(v, target)
    elif p.element == "i64":
        return builder.sext(v, target)
    return builder.fpext(v, target) if v.type.element == ir.FloatType() else v


def narrow(builder: Any, p: PointerType, v: Any, lanes: int) -> Any:
    """From the precision of the computation to elements as they stand in memory, rounded once."""
    if p.storage in ("float64", "float32"):
        target = ir.VectorType(p.memory, lanes)
        if v.type.element == p.memory:
            return v
        return builder.fptrunc(v, target) if p.storage == "float32" else builder.fpext(v, target)
    if v.type.element == ir.DoubleType():
        v = to_odd_float(builder, v, lanes)
    if p.storage == "bfloat16":
        return float_to_bfloat(builder, v, lanes)
    if is_x86() and not has("f16c"):
        return builder.bitcast(float_to_half(builder, v, lanes), ir.VectorType(ir.HalfType(), lanes))
    return builder.fptrunc(v, ir.VectorType(ir.HalfType(), lanes))


# --- loads and stores ----------------------------------------------------------------------------------------


def vector_of(p: PointerType) -> VectorType:
    return VectorType(p.element, p.lanes)


@defines(simd.lanes)
def _(p: Any) -> Any:
    return types.int64, lambda context, builder, base: I64(p.lanes)


@defines(operator.add)
def _(p: Any, i: Any) -> Any:
    if not isinstance(p, PointerType) or not isinstance(i, types.Integer):
        return None

    def emit(context: Any, builder: Any, base: Any, offset: Any) -> Any:
        return builder.gep(base, [builder.mul(context.cast(builder, offset, i, types.int64), I64(p.size))])

    return p, emit


@defines(simd.load)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        address = at(builder, p, base, i, ir.VectorType(p.memory, p.lanes))
        return widen(builder, p, builder.load(address, align=1), p.lanes)

    return vector_of(p), emit


@defines(simd.load_masked)
def _(p: Any, i: Any, mask: Any, fill: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, mask: Any, fill_value: Any) -> Any:
        kind = ir.VectorType(p.memory, p.lanes)
        address = at(builder, p, base, i, kind)
        zero = ir.Constant(kind, None)
        loaded = intrinsic(
            builder, "llvm.masked.load", kind, [address, I32(1), mask, zero], f"{mangled(kind)}.p0"
        )
        wide = widen(builder, p, loaded, p.lanes)
        other = splat(builder, vector_of(p), element_of(context, builder, fill_value, fill, p.element))
        return builder.select(mask, wide, other)

    return vector_of(p), emit


@defines(simd.load_one)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        one = ir.VectorType(p.memory, 1)
        value = builder.load(at(builder, p, base, i, one), align=1)
        wide = builder.extract_element(widen(builder, p, value, 1), I32(0))
        return builder.sext(wide, I64) if p.element == "i32" else wide

    return SCALAR[p.element], emit


@defines(simd.store)
def _(p: Any, i: Any, v: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, v: Any) -> None:
        value = narrow(builder, p, v, p.lanes)
        builder.store(value, at(builder, p, base, i, value.type), align=1)

    return types.none, emit


@defines(simd.store_streaming)
def _(p: Any, i: Any, v: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, v: Any) -> None:
        value = narrow(builder, p, v, p.lanes)
        aligned = min(CACHE_LINE, p.lanes * p.size)
        instruction = builder.store(value, at(builder, p, base, i, value.type), align=aligned)
        instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))

    return types.none, emit


@defines(simd.store_masked)
def _(p: Any, i: Any, v: Any, mask: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, v: Any, mask: Any) -> None:
        value = narrow(builder, p, v, p.lanes)
        address = at(builder, p, base, i, value.type)
        suffix = f"{mangled(value.type)}.p0"
        intrinsic(builder, "llvm.masked.store", ir.VoidType(), [value, address, I32(1), mask], suffix)

    return types.none, emit


@defines(simd.store_one)
def _(p: Any, i: Any, x: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, value: Any) -> None:
        number = context.cast(builder, value, x, SCALAR[p.element])
        if p.element[0] == "i":
            whole = builder.trunc(number, p.memory) if p.size < 8 else number
            builder.store(whole, at(builder, p, base, i, p.memory), align=1)
            return
        one = ir.VectorType(ELEMENT[p.element], 1)
        vector = builder.insert_element(ir.Constant(one, ir.Undefined), number, I32(0))
        stored = narrow(builder, p, vector, 1)
        builder.store(stored, at(builder, p, base, i, stored.type), align=1)

    return types.none, emit


@defines(simd.to_line)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        address = builder.ptrtoint(builder.gep(base, [builder.mul(i, I64(p.size))]), I64)
        bytes_left = builder.and_(builder.neg(address), I64(CACHE_LINE - 1))
        whole = builder.icmp_unsigned("==", builder.urem(bytes_left, I64(p.size)), I64(0))
        return builder.select(whole, builder.udiv(bytes_left, I64(p.size)), I64(-1))

    return types.int64, emit


@defines(simd.address_of)
def _(p: Any) -> Any:
    return types.int64, lambda context, builder, base: builder.ptrtoint(base, I64)


@defines(simd.prefetch)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> None:
        start = builder.gep(base, [builder.mul(i, I64(p.size))])
        read, keep_in_l2, data = I32(0), I32(2), I32(1)
        for line in range(0, p.lanes * p.size, CACHE_LINE):
            address = builder.gep(start, [I64(line)])
            intrinsic(builder, "llvm.prefetch", ir.VoidType(), [address, read, keep_in_l2, data], "p0")

    return types.none, emit


# --- making vectors --------------------------------------------------------------------------------------------


@defines(simd.full)
def _(p: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, x: Any) -> Any:
        return splat(builder, vector_of(p), element_of(context, builder, x, value, p.element))

    return vector_of(p), emit


@defines(simd.number)
def _(p: Any, value: Any) -> Any:
    return SCALAR[p.element], lambda context, builder, base, x: context.cast(builder, x, value, SCALAR[p.element])


@defines(simd.first)
def _(p: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, count: Any) -> Any:
        word = VectorType("i32", p.lanes)
        small = builder.icmp_signed("<", count, I64(p.lanes))
        limit = builder.trunc(builder.select(small, count, I64(p.lanes)), I32)
        negative = builder.icmp_signed("<", count, I64(0))
        limit = splat(builder, word, builder.select(negative, I32(0), limit))
        return builder.icmp_signed("<", integers(word, range(p.lanes)), limit)

    return VectorType("i1", p.lanes), emit


@defines(simd.index)
def _(p: Any, i: Any) -> Any:
    kind = VectorType(f"i{p.bits}", p.lanes)

    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        start = builder.trunc(i, I32) if p.bits == 32 else i
        return builder.add(splat(builder, kind, start), integers(kind, range(p.lanes)))

    return kind, emit


def element_of(context: Any, builder: Any, value: Any, kind: Any, element: str) -> Any:
    """A number of Numba type `kind` as an LLVM scalar for lanes of `element`."""
    number = context.cast(builder, value, kind, SCALAR[element])
    return builder.trunc(number, I32) if element == "i32" else number


# --- arithmetic -------------------------------------------------------------------------------------------------


def lifted(word: Any, result: Callable[[VectorType], VectorType], emit_pair: Callable[..., Any]) -> None:
    """Define a binary operator for vector and vector, vector and number, number and vector."""

    @defines(word)
    def _(a: Any, b: Any) -> Any:
        kind = a if isinstance(a, VectorType) else b
        if not isinstance(kind, VectorType):
            return None

        def operand(context: Any, builder: Any, value: Any, of: Any) -> Any:
            if isinstance(of, VectorType):
                return value
            return splat(builder, kind, element_of(context, builder, value, of, kind.element))

        def emit(context: Any, builder: Any, x: Any, y: Any) -> Any:
            x, y = operand(context, builder, x, a), operand(context, builder, y, b)
            return emit_pair(builder, kind, x, y)

        return result(kind), emit


def same(kind: VectorType) -> VectorType:
    return kind


def mask_of(kind: VectorType) -> VectorType:
    return kind.of("i1")


def arithmetic(real: str, whole: str) -> Callable[..., Any]:
    return lambda builder, kind, x, y: getattr(builder, real if kind.element[0] == "f" else whole)(x, y)


def comparison(sign: str) -> Callable[..., Any]:
    def emit(builder: Any, kind: VectorType, x: Any, y: Any) -> Any:
        if kind.element[0] != "f":
            return builder.icmp_signed(sign, x, y)
        return builder.fcmp_unordered(sign, x, y) if sign == "!=" else builder.fcmp_ordered(sign, x, y)

    return emit


lifted(operator.add, same, arithmetic("fadd", "add"))
lifted(operator.sub, same, arithmetic("fsub", "sub"))
lifted(operator.mul, same, arithmetic("fmul", "mul"))
lifted(operator.truediv, same, arithmetic("fdiv", "sdiv"))
lifted(operator.and_, same, lambda builder, kind, x, y: builder.and_(x, y))
lifted(operator.or_, same, lambda builder, kind, x, y: builder.or_(x, y))
for word, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    lifted(getattr(operator, word), mask_of, comparison(sign))


def _maximum(builder: Any, kind: VectorType, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


lifted(simd.maximum, same, _maximum)


@defines(operator.neg)
def _(v: Any) -> Any:
    return (v, lambda context, builder, x: builder.fneg(x)) if isinstance(v, VectorType) else None


@defines(operator.invert)
def _(v: Any) -> Any:
    return (v, lambda context, builder, x: builder.not_(x)) if isinstance(v, VectorType) else None


@defines(simd.fma)
def _(a: Any, b: Any, c: Any) -> Any:
    kind = next(t for t in (a, b, c) if isinstance(t, VectorType))

    def emit(context: Any, builder: Any, *values: Any) -> Any:
        operands = [
            x if isinstance(t, VectorType) else splat(builder, kind, element_of(context, builder, x, t, kind.element))
            for x, t in zip(values, (a, b, c), strict=True)
        ]
        return intrinsic(builder, "llvm.fma", kind.llvm, operands)

    return kind, emit


@defines(simd.select)
def _(mask: Any, a: Any, b: Any) -> Any:
    kind = a if isinstance(a, VectorType) else b

    def emit(context: Any, builder: Any, m: Any, x: Any, y: Any) -> Any:
        operands = [
            v if isinstance(t, VectorType) else splat(builder, kind, element_of(context, builder, v, t, kind.element))
            for v, t in ((x, a), (y, b))
        ]
        return builder.select(m, *operands)

    return kind, emit


def unary(word: Any, name: str) -> None:
    @defines(word)
    def _(v: Any) -> Any:
        return v, lambda context, builder, x: intrinsic(builder, name, v.llvm, [x])


unary(simd.round_even, "llvm.rint")
unary(simd.absolute, "llvm.fabs")


@defines(simd.copy_sign)
def _(v: Any, sign: Any) -> Any:
    return v, lambda context, builder, x, s: intrinsic(builder, "llvm.copysign", v.llvm, [x, s])


# --- powers of two -----------------------------------------------------------------------------------------------

MANTISSA = {"f32": 23, "f64": 52}
BIAS = {"f32": 127, "f64": 1023}
SQRT_HALF = {"f32": 0x3F3504F3, "f64": 0x3FE6A09E667F3BCD}


def _power(builder: Any, v: VectorType, n: Any) -> Any:
    """2**n for integer lanes n inside the normal range."""
    word = v.of("i" + v.element[1:])
    biased = builder.add(n, constant(word, BIAS[v.element]))
    return builder.bitcast(builder.shl(biased, constant(word, MANTISSA[v.element])), v.llvm)


@defines(simd.scale_by_power)
def _(v: Any, n: Any) -> Any:
    word = v.of("i" + v.element[1:])
    bits = int(v.element[1:])

    def halves(builder: Any, x: Any, n: Any) -> Any:
        """Two multiplications, so that neither power leaves the normal range and denormals are rounded."""
        whole = builder.fptosi(n, word.llvm)
        half = builder.ashr(whole, constant(word, 1))
        x = builder.fmul(x, _power(builder, v, half))
        return builder.fmul(x, _power(builder, v, builder.sub(whole, half)))

    def scalef(builder: Any, x: Any, n: Any) -> Any:
        """AVX-512's one instruction for it, on registers of 512 bits."""
        lanes = 512 // bits
        part = ir.VectorType(ELEMENT[v.element], lanes)
        suffix = "ps.512" if bits == 32 else "pd.512"
        every = ir.Constant(ir.IntType(lanes), -1)
        current_rounding = I32(4)
        pieces = []
        for start in range(0, v.lanes, lanes):
            pick = ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
            a, b = (builder.shuffle_vector(t, ir.Constant(v.llvm, ir.Undefined), pick) for t in (x, n))
            arguments = [a, b, ir.Constant(part, None), every, current_rounding]
            pieces.append(intrinsic(builder, "llvm.x86.avx512.mask.scalef", part, arguments, suffix))
        join = ir.Constant(ir.VectorType(I32, v.lanes), list(range(v.lanes)))
        return builder.shuffle_vector(*pieces, join)

    use_scalef = has("avx512f") and v.lanes * bits == 1024
    return v, lambda context, builder, x, n: (scalef if use_scalef else halves)(builder, x, n)


def _split(builder: Any, v: VectorType, x: Any) -> tuple[Any, Any]:
    """(exponent as integer lanes, mantissa in [sqrt(1/2), sqrt(2)))."""
    word = v.of("i" + v.element[1:])
    bits = builder.bitcast(x, word.llvm)
    above = builder.sub(bits, constant(word, SQRT_HALF[v.element]))
    exponent = builder.ashr(above, constant(word, MANTISSA[v.element]))
    mantissa = builder.sub(bits, builder.shl(exponent, constant(word, MANTISSA[v.element])))
    return exponent, builder.bitcast(mantissa, v.llvm)


@defines(simd.exponent_of)
def _(v: Any) -> Any:
    return v, lambda context, builder, x: builder.sitofp(_split(builder, v, x)[0], v.llvm)


@defines(simd.mantissa_of)
def _(v: Any) -> Any:
    return v, lambda context, builder, x: _split(builder, v, x)[1]


# --- across lanes --------------------------------------------------------------------------------------------------


def fold(builder: Any, v: VectorType, x: Any, combine: Callable[..., Any]) -> Any:
    """Combine the upper half with the lower half until one lane is left."""
    lanes = v.lanes
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(x.type, ir.Undefined)
        index = ir.VectorType(I32, lanes)
        low = builder.shuffle_vector(x, undefined, ir.Constant(index, list(range(lanes))))
        high = builder.shuffle_vector(x, undefined, ir.Constant(index, list(range(lanes, 2 * lanes))))
        x = combine(builder, v, low, high)
    return builder.extract_element(x, I32(0))


@defines(simd.reduce_add)
def _(v: Any) -> Any:
    return SCALAR[v.element], lambda context, builder, x: fold(builder, v, x, arithmetic("fadd", "add"))


@defines(simd.reduce_max)
def _(v: Any) -> Any:
    return SCALAR[v.element], lambda context, builder, x: fold(builder, v, x, _maximum)


@defines(simd.any_of)
def _(mask: Any) -> Any:
    def emit(context: Any, builder: Any, m: Any) -> Any:
        bits = builder.bitcast(m, ir.IntType(mask.lanes))
        return builder.icmp_unsigned("!=", bits, ir.IntType(mask.lanes)(0))

    return types.boolean, emit


# --- memory words ----------------------------------------------------------------------------------------------------


def word_at(builder: Any, address: Any, index: Any, kind: Any, size: int) -> Any:
    offset = builder.add(address, builder.mul(index, I64(size)))
    return builder.inttoptr(offset, kind.as_pointer())


def loads(word: Any, kind: Any, size: int, result: Any, extend: str | None = None) -> None:
    @defines(word)
    def _(address: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, a: Any, i: Any) -> Any:
            value = builder.load(word_at(builder, a, i, kind, size))
            return getattr(builder, extend)(value, I64) if extend else value

        return result, emit


def stores(word: Any, kind: Any, size: int, taken: Any) -> None:
    @defines(word)
    def _(address: Any, index: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, a: Any, i: Any, x: Any) -> None:
            x = context.cast(builder, x, value, taken)
            if taken is types.int64 and size < 8:
                x = builder.trunc(x, kind)
            builder.store(x, word_at(builder, a, i, kind, size))

        return types.none, emit


loads(memory.load_word, I64, 8, types.int64)
loads(memory.load_i32, I32, 4, types.int64, "sext")
loads(memory.load_u8, I8, 1, types.int64, "zext")
loads(memory.load_f64, ir.DoubleType(), 8, types.float64)
stores(memory.store_word, I64, 8, types.int64)
stores(memory.store_i32, I32, 4, types.int64)
stores(memory.store_u8, I8, 1, types.int64)
stores(memory.store_f64, ir.DoubleType(), 8, types.float64)


@defines(memory.copy_bytes)
def _(target: Any, source: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, to: Any, start: Any, n: Any) -> None:
        addresses = [builder.inttoptr(a, BYTES) for a in (to, start)]
        intrinsic(builder, "llvm.memcpy", ir.VoidType(), [*addresses, n, I1(0)], "p0.p0.i64")

    return types.none, emit


@defines(memory.stack_words, literal=True)
def _(count: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral):
        return None

    def emit(context: Any, builder: Any, _: Any) -> Any:
        block = cgutils.alloca_once(builder, ir.ArrayType(I64, count.literal_value))
        block.align = CACHE_LINE
        return builder.ptrtoint(block, I64)

    return types.int64, emit


@defines(memory.call_address)
def _(address: Any, *arguments: Any) -> Any:
    def emit(context: Any, builder: Any, function: Any, *values: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * len(values))
        words = [context.cast(builder, v, t, types.int64) for v, t in zip(values, arguments, strict=True)]
        return builder.call(builder.inttoptr(function, kind.as_pointer()), words)

    return types.int64, emit


@defines(memory.atomic_load)
def _(address: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(a, I64.as_pointer()), "seq_cst", 8)

    return types.int64, emit


@defines(memory.atomic_store)
def _(address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, x: Any) -> None:
        x = context.cast(builder, x, value, types.int64)
        builder.store_atomic(x, builder.inttoptr(a, I64.as_pointer()), "seq_cst", 8)

    return types.none, emit


@defines(memory.atomic_add)
def _(address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, x: Any) -> Any:
        x = context.cast(builder, x, value, types.int64)
        return builder.atomic_rmw("add", builder.inttoptr(a, I64.as_pointer()), x, "seq_cst")

    return types.int64, emit


@defines(memory.atomic_swap_if)
def _(address: Any, expected: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, old: Any, new: Any) -> Any:
        old, new = (context.cast(builder, v, t, types.int64) for v, t in ((old, expected), (new, value)))
        pair = builder.cmpxchg(builder.inttoptr(a, I64.as_pointer()), old, new, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean, emit


def instruction(word: Any, text: dict[bool, str]) -> None:
    """Define a word as one instruction without operands, on x86 (True) and elsewhere (False)."""

    @defines(word)
    def _() -> Any:
        def emit(context: Any, builder: Any) -> None:
            builder.asm(ir.FunctionType(ir.VoidType(), []), text[is_x86()], "~{memory}", [], side_effect=True)

        return types.none, emit


instruction(memory.spin_hint, {True: "pause", False: "yield"})
instruction(memory.store_fence, {True: "sfence", False: ""})


# --- from a Python function to a module ---------------------------------------------------------------------------

OPTIONS = {"error_model": "numpy", "boundscheck": False, "nogil": True}

INLINED = {"forceinline": True, "error_model": "numpy", "boundscheck": False}


def _choose(helper: Callable[..., Any]) -> None:
    @overload(helper, strict=False, jit_options=INLINED)
    def _(*arguments: Any) -> Any:
        kind = next(a for a in arguments if isinstance(a, VectorType))
        return helper(int(kind.element[1:]))


def register_helpers() -> None:
    """Make the helpers known that were marked since the last call."""
    while native.INLINE:
        register_jitable(**INLINED)(native.INLINE.pop())
    while native.CHOOSE:
        _choose(native.CHOOSE.pop())


def argument_types(function: Callable[..., Any], dtypes: list[str]) -> list[Any]:
    """The Numba types of a kernel's parameters after `part`, given the dtypes of its pointers in order."""
    precision = 64 if "float64" in dtypes else 32
    pointers = iter(dtypes)
    kinds = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.annotation == simd.Pointer:
            kinds.append(PointerType(next(pointers), precision))
        else:
            kinds.append(types.float64 if parameter.annotation == simd.Float else types.int64)
    return kinds


def unpack(kinds: list[Any]) -> Callable[..., Any]:
    """A word that reads a tuple of these types from consecutive 8-byte words."""

    def read(address: int) -> Any:
        raise TypeError

    @defines(read)
    def _(address: Any) -> Any:
        result = types.Tuple(kinds)

        def emit(context: Any, builder: Any, a: Any) -> Any:
            values = [
                builder.load(word_at(builder, a, I64(i), context.get_value_type(kind), 8))
                for i, kind in enumerate(kinds)
            ]
            return context.make_tuple(builder, result, values)

        return result, emit

    return read


def _task(function: Callable[..., Any], dtypes: list[str]) -> Any:
    compute = numba.njit(forceinline=True, **OPTIONS)(function)
    read, fence = unpack(argument_types(function, dtypes)), memory.store_fence

    def task(arguments: int, part: int) -> int:
        compute(part, *read(arguments))
        fence()
        return 0

    return numba.cfunc(types.int64(types.int64, types.int64), **OPTIONS)(task)


def _native(function: Callable[..., Any], count: int) -> Any:
    return numba.cfunc(types.int64(*[types.int64] * count), **OPTIONS)(function)


def module(function: Callable[..., Any], form: str, entry: str) -> Any:
    """The optimised LLVM module of `function` as a task or a native function (`form`), exported as `entry`."""
    register_helpers()
    kind, _, inside = form.rstrip(")").partition("(")
    if kind == "task":
        compiled = _task(function, [name for name in inside.split(",") if name])
    else:
        compiled = _native(function, int(inside))
    parsed = llvm.parse_assembly(compiled.inspect_llvm())
    parsed.get_function(compiled.native_name).name = entry
    return parsed
