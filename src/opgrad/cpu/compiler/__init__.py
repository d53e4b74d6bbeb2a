"""From Python functions to object code: the vector types, their lowering, the cache."""

import functools
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

INTERPRETING = os.environ.get("OPGRAD_INTERPRET", "") not in ("", "0")
INTERPRETED: dict[str, Callable[..., Any]] = {}  # what words mean while kernels are interpreted


def only_compiled(module: dict[str, Any]) -> None:
    """Let the functions that a module has declared refuse calls from Python: only in kernels do they have a meaning.

    While kernels are interpreted they have another one, in `opgrad.cpu.compiler.interpret`.
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
