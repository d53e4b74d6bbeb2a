"""From Numba to object code: vectors, kernels, their cache, processes, packs, linking. Imports `base`."""

import functools
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

INTERPRETING = os.environ.get("OPGRAD_INTERPRET", "") not in ("", "0")
INTERPRETED: dict[str, Callable[..., Any]] = {}  # while kernels are interpreted: each operation as a Python function


def only_compiled(module: dict[str, Any]) -> None:
    """Replace each function that a module has declared by one that raises TypeError when Python calls it.

    Such a function is an operation. The compiler gives it its meaning inside a kernel; its Python body does nothing.
    While kernels are interpreted, a call goes to the operation's function in `opgrad.cpu.compiler.interpret` instead.
    """
    for name, operation in list(module.items()):
        if isinstance(operation, FunctionType) and operation.__module__ == module["__name__"]:
            module[name] = _refusing(operation)


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def refuse(*arguments: object) -> Any:
        meaning = INTERPRETED.get(operation.__name__)
        if meaning is None:
            raise TypeError(f"{operation.__name__} exists only inside compiled kernels")
        return meaning(*arguments)

    refuse.is_operation = True  # type: ignore[attr-defined]
    return refuse
