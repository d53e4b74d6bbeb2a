"""Whose arrays a call has: PyTorch's, CuPy's and JAX's, on the CPU and on CUDA, are taken as they are.

A library is a module with the names that `Library` lists. It is imported when the first of its arrays turns up, so that
the user has imported it long before.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from opgrad.base.locks import settling
from opgrad.contract import Operator
from opgrad.contract.declaration import Memory

# The package of a type, and the module that knows its arrays: the one list of modules that a name leads to, since
# these load heavy libraries.
DOORS = {
    "torch": "opgrad.torch.door",
    "cupy": "opgrad.call.libraries.cupy",
    "jax": "opgrad.jax.operators",
    "jaxlib": "opgrad.jax.operators",
}


class Library(Protocol):
    """What this package knows of an array library.

    It is one of `opgrad.contract.declaration.Arrays`, too, unless, as JAX, it lends the arrays of a call to another.
    If it has `called`, as PyTorch, it answers the calls of public functions itself.
    """

    NAME: str  # one of its arrays, as messages write it: "PyTorch tensor"

    def run(self, op: Operator, given: Mapping[str, Any]) -> Any:
        """Run an operator whose arrays are this library's; the results are this library's too.

        `check_owners` tells whether all of them are. A library calls it where it settles a new signature, so
        that warm calls need not.
        """


class DeviceMemory(Memory, Protocol):
    """How a library's arrays lie in a device's memory.

    New arrays start at multiples of `opgrad.cuda.ALIGNMENT` bytes, as every allocator for devices gives them.
    """

    def key(self, array: Any) -> Any:
        """All that tells the array's signature from others, hashable: shape, strides, dtype and device, and the
        address modulo `opgrad.cuda.ALIGNMENT` unless it is always 0. Raises AttributeError, TypeError or RuntimeError
        for other things than arrays."""

    def words(self, array: Any) -> tuple[int, int]:
        """The first two 64-bit integers of an array of bytes, once the device has written them."""

    def stream(self, like: Any) -> int | None:
        """The stream on which the caller works now; None: Triton's own choice."""


known: dict[type, Library | None] = {}  # the types that have turned up; None: NumPy's and everything else


def library_of(kind: type) -> Library | None:
    """The library that a type belongs to; None for NumPy and everything else."""
    if kind not in known:
        modules = (DOORS.get(base.__module__.partition(".")[0]) for base in kind.__mro__)
        module = next((found for found in modules if found is not None), None)
        with settling:  # a fork never meets the module half imported
            known[kind] = None if module is None else cast(Library, importlib.import_module(module))
    return known[kind]


def arrays_of(op: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays among a call's arguments, by the names that messages give them."""
    arrays: dict[str, Any] = {}
    over_arrays(op, given, arrays.setdefault)
    out = given.get("out")
    if out is not None:
        several = out if isinstance(out, tuple) else (out,)
        arrays |= {f"out for {name}": value for name, value in zip(op.results, several, strict=False)}
    return arrays


def over_arrays(op: Operator, given: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A call's arguments with `change(name, array)` for each array but those in `out`, attributes' among them."""
    changed: dict[str, Any] = {}
    for name, tensor in op.inputs.items():
        value = given.get(name)
        if tensor.several and isinstance(value, list | tuple):
            changed[name] = [change(f"{name}[{i}]", array) for i, array in enumerate(value)]
        elif value is not None:
            changed[name] = change(name, value)
    if op.general is not None and any(name in given for name in op.general.keywords):
        given = op.general.over_arrays(given, change)
    return {**given, **changed}


def foreign(op: Operator, given: Mapping[str, Any]) -> bool:
    """Whether one of the arrays given by parameter name is another library's than NumPy."""
    return any(library_of(type(array)) is not None for array in arrays_of(op, given).values())


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on arrays of one library, given by parameter name; at least one is not NumPy's.

    Raises TypeError if they belong to several, NotImplementedError for an operator that only NumPy's arrays have,
    besides what the operator raises.
    """
    if "torch" not in op.support.front_ends:
        refusal = "no kernel for other arrays than NumPy's; convert them with numpy.asarray"
        raise NotImplementedError(f"{op.name}: {refusal}")
    for name in op.inputs:
        library = known.get(type(given.get(name)))
        if library is not None:
            return library.run(op, given)
    owners = (library_of(type(array)) for array in arrays_of(op, given).values())
    return next(owner for owner in owners if owner is not None).run(op, given)


def check_owners(op: Operator, given: Mapping[str, Any], library: Library) -> None:
    """Raise TypeError unless all arrays are this library's, and as many as the operator wants in `out`."""
    out, several = given.get("out"), len(op.results) > 1
    if out is not None and (isinstance(out, tuple) != several or (several and len(out) != len(op.results))):
        expected = f"a tuple of {len(op.results)} arrays" if several else "an array"
        raise TypeError(f"{op.name}: out is {_described(out)}, expected {expected}")
    owners = {name: library_of(type(array)) for name, array in arrays_of(op, given).items()}
    first = next((name for name, owner in owners.items() if owner is library), None)
    for name, array in arrays_of(op, given).items():
        if owners[name] is not library:
            as_first = f", as {first} is" if first else ""
            raise TypeError(f"{op.name}: {name} is {_described(array)}, expected a {library.NAME}{as_first}")


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    library = library_of(type(value))
    if library is not None:
        return f"a {library.NAME}"
    return "a NumPy array" if type(value).__module__ == "numpy" else type(value).__name__
