"""Asks the operating system for memory and threads, and sets on which CPUs a thread may run.

Native code calls these functions by their addresses. A system is made from the library that holds them, and keeps no
state, so a test can hand it a library of its own and see what is asked for on systems that are not there.
"""

import ctypes
import functools
import mmap
import os
import signal
import sys
from typing import Any, Final

HEAP: Final = "malloc", "calloc", "free", "memcpy", "memset"
# Signals that an instruction of the thread itself raises, by name, since Windows lacks some.
FAULTS: Final = "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"


def address(library: Any, name: str) -> int:
    """Return the address of a function of a library."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class CLibrary:
    """What all systems have."""

    def __init__(self, library: Any) -> None:
        """library: the C library."""
        self._library = library

    def heap(self, name: str) -> int:
        """Return the address of a function that HEAP names."""
        return address(self._library, name)


class Posix(CLibrary):
    """Linux and macOS, whose C library has threads."""

    def mappings(self) -> tuple[int, int, int, int]:
        """Return the functions that map memory, unmap it and advise on it, and the flags of a new mapping."""
        names = "mmap", "munmap", "madvise"
        first, second, third = (address(self._library, name) for name in names)
        return first, second, third, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def waiting(self, mutex: int, condition: int) -> list[int]:
        """Initialise a mutex and a condition of 128 bytes each; return what locks, unlocks, waits and wakes all."""
        self._library.pthread_mutex_init(ctypes.c_void_p(mutex), None)
        self._library.pthread_cond_init(ctypes.c_void_p(condition), None)
        names = "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"
        return [address(self._library, name) for name in names]

    def yielding(self) -> int:
        """Return the address of the function that lets other threads run first."""
        return address(self._library, "sched_yield")

    def copy_of(self, address: int, size: int) -> bytes | None:
        """Return so many bytes from an address, no more than a pipe holds; None if they cannot be read.

        The system copies them. Where loading them would end the process, it refuses.
        """
        reading, writing = os.pipe()
        try:
            written = self._library.write(writing, ctypes.c_void_p(address), ctypes.c_size_t(size))
            return os.read(reading, size) if written == size else None
        finally:
            os.close(reading)
            os.close(writing)

    def affinity(self) -> list[int]:
        """Return the functions that set and get a thread's CPUs, that name the thread, and its CPU; none on macOS."""
        if not hasattr(os, "sched_getaffinity") or not hasattr(self._library, "gettid"):
            return []
        names = "sched_setaffinity", "sched_getaffinity", "gettid", "sched_getcpu"
        return [address(self._library, name) for name in names]

    def start_thread(self, function: int, argument: int) -> str:
        """Start a thread that Python does not know. Returns why the system refused, or "" if it did not.

        The thread blocks signals, which are left to Python's own threads, but for FAULTS: if the signal of a fault is
        blocked, the process ends before a handler such as faulthandler's can say where the fault happened.
        """
        entry, handle = ctypes.c_void_p(function), ctypes.c_void_p()
        faults = {getattr(signal, name) for name in FAULTS if hasattr(signal, name)}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
        try:
            error = self._library.pthread_create(ctypes.byref(handle), None, entry, ctypes.c_void_p(argument))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return os.strerror(error) if error else ""


class Windows(CLibrary):
    """Windows. Its functions for mappings are unlike those of POSIX, so all memory comes from the heap."""

    def __init__(self, library: Any, kernel: Any) -> None:
        """library: the C library, ucrtbase; kernel: kernel32, with the last error kept."""
        super().__init__(library)
        self._kernel = kernel

    def mappings(self) -> None:
        """Return None: no function maps memory as POSIX does."""

    def waiting(self, mutex: int, condition: int) -> list[int]:
        """Initialise a lock and a condition variable; return what locks, unlocks, waits and wakes all."""
        self._kernel.InitializeSRWLock(ctypes.c_void_p(mutex))
        self._kernel.InitializeConditionVariable(ctypes.c_void_p(condition))
        lock, unlock = "AcquireSRWLockExclusive", "ReleaseSRWLockExclusive"
        names = lock, unlock, "SleepConditionVariableSRW", "WakeAllConditionVariable"
        return [address(self._kernel, name) for name in names]

    def yielding(self) -> int:
        """Return the address of the function that lets other threads run first."""
        return address(self._kernel, "SwitchToThread")

    def copy_of(self, address: int, size: int) -> bytes | None:
        """Return so many bytes from an address; None if they cannot be read."""
        copied, process = ctypes.create_string_buffer(size), ctypes.c_void_p(-1)  # this one
        read = self._kernel.ReadProcessMemory(process, ctypes.c_void_p(address), copied, ctypes.c_size_t(size), None)
        return copied.raw if read else None

    def affinity(self) -> list[int]:
        """Return no function: the scheduler keeps threads apart."""
        return []

    def start_thread(self, function: int, argument: int) -> str:
        """Start a thread that Python does not know. Returns why the system refused, or "" if it did not."""
        create = self._kernel.CreateThread
        create.restype = ctypes.c_void_p
        handle = create(None, ctypes.c_size_t(0), ctypes.c_void_p(function), ctypes.c_void_p(argument), 0, None)
        if not handle:
            return ctypes.FormatError(ctypes.get_last_error())  # type: ignore[attr-defined, unused-ignore]
        self._kernel.CloseHandle(ctypes.c_void_p(handle))  # the thread goes on
        return ""


@functools.cache
def system() -> Posix | Windows:
    """Return the functions of the system that this process runs on."""
    if sys.platform == "win32":
        return Windows(ctypes.CDLL("ucrtbase"), ctypes.WinDLL("kernel32", use_last_error=True))
    return Posix(ctypes.CDLL(None))
