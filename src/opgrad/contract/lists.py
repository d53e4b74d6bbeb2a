"""Two general forms: operators that take lists of arrays, and operators whose calls may leave results out."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opgrad.contract.attributes import shown
from opgrad.contract.declaration import General, Operator, Tensor
from opgrad.contract.libraries import Arrays

NEEDS = "needs"  # the keyword of operators that can leave results out


@functools.lru_cache(maxsize=256)  # building it takes longer than a small call
def spread(op: Operator, given: int, made: int) -> Operator:
    """The operator with `given` single inputs in place of each list that it takes, and `made` results for each list.

    They are named NAME[0], NAME[1], …. The shape of such a result is computed with the keyword `index`.
    """

    def replaced(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            each = {f"{name}[{i}]": _indexed(tensor, i) for i in range(count)} if tensor.several else {name: tensor}
            found |= each
        return found

    inputs, results = replaced(op.inputs, given), replaced(op.results, made)
    shared = {
        f"{result}[{i}]": tuple(f"{name}[{i}]" for name in names)
        for result, names in op.in_place.items()
        for i in range(made)
    }
    rest = [name for name in op.parameters if name not in op.inputs]
    return replace(op, inputs=inputs, results=results, parameters=(*inputs, *rest), in_place=shared, general=None)


def _indexed(tensor: Tensor, index: int) -> Tensor:
    shape = tensor.shape and functools.partial(tensor.shape, index=index)
    model = tensor.dtype_of and tensor.dtype_of.replace("[]", f"[{index}]")
    return replace(tensor, shape=shape, dtype_of=model, several=False)


def several(made: Callable[[Operator, Mapping[str, Any], int], int] = lambda op, given, count: 0) -> General:
    """How calls are expanded of an operator that takes lists of arrays, all of the same length.

    made: returns the length of the lists that the operator returns, 0 if it returns none. It is given the operator, the
    arguments, which are not checked yet, and the length of the lists that it takes, 1 if it takes none.
    """

    def expand(op: Operator, given: dict[str, Any], library: Arrays) -> tuple[Operator, dict[str, Any]]:
        flat, count = dict(given), 1
        lists = [name for name, tensor in op.inputs.items() if tensor.several]
        for name in lists:
            arrays = flat.pop(name)
            count = _length(op, name, arrays, lists[0], count)
            flat |= {f"{name}[{i}]": array for i, array in enumerate(arrays)}
        results = made(op, given, count)
        if not results:
            return spread(op, count, 0), flat
        if isinstance(flat.get("out"), list | tuple):
            flat["out"] = _flattened(flat["out"])
        return _making_lists(op, count, results), flat

    return General((), expand)


@functools.lru_cache(maxsize=256)
def _making_lists(op: Operator, given: int, made: int) -> Operator:
    return replace(spread(op, given, made), finish=functools.partial(_in_lists, len(op.results)))


def _length(op: Operator, name: str, arrays: Any, first: str, expected: int) -> int:
    """The length of a list of arrays. Raises ValueError unless it is as long as the first list."""
    if not isinstance(arrays, list | tuple):
        raise TypeError(f"{op.name}: {name} is {type(arrays).__name__}, expected a list of arrays")
    if not arrays:
        raise ValueError(f"{op.name}: {name} is empty, expected at least one array")
    if name != first and len(arrays) != expected:
        raise ValueError(f"{op.name}: {name} has {len(arrays)} arrays, expected {expected}, as many as {first}")
    return len(arrays)


def _flattened(out: Any) -> Any:
    """The argument `out` of the expanded call: lists become one tuple, and a tuple of one becomes its array."""
    flat = tuple(array for each in out for array in (each if isinstance(each, list | tuple) else [each]))
    return flat[0] if len(flat) == 1 else flat


def lists_of(op: Operator) -> int | None:
    """In how many lists an operator returns its results, 0 if it returns a tuple; None if it returns something else."""
    if op.finish is None:
        return 0
    if isinstance(op.finish, functools.partial) and op.finish.func is _in_lists:
        return int(op.finish.args[0])
    return None


def _in_lists(lists: int, results: tuple[Any, ...]) -> Any:
    """The results as one list, or as a tuple of several lists of the same length."""
    if lists == 1:
        return list(results)
    length = len(results) // lists
    return tuple(list(results[start : start + length]) for start in range(0, len(results), length))


# --- operators whose calls may leave results out -------------------------------------------------------------------


def only(op: Operator, needs: Sequence[str]) -> Operator:
    """The operator with these results alone, in the order of its declaration."""
    return replace(op, results={name: tensor for name, tensor in op.results.items() if name in needs}, general=None)


def choosing(unasked: tuple[str, ...] | None = None) -> General:
    """How calls are expanded of an operator with the keyword `needs`, which names the results that a call wants.

    unasked: those that a call gets whose `needs` is None; None stands for all.
    """

    def expand(op: Operator, given: dict[str, Any], library: Arrays) -> tuple[Operator, dict[str, Any]]:
        needs = given.get(NEEDS)
        if needs is None:
            return (op if unasked is None else only(op, unasked)), given
        known = isinstance(needs, tuple | list) and all(isinstance(each, str) and each in op.results for each in needs)
        if not known or not needs:
            expected = f"some of {', '.join(op.results)} in a tuple"
            raise ValueError(f"{op.name}: {NEEDS} is {shown(needs)}, expected {expected}")
        return only(op, tuple(needs)), given

    return General((NEEDS,), expand)


def chosen(results: Mapping[str, Any], needs: tuple[str, ...] | None) -> Any:
    """What a reference with the keyword `needs` returns: these results, None for all; one of them by itself."""
    found = tuple(results[name] for name in results if needs is None or name in needs)
    return found if len(found) > 1 else found[0]
