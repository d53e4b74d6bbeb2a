"""From Python functions to object code: the vector types, their lowering, the cache."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn


def only_compiled(module: dict[str, Any]) -> None:
    """Let the functions that a module has declared refuse calls from Python: only in kernels do they have a meaning."""
    for name, word in list(module.items()):
        if isinstance(word, FunctionType) and word.__module__ == module["__name__"]:
            module[name] = _refusing(word)


def _refusing(word: Callable[..., Any]) -> Callable[..., NoReturn]:
    @functools.wraps(word)
    def refuse(*_: object) -> NoReturn:
        raise TypeError(f"{word.__name__} exists only inside compiled kernels")

    return refuse
