"""Defines, for each operation of opgrad.cpu.compiler.simd and opgrad.cpu.compiler.words, its Numba type and LLVM code.

A `@defines(operation)` function takes the Numba types of the arguments and returns the type of the result with a
function that emits the LLVM instructions. Where the first argument's type decides, `@emits(operation, result)`
decorates the function that emits them.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, builtin_registry, signature
from numba.extending import lower_builtin, models, register_model

from opgrad.cpu.compiler.target import ARM, architecture, host, vector_lanes

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
BYTES = I8.as_pointer()

# dtype in memory -> (type of an element in memory, its size in bytes)
STORAGE = {
    "float64": (ir.DoubleType(), 8),
    "float32": (ir.FloatType(), 4),
    "float16": (ir.HalfType(), 2),
    "bfloat16": (I16, 2),
    "int64": (I64, 8),
    "int32": (I32, 4),
    "int16": (I16, 2),
    "int32_number": (I32, 4),
    "int8": (I8, 1),
    "uint8": (I8, 1),
    "bool": (I8, 1),
    "float8_e5m2": (I8, 1),
    "float8_e4m3fn": (I8, 1),
}
INDICES = ("int64", "int32", "int16")  # kernels compute with these as integers, with all others as floats
ELEMENT = {"f32": ir.FloatType(), "f64": ir.DoubleType(), "i16": I16, "i32": I32, "i64": I64, "i1": I1}
SCALAR = {"f32": types.float32, "f64": types.float64, "i32": types.int64, "i64": types.int64}


class PointerType(types.Type):
    """A pointer to elements of dtype `storage`.

    Kernels compute in `element` (f32, f64, i32, i64), `lanes` at a time; as many as `vector_lanes` says if it is 0.
    """

    def __init__(self, storage: str, precision: int, lanes: int = 0):
        self.storage = storage
        self.element = ("i" if storage in INDICES else "f") + str(precision)
        self.bits = precision
        self.lanes = lanes or vector_lanes(f"float{precision}")
        self.memory, self.size = STORAGE[storage]
        super().__init__(f"Pointer({storage}, {precision}, {self.lanes})")


class VectorType(types.Type):
    """`lanes` numbers of kind f32, f64, i32, i64, or i1 (a mask)."""

    def __init__(self, element: str, lanes: int):
        self.element, self.lanes, self.bits = element, lanes, int(element[1:])
        self.llvm = ir.VectorType(ELEMENT[element], lanes)
        super().__init__(f"Vector({element}, {lanes})")

    def of(self, element: str) -> "VectorType":
        return VectorType(element, self.lanes)

    def word(self) -> "VectorType":
        """Integers as wide."""
        return self.of(f"i{self.bits}")


@register_model(PointerType)
class PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: PointerType):
        super().__init__(manager, kind, BYTES)


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType):
        super().__init__(manager, kind, kind.llvm)


DEFINITIONS: dict[Any, list[Callable[..., Any]]] = {}


def defines(operation: Callable[..., Any], literal: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give `operation` its typing and its code.

    The decorated function takes the arguments' types and returns (result type, emit(context, builder, *values)),
    or None where it does not apply; an operation may have several.
    """

    def register(define: Callable[..., Any]) -> Callable[..., Any]:
        if operation not in DEFINITIONS:
            _register_operation(operation, literal)
        DEFINITIONS.setdefault(operation, []).append(define)
        return define

    return register


# What an argument is cast to, beside a type: an element of the first argument's vectors, or such a number for Numba.
LANE, NUMBER = "lane", "number"


def emits(
    operation: Callable[..., Any], result: Any, *casts: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give `operation` the code that emit(builder, kind, *values) makes; kind: the type of the first argument.

    result: the type of the result, or the function that gives it for `kind`. casts: of each argument behind the first
    one the type to which it is cast, LANE, NUMBER, or None.
    """

    def register(emit: Callable[..., Any]) -> Callable[..., Any]:
        @defines(operation)
        def _(kind: Any = None, *kinds: Any) -> Any:
            def code(context: Any, builder: Any, *values: Any) -> Any:
                others = zip_longest(values[1:], kinds, casts)
                return emit(builder, kind, *values[:1], *(_cast(context, builder, kind, *other) for other in others))

            return result if isinstance(result, types.Type) else result(kind), code

        return emit

    return register


def _cast(context: Any, builder: Any, kind: Any, value: Any, given: Any, wanted: Any) -> Any:
    if wanted is None:
        return value
    if wanted == LANE:
        return element_of(context, builder, value, given, kind.element)
    return context.cast(builder, value, given, SCALAR[kind.element] if wanted == NUMBER else wanted)


def element_of(context: Any, builder: Any, value: Any, kind: Any, element: str) -> Any:
    """A number of Numba type `kind` as an LLVM scalar for lanes of `element`."""
    number = context.cast(builder, value, kind, SCALAR[element])
    return builder.trunc(number, I32) if element == "i32" else number


def definition(operation: Callable[..., Any], kinds: Any) -> Any:
    return next((found for define in DEFINITIONS[operation] if (found := define(*kinds)) is not None), None)


def _register_operation(operation: Callable[..., Any], literal: bool) -> None:
    class Template(AbstractTemplate):
        key = operation
        prefer_literal = literal

        def generic(self, args: Any, kws: Any) -> Any:
            found = definition(operation, args)
            return found and signature(found[0], *args)

    builtin_registry.register_global(operation, types.Function(Template))

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = definition(operation, sig.args)[1](context, builder, *values)
        return context.get_dummy_value() if sig.return_type == types.none else code

    lower_builtin(operation, types.VarArg(types.Any))(emit)


def same(kind: Any) -> Any:
    """The result's type where it is the first argument's."""
    return kind


def constant(kind: VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind.llvm, [value] * kind.lanes)


def integers(kind: VectorType, values: Any) -> ir.Constant:
    return ir.Constant(kind.llvm, list(values))


def splat(builder: Any, lanes: int, value: Any) -> Any:
    """A vector with the value in each of so many lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    return shuffled(builder, builder.insert_element(undefined, value, I32(0)), undefined, [0] * lanes)


def shuffled(builder: Any, a: Any, b: Any, pick: Sequence[int]) -> Any:
    """The vector of these lanes of two vectors, those of the second counted on behind those of the first."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(pick)), list(pick)))


def lanes_of(builder: Any, v: Any, pick: Sequence[int]) -> Any:
    """The vector of these lanes of a vector."""
    return shuffled(builder, v, ir.Constant(v.type, ir.Undefined), pick)


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
    return architecture() in ("x86_64", "i686", "amd64")


def is_arm() -> bool:
    return architecture() in ARM


def has(feature: str) -> bool:
    return "+" + feature in host()[1].split(",")


def at(builder: Any, p: PointerType, base: Any, i: Any, kind: Any) -> Any:
    """The address of element i, typed for a load or store of `kind`."""
    offset = builder.mul(i, I64(p.size))
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())
