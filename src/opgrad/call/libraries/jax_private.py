"""What opgrad needs of JAX that JAX does not document, or has under other names in other releases: looked up here once.

If a release lacks a name, this costs the feature that needed it, and the name is in `MISSING`; the import and plain
calls work without any of them.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from opgrad.contract import Spec

_jax: Any = jax  # some of it has no types, and some is not in every release
MISSING: list[str] = []


def _found(path: str, since: tuple[int, int] = (0, 5)) -> Any:
    """The object at this path from `jax` on; if it is missing, None, and the path is recorded.

    since: the first release that has it, for what is new and of no use before.
    """
    found: Any = jax
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None and jax.__version_info__ >= since:
        MISSING.append(f"jax.{path}")
    return found


_Tracer = _found("core.Tracer")
_committed = _found("Array.committed")
# Under shard_map an array's type says over which axes its parts vary.
_typeof = _found("typeof", (0, 7))
_abstract_mesh = _found("sharding.get_abstract_mesh", (0, 7))
_pcast = _found("lax.pcast", (0, 8))
_ManualAxisType = _found("sharding.ManualAxisType", (0, 10))
_auto_axes = _found("sharding.auto_axes", (0, 7))

if MISSING:
    warnings.warn(
        f"opgrad: JAX {jax.__version__} lacks {', '.join(MISSING)}: some calls are slower or refused", stacklevel=2
    )


def is_traced(value: Any) -> bool:
    """Whether a value stands for numbers that are not there yet: inside of jit, grad, vmap and the like."""
    if _Tracer is not None:
        return isinstance(value, _Tracer)
    return isinstance(value, jax.Array) and type(value).__name__ != "ArrayImpl"


def has_float64() -> bool:
    """Whether JAX keeps float64, which it makes float32 of otherwise."""
    return bool(_jax.config.jax_enable_x64)


def is_committed(array: jax.Array) -> bool:
    """Whether an array belongs to its device, to which then results belong, too."""
    return bool(getattr(array, "committed", False))


def type_of(value: Any) -> Any:
    return _typeof(value) if _typeof else None


def varying(value: Any) -> frozenset[Any]:
    """The axes of shard_map over which an array varies; none in releases of JAX that do not check it."""
    kind = type_of(value)
    axes = getattr(getattr(kind, "manual_axis_type", None), "varying", None)  # from 0.10 on
    return frozenset(getattr(kind, "vma", ()) if axes is None else axes)


def has_manual_axes() -> bool:
    """Whether the caller is inside of shard_map."""
    return bool(_abstract_mesh and getattr(_abstract_mesh(), "manual_axes", ()))


def made_varying(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The array as one that varies over these axes, too."""
    found: jax.Array = _pcast(value, axes, to="varying") if _pcast else _jax.lax.pvary(value, axes)
    return found


def kind_of(spec: Spec, like: jax.Array) -> Any:
    """The type of a result that varies as an argument does."""
    axes = varying(like)
    if not axes:
        return _jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    if _ManualAxisType is None:
        return _jax.ShapeDtypeStruct(spec.shape, spec.dtype, vma=axes)
    sharding = sharding_of(type_of(like).sharding.mesh, [None] * len(spec.shape))
    return _jax.ShapeDtypeStruct(
        spec.shape, spec.dtype, manual_axis_type=_ManualAxisType(varying=axes), sharding=sharding
    )


def explicit_sharding(value: Any) -> Any:
    """The sharding that is part of an array's type; None where there is none."""
    sharding = getattr(type_of(value), "sharding", None)
    spec = getattr(sharding, "spec", None)
    return sharding if spec is not None and any(each is not None for each in spec) else None


def automatic(function: Any, out_sharding: Any) -> Any:
    """The function, inside of which XLA decides how to shard."""
    return _auto_axes(function, out_sharding=out_sharding)


def sharding_of(mesh: Any, axes: Sequence[Any]) -> Any:
    return jax.sharding.NamedSharding(mesh, _jax.sharding.PartitionSpec(*axes))
