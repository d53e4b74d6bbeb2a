"""The one lock of the package: whatever a process settles once is settled under it.

That is plans, kernels, threads, registrations, and the modules that these need. Warm calls never take it.

A fork waits until nobody holds it, so a child finds everything either done or not begun: also what other packages
keep locks for while a kernel is compiled, such as half imported modules and LLVM. One lock, not one for each purpose,
because a fork would have to take several in the order in which they are nested.
"""

# Hooks before a fork run in the reverse order of their registration. logging's holds its lock, which a compiler takes
# as well: that hook must come after the one here has waited for the compiler, so logging is imported first.
import logging as logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Settling:
    """A reentrant lock that never waits for a thread which the end of the interpreter has stopped."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=not sys.is_finalizing()):
            raise RuntimeError("opgrad: the interpreter ended while another thread compiled; no new call can be made")

    def begin(self) -> bool:
        """Take the lock if nobody else has it; whether that is so, and `end` has to be called."""
        return self._lock.acquire(blocking=False)

    def end(self) -> None:
        self._lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


settling = Settling()


class once(Generic[T]):
    """functools.cached_property under the lock above; that of Python 3.11 has its own, which a fork may leave held."""

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
    """Have `renew` called in every forked child; forks, where the system has them, are the only use of it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


_held: list[Any] = []  # by the thread that forks, in the order in which they were taken


def _compilers_locks() -> Iterator[Any]:
    """Numba's and LLVM's own locks: programs compile with them, too, and a child that finds them held waits forever."""
    numba, llvm = sys.modules.get("numba.core.compiler_lock"), sys.modules.get("llvmlite.binding.ffi")
    yield getattr(numba, "global_compiler_lock", None)
    yield getattr(getattr(llvm, "lib", None), "_lock", None)


def _hold() -> None:
    for lock in (settling, *_compilers_locks()):
        if lock is not None:
            lock.__enter__()
            _held.append(lock)


def _let_go() -> None:
    while _held:
        _held.pop().__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)
