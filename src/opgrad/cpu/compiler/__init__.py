"""Compiles Python functions to object code: the vector types, their lowering to LLVM, the cache of object files."""

import functools
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

INTERPRETING = os.environ.get("OPGRAD_INTERPRET", "") not in ("", "0")
INTERPRETED: dict[str, Callable[..., Any]] = {}  # the Python function behind each word, while kernels are interpreted


def only_compiled(module: dict[str, Any]) -> None:
    """Replace each function that a module has declared by one that raises TypeError when Python calls it.

    Such a function is a word: the compiler gives it its meaning inside a kernel, and its Python body does nothing.
    While kernels are interpreted, a call goes to the word's function in `opgrad.cpu.compiler.interpret` instead.
    """
    for name, word in list(module.items()):
        if isinstance(word, FunctionType) and word.__module__ == module["__name__"]:
            module[name] = _refusing(word)


def _refusing(word: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(word)
    def refuse(*arguments: object) -> Any:
        meaning = INTERPRETED.get(word.__name__)
        if meaning is None:
            raise TypeError(f"{word.__name__} exists only inside compiled kernels")
        return meaning(*arguments)

    refuse.is_word = True  # type: ignore[attr-defined]
    return refuse
