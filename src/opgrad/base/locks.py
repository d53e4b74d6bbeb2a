"""The one lock of the package, `settling`. Everything that a process does once, and then keeps, is done under it.

This covers making plans, compiling kernels, starting threads, registrations, and importing the modules that these need.
A call whose plan is known never takes the lock.

A fork waits until no thread holds the lock. So a forked child finds each of these things either done or not begun. The
same is true of other packages' state that is locked while a kernel is compiled, such as half imported modules and LLVM.
There is one lock and not one for each purpose, because a fork would have to take several locks in the order in which
they are nested.
"""

# Hooks before a fork run in the reverse order of their registration. The hook of `logging` takes logging's lock, which
# the compiler takes as well. It must run after our hook has waited for the compiler, so logging is imported first.
import logging as logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Settling:
    """A reentrant lock that does not wait while the interpreter ends, since its owner may be a stopped thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=not sys.is_finalizing()):
            raise RuntimeError("opgrad: the interpreter ended while another thread compiled; no new call can be made")

    def begin(self) -> bool:
        """Take the lock if no other thread has it. Returns whether it was taken, so that `end` must be called."""
        return self._lock.acquire(blocking=False)

    def end(self) -> None:
        self._lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


settling = Settling()


class once(Generic[T]):
    """functools.cached_property under `settling`; Python 3.11's has a lock of its own, which a fork may leave held."""

    def __init__(self, function: Callable[[Any], T]):
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return cast(T, self)
        with settling:
            known = instance.__dict__
            if self._name not in known:
                known[self._name] = self._function(instance)
            return cast(T, known[self._name])


def in_child(renew: Callable[[], None]) -> None:
    """Have `renew` called in every forked child. Does nothing on a system without fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


_held: list[Any] = []  # the locks that the forking thread holds, in the order in which it took them


def compilers_locks() -> Iterator[Any]:
    """The locks of Numba and LLVM; None for one that is not loaded, or has another name.

    A program may compile with them itself; a child that inherits a held lock would hang.
    """
    numba, llvm = sys.modules.get("numba.core.compiler_lock"), sys.modules.get("llvmlite.binding.ffi")
    yield getattr(numba, "global_compiler_lock", None)
    yield getattr(getattr(llvm, "lib", None), "_lock", None)


def _hold() -> None:
    for lock in (settling, *compilers_locks()):
        if lock is not None:
            lock.__enter__()
            _held.append(lock)


def _let_go() -> None:
    while _held:
        _held.pop().__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)
