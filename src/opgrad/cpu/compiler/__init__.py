"""From Numba to object code: vectors, kernels, their cache, processes, packs, linking. Imports `base`."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


def only_compiled(module: dict[str, Any]) -> None:
    """Replace each function that a module has declared by one that raises TypeError when Python calls it.

    Such a function is an operation. The compiler gives it its meaning inside a kernel; its Python body does nothing.
    """
    for name, operation in list(module.items()):
        if isinstance(operation, FunctionType) and operation.__module__ == module["__name__"]:
            module[name] = _refusing(operation)


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def refuse(*arguments: object) -> Any:
        raise TypeError(f"{operation.__name__} exists only inside compiled kernels")

    refuse.is_operation = True  # type: ignore[attr-defined]
    return refuse
