"""Claims on objects: processes that need the same kernel at once wait for the one that compiles it.

A claim is a lock on a file (flock). The system releases it when its owner ends, even if the owner crashes. A claim only
saves time; correctness does not depend on it. A process that gets no claim compiles the kernel as well, and each of the
two replaces the other's file in one atomic step. A process gets no claim if the folder cannot be written to, if the
system has no such locks, or if the owner takes longer than `PATIENCE`, as a stopped process does, or a child that was
forked without Python's knowledge and still holds the lock.
"""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType

from opgrad.cpu.compiler import trust

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PATIENCE = 60.0  # seconds for which a process waits for a claim; compiling a kernel takes one to ten
LOOK = 0.02  # seconds between two attempts to lock the file
OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def claimed(folder: str | None, name: str) -> Iterator[None]:
    """Hold the claim of this name in the folder for the length of the context.

    First wait until nobody else holds it.
    """
    with ExitStack() as held:
        with suppress(OSError, trust.UntrustedError):
            if folder is not None and fcntl is not None:
                _claim(held, folder, name)
        yield


def _claim(held: ExitStack, folder: str, name: str) -> None:
    """Take the claim, if that is possible here; closing `held` gives it back."""
    place = held.enter_context(trust.opened(folder, make=True))
    path = place.file(f".{name}.claim")
    descriptor = os.open(path, OPEN, 0o600, dir_fd=place.descriptor)
    held.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    # Whoever can open the file can lock it and make us wait. So only the caller may have access to it.
    private = status.st_uid == os.geteuid() and not status.st_mode & OTHERS
    if stat.S_ISREG(status.st_mode) and private and _lock(descriptor):
        held.callback(
            fcntl.flock, descriptor, fcntl.LOCK_UN
        )  # closing it would not do where a forked child has it, too
        held.callback(_remove, path, place.descriptor)


def _lock(descriptor: int) -> bool:
    """Wait for the lock, at most PATIENCE seconds.

    True if it was taken, and the last owner has not removed the file.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK)
        else:
            return os.fstat(descriptor).st_nlink > 0
    return False


def _remove(path: str, folder: int | None) -> None:
    with suppress(OSError):
        os.unlink(path, dir_fd=folder)
