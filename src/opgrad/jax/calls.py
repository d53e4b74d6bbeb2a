"""An operator on JAX arrays that hold no numbers yet, or lie on several devices: a call that XLA makes by itself.

XLA's FFI calls native code with the addresses of its buffers (`handler`). Where structures of the FFI are not as they
are known here, `jax.pure_callback` takes its place, which goes through Python.
"""

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from opgrad.base.locks import settling
from opgrad.call import arrays
from opgrad.call.libraries import jax_arrays, jax_private
from opgrad.contract import DTYPES, Operator, Spec
from opgrad.contract.signature import prepare
from opgrad.cpu.compiler import INTERPRETING
from opgrad.jax.registry import Called, handler_address, in_name_of, known
from opgrad.ops import operators
from opgrad.ops.reference.primitive import STATE

T = TypeVar("T")
_jax: Any = jax  # some of it has no types, and some is not in every release
TARGET = "opgrad_run"
ERRORS = (TypeError, ValueError, NotImplementedError)  # the exceptions of operators
Aliases = dict[int, int]  # from the number of an argument to that of the result in its memory


def call(op: Operator, given: Mapping[str, Any], attributes: Mapping[str, Any], name: str = "") -> tuple[Array, ...]:
    """The results of an operator, in order: at once for arrays that hold numbers, else as part of what is traced.

    given: JAX arrays by parameter name, None for those left out. name: what errors call the operator; "": its name.
    Raises what the checks of shapes, dtypes and attributes raise; what depends on traced numbers, XLA raises.
    """
    values = {each: _array(array) for each, array in given.items() if array is not None}
    try:
        # Calls in general, and attention with both of its results, have no public function.
        if op.kind in ("blocks", "strided") or jax_arrays.is_traced(values.values()):
            return _traced(op, values, attributes, name or op.name)
        if jax_arrays.is_spread(values.values()):
            return _spread(op, values, attributes, name or op.name)
        found = jax_arrays.run(op, {**values, **attributes}, values)
    except ERRORS as error:
        raise in_name_of(op, name, error) from None
    return found if isinstance(found, tuple) else (found,)


def _array(value: Any) -> Array:
    """An array of JAX: constants that it has traced come as something else."""
    return value if jax_private.is_traced(value) or hasattr(value, "devices") else jnp.asarray(np.asarray(value))


def _spread(op: Operator, values: Mapping[str, Array], attributes: Mapping[str, Any], name: str) -> tuple[Array, ...]:
    """The results for arrays that are spread over devices; waits for errors that XLA raises."""
    try:
        found: tuple[Array, ...] = _jax.block_until_ready(_traced(op, values, attributes, name))
        return found
    except (RuntimeError, ValueError) as error:
        said = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise (ValueError(said.splitlines()[0]) if said != str(error) else error) from None


def _traced(op: Operator, given: Mapping[str, Any], attributes: Mapping[str, Any], name: str) -> tuple[Array, ...]:
    values = {each: given[each] for each in op.arrays if each in given}
    specs = {each: _spec(each, array) for each, array in values.items()}
    results = prepare(op, [specs.get(each) for each in op.arrays], dict(attributes)).results
    called = Called(op, specs, {each: Spec(spec.shape, spec.dtype) for each, spec in results.items()},
                    _counted_from_last(op, specs, attributes), name, _is_part(values.values()))  # fmt: skip
    like = alike(list(values.values()))
    kinds = [jax_private.kind_of(spec, like[0]) for spec in called.results.values()]
    method = _vmap_method(called)
    if not is_native():
        return tuple(_by_callback(called, kinds)(*like))
    by_xla = jax.ffi.ffi_call(TARGET, tuple(kinds), vmap_method=method, input_output_aliases=_aliases(called))
    call = functools.partial(by_xla, call=known(called))
    if jax.default_backend() != "cpu":
        found = jax.lax.platform_dependent(*like, cpu=call, default=_by_callback(called, kinds))
    else:
        found = call(*like)
    return tuple(_placed(result, like[0]) for result in found)


def _spec(name: str, array: Array) -> Spec:
    """An array as the operator sees it: dropout's state is two numbers of 64 bits, which JAX may not have."""
    return Spec((2,), DTYPES["int64"]) if name == STATE else Spec(tuple(array.shape), np.dtype(array.dtype))


def _counted_from_last(op: Operator, specs: Mapping[str, Spec], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes, with axes that axes of vmap before them do not move."""
    changed = dict(attributes)
    if op.kind == "rows" and "axis" in changed:
        rank, axis = len(next(iter(specs.values())).shape), changed["axis"]
        several = axis if isinstance(axis, tuple) else (axis,)
        from_last = tuple(each - rank if each >= 0 else each for each in several)
        changed["axis"] = from_last if isinstance(axis, tuple) else from_last[0]
    return changed


def _vmap_method(called: Called) -> str:
    """The method of jax.vmap: one call where the operator's loops take more axes, else one after the other."""
    op = called.operator
    roles = {op.inputs[name].role for name in called.given} | {tensor.role for tensor in op.results.values()}
    if op.kind in ("elements", "rows") and roles == {"element"}:
        return "broadcast_all"
    reduction = {"reduction": "none", **op.attributes, **called.attributes}["reduction"]
    each = reduction == "none" and "alone" not in roles
    return "broadcast_all" if op.kind == "classes" and each else "sequential"


def _aliases(called: Called) -> Aliases:
    """The results that may take the memory of an argument, where nothing else reads it: XLA copies it otherwise."""
    found: Aliases = {}
    indices = {name: index for index, name in enumerate(called.given)}
    for index, (result, spec) in enumerate(called.results.items()):
        for name in called.operator.in_place.get(result, ()):
            if name in indices and indices[name] not in found and called.given[name] == spec:
                found[indices[name]] = index
                break
    return found


# --- what JAX knows of arrays beside shape and dtype ----------------------------------------------------------------


def alike(tree: T) -> T:
    """The arrays of a structure, each varying over the axes of shard_map over which one of them varies.

    What has been made to vary has its gradients added up over those axes, as the gradient of what does not vary.
    """
    values, structure = jax.tree.flatten(tree)
    axes = [jax_private.varying(value) for value in values]
    every: frozenset[Any] = frozenset().union(*axes)
    missing = [tuple(every - own) for own in axes]
    found = [
        jax_private.made_varying(value, axes) if axes else value for value, axes in zip(values, missing, strict=True)
    ]
    return cast(T, jax.tree.unflatten(structure, found))


def _is_part(values: Iterable[Array]) -> bool:
    """Whether each device computes on arrays of its own: inside of shard_map and pmap."""
    return jax_private.has_manual_axes() or any(map(jax_private.varying, values))


def automatic(function: Callable[..., Array], axes: int, *arrays: Any) -> Array:
    """function(*arrays) where XLA decides how to shard, also if the types of arrays say it.

    The result has as many of the axes of the first array, in its sharding. The arrays may be None, or numbers.
    """
    leaves, structure = jax.tree.flatten(arrays)
    found = next((each for each in map(jax_private.explicit_sharding, leaves) if each is not None), None)
    if found is None:
        return function(*arrays)
    first = jax_private.explicit_sharding(arrays[0])
    spec = (*(first.spec if first is not None else ()), *[None] * axes)[:axes]
    indices = [index for index, each in enumerate(leaves) if isinstance(each, jax.Array)]

    def of_arrays(*values: Array) -> Array:
        changed = dict(zip(indices, values, strict=True))
        every = [changed.get(index, each) for index, each in enumerate(leaves)]
        return function(*jax.tree.unflatten(structure, every))

    result: Array = jax_private.automatic(of_arrays, jax_private.sharding_of(found.mesh, spec))(
        *[leaves[at] for at in indices]
    )
    return result


def _placed(result: Array, like: Array) -> Array:
    """A result sharded as an argument of its shape whose type says how; XLA has computed it everywhere."""
    sharding = jax_private.explicit_sharding(like)
    if sharding is None or result.shape != like.shape:
        return result
    found: Array = _jax.sharding.reshard(result, sharding)
    return found


# --- through Python ---------------------------------------------------------------------------------------------------


def _by_callback(called: Called, kinds: Sequence[Any]) -> Callable[..., Sequence[Array]]:
    """A call by way of Python and NumPy, one after the other under jax.vmap."""

    attributes = tuple(called.attributes.items())

    def on_host(*values: Any) -> Any:
        given = {name: np.ascontiguousarray(value) for name, value in zip(called.given, values, strict=True)}
        given |= {name: given[name].view(np.int64) for name in given if name == STATE}
        signature = tuple((name, value.shape, value.dtype) for name, value in given.items())
        try:
            found = _runner(called.operator, signature, attributes)({**given, **called.attributes})
        except Exception as error:
            raise in_name_of(called.operator, called.name, error) from None
        return found if isinstance(found, tuple) else (found,)

    return lambda *values: jax.pure_callback(on_host, tuple(kinds), *values, vmap_method="sequential")


@functools.lru_cache(1024)
def _runner(op: Operator, signature: tuple[Any, ...], attributes: tuple[Any, ...]) -> Callable[..., Any]:
    example = {name: np.empty(shape, dtype) for name, shape, dtype in signature}
    return arrays.runner(op, {**example, **dict(attributes)})


# --- the handler ------------------------------------------------------------------------------------------------------

_native: list[bool] = []  # whether calls are native, once it is known


def is_native() -> bool:
    """Whether XLA calls native code; tried at first use, with a RuntimeWarning if it cannot."""
    if not _native:
        reason = _reason_against()
        with settling:
            first = not _native
            _native[:] = [not reason]
        if reason and first:
            warnings.warn(
                f"opgrad.jax: compiled functions call opgrad through Python, because {reason}", RuntimeWarning, 3
            )
    return _native[0]


def _reason_against() -> str:
    """Why calls cannot be native; "" if a call of relu gives what it should."""
    if INTERPRETING:
        return "OPGRAD_INTERPRET asks for kernels that run in Python"
    if not hasattr(jax, "ffi"):
        return f"JAX {jax.__version__} has no jax.ffi"
    try:
        capsule = _jax.ffi.pycapsule(ctypes.c_void_p(handler_address()))
        jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
        found: list[Any] = []
        trial = threading.Thread(target=lambda: found.append(_outcome()))  # which traces nothing
        trial.start()
        trial.join()
    except Exception as error:
        return f"the handler was refused: {error}"
    if found != [True] and found != [False]:
        return f"the FFI of jaxlib {_jax.lib.__version__} cannot be called: {found[0]}"
    return "" if found[0] else f"the structures of jaxlib {_jax.lib.__version__}'s FFI are not as they are known"


def _outcome() -> Any:
    """The trial's answer, or the error that it ends with."""
    try:
        return _trial()
    except Exception as error:
        return error


def _trial() -> bool:
    """Whether a compiled function gives the numbers that it should."""
    x, op = np.arange(-3, 5, dtype=np.float32), operators()["relu"]
    spec = Spec(x.shape, x.dtype)
    called = Called(op, {"x": spec}, {"y": spec}, {}, op.name)
    call: Any = jax.ffi.ffi_call(TARGET, _jax.ShapeDtypeStruct(x.shape, x.dtype))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = jax.jit(lambda x: call(x, call=known(called)))(x)
        return bool(np.array_equal(np.asarray(found), np.maximum(x, 0)))
