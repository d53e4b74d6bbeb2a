"""Requests that one process sends to another, pickled, for kernels to be compiled."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from opgrad.cpu.compiler.target import object_cache


class Compiled(Protocol):
    """What a request asks for."""

    def compile(self, name: str) -> bool:
        """Compile it, in the process that gets the request; name: of the object code.

        Returns whether that is done.
        """


class Named(NamedTuple):
    """A kernel or native function that is a global of a module, and the interface for which it is compiled."""

    module: str
    name: str
    interface: str

    def compile(self, name: str) -> bool:
        getattr(import_module(self.module), self.name).compile(self.interface)
        return object_cache().read(name) is not None


class Work(NamedTuple):
    """A function to call, a global of a module, because it compiles several kernels while it runs."""

    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()

    def compile(self, name: str) -> bool:
        self.function(*self.arguments)
        return True


# The name of the object code, and how its kernel is found; for work, any name that tells it from other work.
Request = tuple[str, Compiled]
