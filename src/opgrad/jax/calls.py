"""An operator on JAX arrays that hold no numbers yet, or lie on several devices: a call that XLA makes by itself.

XLA's FFI calls native code with the addresses of its buffers (`handler`). Where structures of the FFI are not as they
are known here, `jax.pure_callback` takes its place, which goes through Python.

A compiled function may be kept on disk and loaded by another process, so it holds no address: only the digest of what
it calls, its operator, dtypes and attributes. Whoever traces the function, which JAX does in every process before it
looks for a compiled one, makes the digest known here. Keyed plans stay, as do JAX's compiled functions.
"""

import ctypes
import functools
import hashlib
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from opgrad.base.locks import settling
from opgrad.call import arrays
from opgrad.call.libraries import jax_arrays, jax_private
from opgrad.contract import DTYPES, Operator, Shape, Spec
from opgrad.contract.signature import prepare
from opgrad.cpu import plans
from opgrad.cpu.compiler import machine_code
from opgrad.cpu.compiler.words import words
from opgrad.cpu.plans import KeyedPlan
from opgrad.cpu.runtime import threads
from opgrad.cpu.runtime.plan import REPORT, execute
from opgrad.jax import handler
from opgrad.ops import operators
from opgrad.ops.reference.primitive import STATE

CODES = {TypeError: handler.INVALID_ARGUMENT, ValueError: handler.INVALID_ARGUMENT}
CODES |= {NotImplementedError: handler.UNIMPLEMENTED, MemoryError: handler.RESOURCE_EXHAUSTED}


@dataclass(frozen=True)
class Called:
    """An operator as compiled functions call it.

    given: the names of the arrays that are given, with their shapes and dtypes as the call was traced. results: those
    of the results. attributes: the operator's own. caller: whom errors name. is_part: whether other devices compute
    other parts at the same time, so that wrong numbers give NaN: the others would wait in the next collective for one
    that has raised an error, until XLA ends the process.
    """

    operator: Operator
    given: Mapping[str, Spec]
    results: Mapping[str, Spec]
    attributes: Mapping[str, Any]
    caller: str
    is_part: bool = False

    @property
    def digest(self) -> str:
        """Text that stands for it in any process. It leaves out the sizes, which every call comes with."""
        op = self.operator
        every = (*self.given.items(), *self.results.items())
        kinds = [(name, len(spec.shape), spec.dtype.name) for name, spec in every]
        form = (op.name, op.kind, op.arrays, sorted(op.attributes.items(), key=str), sorted(self.attributes.items()))
        text = repr((kinds, form, self.caller, self.is_part))
        return hashlib.blake2b(text.encode(), digest_size=handler.DIGEST_BYTES // 2).hexdigest()

    def plan(self, inputs: Sequence[Shape], results: Sequence[Shape]) -> plans.Plan:
        """The plan for arrays of these shapes, which may have axes of vmap before those that were traced."""
        lead = {len(shape) - len(spec.shape) for shape, spec in zip(inputs, self.given.values(), strict=True)}
        lead |= {len(shape) - len(spec.shape) for shape, spec in zip(results, self.results.values(), strict=True)}
        (before,) = lead
        given = self._specs(inputs, self.given, before)
        made = self._specs(results, self.results, before)
        specs = [given.get(name) for name in self.operator.arrays]
        try:
            return plans.plan(self.operator, specs, dict(self.attributes), list(made.values()))
        except Exception as error:
            raise in_name_of(self.operator, self.caller, error) from None

    def _specs(self, shapes: Sequence[Shape], traced: Mapping[str, Spec], before: int) -> dict[str, Spec]:
        """The plan's arrays: with classes on axis 1, the axes of vmap are further samples."""
        found = {}
        for (name, spec), shape in zip(traced.items(), shapes, strict=True):
            if name == STATE:
                shape = spec.shape  # in other words (`calls`)
            elif before and self.operator.kind == "classes":
                shape = (math.prod(shape[: before + 1]), *shape[before + 1 :])
            found[name] = Spec(shape, spec.dtype)
        return found


def in_name_of(op: Operator, caller: str, error: Exception) -> Exception:
    """An error of an operator, as one of the function that the user has called; "": of the operator."""
    own, text = f"{op.name}: ", str(error)
    return type(error)(f"{caller}: {text.removeprefix(own)}") if caller and text.startswith(own) else error


_called: dict[bytes, Called] = {}  # by digest


def known(called: Called) -> str:
    """The digest of a call, by which the handler finds it from now on."""
    digest = called.digest
    _called[digest.encode()] = called
    return digest


# --- plans ----------------------------------------------------------------------------------------------------------


_keyed: dict[tuple[int, ...], KeyedPlan] = {}  # by key
_by_address: dict[int, tuple[Called, KeyedPlan]] = {}


def _prepare(key: int, bucket: int, found: int) -> int:
    """The handler calls this for a key that it does not know; writes the plan's address to `found`, or fails.

    Others may be walking through the bucket's plans in native code: a new one goes before them.
    """
    try:
        whole = tuple((ctypes.c_int64 * _at(key).value).from_address(key))
        with settling:
            if whole not in _keyed:
                _keyed[whole] = _keyed_plan(whole, _at(bucket).value)
                _at(bucket).value = _keyed[whole].address
            _at(found).value = _keyed[whole].address
        return 0
    except BaseException as error:
        return _failure(error)


_at = ctypes.c_int64.from_address


def _keyed_plan(key: tuple[int, ...], following: int) -> KeyedPlan:
    """The plan that a key stands for, with the operands' numbers of all buffers."""
    if not key:
        most, dimensions = handler.MOST_BUFFERS, handler.MOST_KEY_WORDS - handler.KEY_HEAD
        expected = f"at most {most} arrays with {dimensions} dimensions in all"
        raise ValueError(f"opgrad.jax: a call has too many arrays or dimensions, expected {expected}")
    called = _called.get(bytes(words(key[1 : handler.KEY_HEAD])))
    if called is None:
        raise ValueError(
            "opgrad.jax: this function was compiled in another process and not traced in this one: trace it again"
        )
    rest = iter(key[handler.KEY_HEAD :])
    shapes = [tuple(itertools.islice(rest, rank)) for rank in rest]
    plan = called.plan(shapes[: len(called.given)], shapes[len(called.given) :])
    operands = [*called.operator.arrays, *called.operator.results]
    places = words(operands.index(name) for name in (*called.given, *called.results))
    sizes = words(math.prod(spec.shape) * spec.dtype.itemsize for spec in plan.problem.results.values())
    own = handler.Buffers(len(operands), ctypes.addressof(places), ctypes.addressof(sizes) if called.is_part else 0)
    made = KeyedPlan(plan, key, own, following, places, sizes)
    _by_address[made.address] = called, made
    return made


def _refuse(keyed: int, report: int) -> int:
    """The handler calls this when a plan has refused its arguments, or its working memory could not be had (0)."""
    try:
        called, this = _by_address[keyed]
        told = list((ctypes.c_int64 * REPORT).from_address(report)) if report else None
        raise in_name_of(called.operator, called.caller, this.plan.error(told))
    except BaseException as error:
        return _failure(error)


_failures: dict[int, Any] = {}  # the last one of each thread, which XLA copies at once


def _failure(error: BaseException) -> int:
    """The words of a failure, as the handler reads them."""
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), handler.INTERNAL)
    text = ctypes.create_string_buffer(str(error).encode())
    told = handler.Failure(code, ctypes.addressof(text))
    _failures[threading.get_ident()] = told, text
    return told.address


# --- what the handler finds by name -----------------------------------------------------------------------------------

_tables: list[Any] = []


def _table() -> Any:
    """The handler's table: made once, and kept even when the interpreter ends, because XLA may still run."""
    if not _tables:
        word = ctypes.c_int64
        functions = (ctypes.CFUNCTYPE(word, *[word] * count)(each) for each, count in ((_prepare, 3), (_refuse, 2)))
        start = ctypes.CFUNCTYPE(word)(threads.team)
        callbacks = [*functions, start]
        with open(os.path.join(jax.ffi.include_dir(), *handler.HEADER.split("/")), encoding="utf-8") as header:
            # XLA refuses handlers of some other versions.
            (minor,) = (line for line in header if line.startswith(handler.MINOR_DEFINED))
        natives = [execute.address, threads.run.address, threads.team_word()]
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in callbacks]
        head = handler.Table(*addresses, *natives, int(minor.removeprefix(handler.MINOR_DEFINED)))
        table = words([*head.words, *[0] * handler.BUCKETS])
        kept = (table, callbacks, _keyed, _by_address, _failures)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        _tables.append(table)
    return _tables[0]


T = TypeVar("T")
_jax: Any = jax  # some of it has no types, and some is not in every release
TARGET = "opgrad_run"
ERRORS = (TypeError, ValueError, NotImplementedError)  # the exceptions of operators
Aliases = dict[int, int]  # from the number of an argument to that of the result in its memory


def call(op: Operator, given: Mapping[str, Any], attributes: Mapping[str, Any], caller: str = "") -> tuple[Array, ...]:
    """The results of an operator, in order: at once for arrays that hold numbers, else as part of what is traced.

    given: JAX arrays by parameter name, None for those left out. caller: what errors call the operator; "": its name.
    Raises what the checks of shapes, dtypes and attributes raise; what depends on traced numbers, XLA raises.
    """
    values = {each: _array(array) for each, array in given.items() if array is not None}
    try:
        # Calls in general, and attention with both of its results, have no public function.
        if op.kind in ("blocks", "strided") or jax_arrays.is_traced(values.values()):
            return _traced(op, values, attributes, caller or op.name)
        if jax_arrays.is_spread(values.values()):
            return _spread(op, values, attributes, caller or op.name)
        found = jax_arrays.run(op, {**values, **attributes}, values)
    except ERRORS as error:
        raise in_name_of(op, caller, error) from None
    return found if isinstance(found, tuple) else (found,)


def _array(value: Any) -> Array:
    """An array of JAX: constants that it has traced come as something else."""
    return value if jax_private.is_traced(value) or hasattr(value, "devices") else jnp.asarray(np.asarray(value))


def _spread(op: Operator, values: Mapping[str, Array], attributes: Mapping[str, Any], caller: str) -> tuple[Array, ...]:
    """The results for arrays that are spread over devices; waits for errors that XLA raises."""
    try:
        return cast(tuple[Array, ...], _jax.block_until_ready(_traced(op, values, attributes, caller)))
    except (RuntimeError, ValueError) as error:
        said = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise (ValueError(said.splitlines()[0]) if said != str(error) else error) from None


def _traced(op: Operator, given: Mapping[str, Any], attributes: Mapping[str, Any], caller: str) -> tuple[Array, ...]:
    values = {each: given[each] for each in op.arrays if each in given}
    specs = {each: _spec(each, array) for each, array in values.items()}
    results = prepare(op, [specs.get(each) for each in op.arrays], dict(attributes)).results
    changed = dict(attributes)
    if op.kind == "rows" and "axis" in changed:  # axes of vmap before them do not move axes that count from the last
        rank, axis = len(next(iter(specs.values())).shape), changed["axis"]
        from_last = tuple(each - rank if each >= 0 else each for each in (axis if isinstance(axis, tuple) else (axis,)))
        changed["axis"] = from_last if isinstance(axis, tuple) else from_last[0]
    # Inside of shard_map and pmap each device computes on arrays of its own.
    is_part = jax_private.has_manual_axes() or any(map(jax_private.varying, values.values()))
    made = {each: Spec(spec.shape, spec.dtype) for each, spec in results.items()}
    called = Called(op, specs, made, changed, caller, is_part)
    like = alike(list(values.values()))
    kinds = [jax_private.kind_of(spec, like[0]) for spec in called.results.values()]
    if not is_native():
        return tuple(_by_callback(called, kinds)(*like))
    by_xla = jax.ffi.ffi_call(
        TARGET, tuple(kinds), vmap_method=_vmap_method(called), input_output_aliases=_aliases(called)
    )
    call = functools.partial(by_xla, call=known(called))
    if jax.default_backend() != "cpu":
        found = jax.lax.platform_dependent(*like, cpu=call, default=_by_callback(called, kinds))
    else:
        found = call(*like)
    return tuple(_placed(result, like[0]) for result in found)


def _spec(name: str, array: Array) -> Spec:
    """An array as the operator sees it: dropout's state is two numbers of 64 bits, which JAX may not have."""
    return Spec((2,), DTYPES["int64"]) if name == STATE else Spec(tuple(array.shape), np.dtype(array.dtype))


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
    return cast(Array, _jax.sharding.reshard(result, sharding))


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
            raise in_name_of(called.operator, called.caller, error) from None
        return found if isinstance(found, tuple) else (found,)

    return lambda *values: jax.pure_callback(on_host, tuple(kinds), *values, vmap_method="sequential")


@functools.lru_cache(1024)
def _runner(op: Operator, signature: tuple[Any, ...], attributes: tuple[Any, ...]) -> Callable[..., Any]:
    example = {name: np.empty(shape, dtype) for name, shape, dtype in signature}
    return arrays.ArrayRunner(op, {**example, **dict(attributes)}).run


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
    try:
        with settling:
            machine_code.give_name(handler.TABLE, ctypes.addressof(_table()))
            capsule = _jax.ffi.pycapsule(ctypes.c_void_p(handler.handle.address))
        jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
        found: list[Any] = []
        trial = threading.Thread(target=lambda: found.append(_trial()))  # which traces nothing
        trial.start()
        trial.join()
    except Exception as error:
        return f"the handler was refused: {error}"
    if found != [True] and found != [False]:
        return f"the FFI of jaxlib {_jax.lib.__version__} cannot be called: {found[0]}"
    return "" if found[0] else f"the structures of jaxlib {_jax.lib.__version__}'s FFI are not as they are known"


def _trial() -> bool | Exception:
    """Whether a compiled function gives the numbers that it should, or the error that it ends with."""
    x, op = np.arange(-3, 5, dtype=np.float32), operators()["relu"]
    spec = Spec(x.shape, x.dtype)
    called = Called(op, {"x": spec}, {"y": spec}, {}, op.name)
    call: Any = jax.ffi.ffi_call(TARGET, _jax.ShapeDtypeStruct(x.shape, x.dtype))
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            found = jax.jit(lambda x: call(x, call=known(called)))(x)
            return bool(np.array_equal(np.asarray(found), np.maximum(x, 0)))
    except Exception as error:
        return error
