"""Kernels as names and parameters alone, for machines that launch what was compiled elsewhere and have no Triton.

The functions that make programs stand beside the kernels, in modules that import Triton. While these are imported, what
follows stands in for it: so a program has the same launches there, and `ahead.key` gives them the same keys.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from opgrad.base.locks import settling

release = ""  # that of the Triton which compiled the kernels


@contextmanager
def importing() -> Iterator[None]:
    """Meanwhile modules that import Triton can be imported, whether it is installed or not."""
    with settling:
        if find_spec("triton") is not None:
            yield
            return
        stand_ins = {"triton": _triton, "triton.language": _language}
        before = {name: sys.modules.get(name) for name in stand_ins}
        sys.modules |= stand_ins
        try:
            yield
        finally:
            sys.modules |= before  # None says, as before, that there is none


class Constant:
    """In place of tl.constexpr."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"


class Kernel:
    """In place of a function that Triton compiles."""

    def __init__(self, function: Callable[..., Any]):
        self.__name__, self._name = function.__name__, f"{function.__module__}:{function.__qualname__}"
        given = inspect.signature(function).parameters
        self.arg_names = list(given)
        constants = {name for name, each in given.items() if each.annotation is Constant}
        self.params = [SimpleNamespace(name=name, is_constexpr=name in constants) for name in given]

    def __repr__(self) -> str:
        return f"JITFunction({self._name})"


class Named:
    """In place of a dtype of triton.language, and of all else that kernels name."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"triton.language.{self.name}"

    def __str__(self) -> str:
        return self.name.replace("bfloat", "bf").replace("float", "fp")


class _Language(ModuleType):
    constexpr = Constant

    def __getattr__(self, name: str) -> Named:
        found = vars(self)[name] = Named(name)
        return found


class _Triton(ModuleType):
    @property
    def __version__(self) -> str:
        return release

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return Kernel if function is None else Kernel(function)

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)


_triton, _language = _Triton("triton"), _Language("triton.language")
_triton.language = _language  # type: ignore[attr-defined]
