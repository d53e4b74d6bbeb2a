"""Claims on objects: processes that need the same kernel at once wait for the one that compiles it.

A claim is a lock on a file, which the system takes back from an owner that ends, however it ends. It saves time and
settles nothing: whoever gets none compiles as well, and what both write replaces the other's in one step. That is so
where the folder cannot be written to, on a system without such locks, and where an owner takes too long, as a stopped
process does, or a copy of one that was forked without Python's knowing.
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

PATIENCE = 60.0  # seconds for which others wait for an owner: a kernel takes one to ten
LOOK = 0.02  # seconds between two looks
OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def claimed(folder: str | None, name: str) -> Iterator[None]:
    """Meanwhile no other process has a claim of this name in the folder; waits for one that has it."""
    with ExitStack() as held:
        with suppress(OSError, trust.UntrustedError):
            if folder is not None and fcntl is not None:
                _claim(held, folder, name)
        yield


def _claim(held: ExitStack, folder: str, name: str) -> None:
    """Get the claim, if there can be one; it ends with what is held."""
    place = held.enter_context(trust.opened(folder, make=True))
    path = place.entry(f".{name}.claim")
    descriptor = os.open(path, OPEN, 0o600, dir_fd=place.descriptor)
    held.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    # Whoever can open a file can lock it, if only to make others wait: it must be the caller's alone.
    private = status.st_uid == os.geteuid() and not status.st_mode & OTHERS
    if stat.S_ISREG(status.st_mode) and private and _lock(descriptor):
        held.callback(
            fcntl.flock, descriptor, fcntl.LOCK_UN
        )  # closing it would not do where a forked child has it, too
        held.callback(_remove, path, place.descriptor)


def _lock(descriptor: int) -> bool:
    """Wait for the lock, at most PATIENCE seconds; whether it is there, and its last owner has left the file."""
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
