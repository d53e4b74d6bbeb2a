"""Structures in compiled code: a structure is its address, and a field a word behind it."""

import ctypes
from typing import Any

from numba.core import types
from numba.extending import lower_getattr_generic, lower_setattr_generic, models, register_model, typeof_impl

from opgrad.cpu.compiler import structures
from opgrad.cpu.compiler.lowering.numba_private import AttributeTemplate, builtin_registry
from opgrad.cpu.compiler.lowering.operations import I64, defines
from opgrad.cpu.compiler.lowering.words import word_at


class ClassType(types.Dummy):
    """A class of structures, as a value."""

    def __init__(self, kind: type[structures.Structure]):
        self.kind = kind
        super().__init__(f"Class({kind.__module__}.{kind.__qualname__})")


class StructureType(types.Type):
    """A structure of a class."""

    def __init__(self, kind: type[structures.Structure]):
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
    return ClassType(kind) if issubclass(kind, structures.Structure) else None


@defines(structures.at)
def _(kind: Any, address: Any, number: Any = None) -> Any:
    def emit(context: Any, builder: Any, _: Any, base: Any, *numbers: Any) -> Any:
        size = I64(8 * len(kind.kind._fields))
        return builder.add(base, builder.mul(numbers[0], size)) if numbers else base

    return StructureType(kind.kind), emit


@defines(structures.behind)
def _(found: Any) -> Any:
    return types.int64, lambda context, builder, base: builder.add(base, I64(8 * len(found.kind._fields)))


@defines(structures.place, literal=True)
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
