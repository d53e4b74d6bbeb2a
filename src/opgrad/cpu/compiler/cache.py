"""Keeps object code on disk, so that the next process need not compile it.

The process executes what it reads from there. So it reads a file only if nobody else can write to its folder, if it is
a regular file of at most `MOST_BYTES`, and if its checksum over code, name and folder is right: neither half a file nor
a file that was renamed is ever loaded.

A path is walked from the root of the file system, one open descriptor after the other, and each is checked once it is
open. Files are then opened relative to the last one, so what was checked is what is used, even if somebody renames or
links folders meanwhile. Folders on the way may be writable by others if their sticky bit keeps others from renaming
what is not theirs, as in /tmp. On Windows, where the caches of users lie in folders of their own, nothing is checked.

Processes that need the same kernel at once wait for the one that compiles it, which holds a claim: a lock on a file
(flock), which the system releases when its owner ends. A claim only saves time; correctness does not depend on it. A
process gets none if the folder cannot be written to, if the system has no such locks, or if the owner takes longer than
`PATIENCE`, as a stopped process does, or a child that was forked without Python's knowledge and still holds the lock:
it compiles the kernel as well, and each of the two replaces the other's file in one atomic step.
"""

import hashlib
import os
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType

POSIX = os.name == "posix" and os.open in os.supports_dir_fd
# O_PATH: a folder that may be passed through, but not listed, is enough.
FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_PATH", os.O_RDONLY)
# O_NONBLOCK: opening a pipe in place of a file does not wait. O_NOFOLLOW: opening a symbolic link is an error.
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
MOST_LINKS = 40
OTHERS_WRITE = (
    stat.S_IWGRP | stat.S_IWOTH
)  # an entry of an access control list that grants writing shows as the group's


class UntrustedError(Exception):
    """Somebody else can change a file or folder; the message says what to do."""


@dataclass(frozen=True)
class Folder:
    """An open folder. `descriptor` is None on Windows, where its files are found by their path."""

    path: str
    descriptor: int | None

    def file(self, name: str) -> str:
        """The path of a file in the folder for functions of `os` that are called with `dir_fd=descriptor`."""
        return os.path.join(self.path, name) if self.descriptor is None else name


@contextmanager
def opened(path: str, make: bool = False, sticky: bool = False) -> Iterator[Folder]:
    """Open a folder that only the caller and root can change.

    path: absolute. make: folders that are missing are made, for the caller alone. sticky: the folder may be one like
    /tmp, for a caller that checks the owner of the file that it opens there.
    Raises UntrustedError if somebody else can change it or one above it, and OSError if it cannot be opened or made.
    """
    if not POSIX:
        if make:
            os.makedirs(path, exist_ok=True)
        yield Folder(path, None)
        return
    walk = _Walk()
    try:
        walk.through(path, make)
        check(os.fstat(walk.descriptor), walk.path, sticky)
        yield Folder(walk.path, walk.descriptor)
    finally:
        os.close(walk.descriptor)


def contents(folder: str, name: str, most: int, sticky: bool = False, trusted: bool = False) -> bytes:
    """The bytes of a file that only the caller and root can change; none if it is not regular or has more than `most`.

    sticky: as for `opened`. trusted: nothing is checked. Raises UntrustedError or OSError, as `opened` does.
    """
    with nullcontext(Folder(folder, None)) if trusted else opened(folder, sticky=sticky) as place:
        descriptor = os.open(place.file(name), READ, dir_fd=place.descriptor)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            return b""
        if not trusted:
            check(status, os.path.join(folder, name))
        return file.read(status.st_size)


def check(status: os.stat_result, path: str, sticky: bool = False) -> None:
    """Raise UntrustedError if others than the caller and root can change an open file or folder.

    sticky: a folder that others may write to is all right if its sticky bit protects what is in it.
    """
    if not POSIX:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} belongs to user {status.st_uid}, expected {_who()}")
    if status.st_mode & OTHERS_WRITE and not (sticky and status.st_mode & stat.S_ISVTX):
        raise UntrustedError(f"others can write to {path}; if what is in it can be trusted, chmod go-w '{path}'")


def _who() -> str:
    return f"user {os.geteuid()}, who calls, or root" if os.geteuid() else "root, who calls"


class _Walk:
    """An open folder that moves along a path, links included."""

    def __init__(self) -> None:
        self.path = os.sep
        self.descriptor = os.open(os.sep, FOLDER)

    def through(self, path: str, make: bool) -> None:
        """Move to an absolute path. What is made on the way can be entered by the caller alone."""
        names, links = _names(path), 0
        while names:
            check(os.fstat(self.descriptor), self.path, sticky=True)
            name = names.pop()
            target = self._link(name)
            if target is None:
                self._enter(name, make)
                continue
            links += 1
            if links > MOST_LINKS:
                raise OSError(f"{path} has too many symbolic links")
            if os.path.isabs(target):
                self._move(os.open(os.sep, FOLDER), os.sep)
            names += _names(target)

    def _link(self, name: str) -> str | None:
        """Where a symbolic link leads; None if it is none, or not there."""
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(status.st_mode):
            return None
        if status.st_uid not in (0, os.geteuid()):
            link = os.path.join(self.path, name)
            raise UntrustedError(f"the link {link} belongs to user {status.st_uid}, expected {_who()}")
        return os.readlink(name, dir_fd=self.descriptor)

    def _enter(self, name: str, make: bool) -> None:
        try:
            descriptor = os.open(name, FOLDER, dir_fd=self.descriptor)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
            descriptor = os.open(name, FOLDER, dir_fd=self.descriptor)
        self._move(descriptor, os.path.join(self.path, name))

    def _move(self, descriptor: int, path: str) -> None:
        os.close(self.descriptor)
        self.descriptor, self.path = descriptor, path


def _names(path: str) -> list[str]:
    """The components of a path, the first of them last."""
    return [name for name in reversed(path.split(os.sep)) if name not in ("", ".")]


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

    First wait until nobody else holds it, if that is possible here.
    """
    with ExitStack() as held:
        with suppress(OSError, UntrustedError):
            if folder is not None and fcntl is not None:
                place = held.enter_context(opened(folder, make=True))
                path = place.file(f".{name}.claim")
                descriptor = os.open(path, OPEN, 0o600, dir_fd=place.descriptor)
                held.callback(os.close, descriptor)
                status = os.fstat(descriptor)
                # Whoever can open the file can lock it and make us wait. So only the caller may have access to it.
                private = status.st_uid == os.geteuid() and not status.st_mode & OTHERS
                if stat.S_ISREG(status.st_mode) and private and _lock(descriptor):
                    # Closing it would not do where a forked child has it, too.
                    held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
                    held.callback(_remove, path, place.descriptor)
        yield


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


VARIABLE = "OPGRAD_CACHE_DIR"
SUFFIX = ".o"
CHECKSUM_BYTES = 32
MOST_BYTES = 1 << 24  # the largest file that is read; the largest kernels have some 30 KB
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def directory() -> str | None:
    """The folder that holds the folders of all versions: OPGRAD_CACHE_DIR, else opgrad's in the user's cache folder.

    None where neither the environment nor the system knows a home, or a relative path begins in a folder that is gone.
    """
    named = os.environ.get(VARIABLE)
    if named:
        try:
            return named if os.path.isabs(named) else os.path.join(os.getcwd(), named)
        except FileNotFoundError:
            return None
    home = os.path.expanduser("~")  # where there is none, "~" stays as it is
    if sys.platform == "win32":
        parent = os.environ.get("LOCALAPPDATA") or home
    elif sys.platform == "darwin":
        parent = os.path.join(home, "Library", "Caches")
    else:
        parent = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(parent, "opgrad") if os.path.isabs(parent) else None


class ObjectCache:
    """The object code that fits one environment: a kind of CPU, a version of the compiler, a build of Python.

    environment: the environment's name, which is also the name of its folder. `folder` is None if no folder is known in
    which it could lie.
    """

    def __init__(self, environment: str, directory: str | None):
        self.folder = directory and os.path.join(directory, environment)
        self.environment = environment
        self._warned = False

    def read(self, name: str, suffix: str = SUFFIX) -> bytes | None:
        """The code of this name; None if there is none, or none that can be trusted."""
        try:
            data = contents(self.folder, name + suffix, MOST_BYTES) if self.folder else b""
        except UntrustedError as problem:
            self._warn(problem)
            return None
        except OSError:
            return None
        return self.checked(name, data)

    def checked(self, name: str, data: bytes) -> bytes | None:
        """The code in a file's bytes; None if its checksum is wrong."""
        code = data[CHECKSUM_BYTES:]
        return code if code and self._checksum(name, code) == data[:CHECKSUM_BYTES] else None

    def write(self, name: str, code: bytes, suffix: str = SUFFIX) -> None:
        """Store code so that no reader ever sees half of it; a full or read-only disk is no error."""
        try:
            if self.folder:
                with opened(self.folder, make=True) as place:
                    _replace(place, name + suffix, self._checksum(name, code) + code)
        except UntrustedError as problem:
            self._warn(problem)
        except OSError:
            return

    def claim(self, name: str) -> AbstractContextManager[None]:
        """Within this context, another process that wants to compile the object of this name waits; see `claims`."""
        return claimed(self.folder, name)

    def count(self) -> int:
        """How many object files the folder holds."""
        try:
            return sum(name.endswith(SUFFIX) for name in os.listdir(self.folder)) if self.folder else 0
        except OSError:
            return 0

    def problem(self) -> str:
        """Why new code cannot be kept, and what the user can do; "" if it can be kept. Creates the folder."""
        if self.folder is None:
            named = os.environ.get(VARIABLE)
            found = f"{named} is in the current folder, which is gone" if named else "there is no home directory"
            return f"{found}; name a folder in {VARIABLE}"
        try:
            with opened(self.folder, make=True) as place:
                trial = place.file(_temporary("trial"))  # a name of its own: other processes try at the same time
                os.close(os.open(trial, CREATE, 0o600, dir_fd=place.descriptor))
                os.unlink(trial, dir_fd=place.descriptor)
        except UntrustedError as problem:
            return str(problem)
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        return ""

    def _checksum(self, name: str, code: bytes) -> bytes:
        return hashlib.sha256(f"{self.environment}/{name}\0".encode() + code).digest()

    def _warn(self, problem: UntrustedError) -> None:
        """Warn, once for each cache, that it is not used, and why."""
        if not self._warned:
            self._warned = True
            text = f"opgrad keeps no kernels: {problem}; or name a folder of your own in {VARIABLE}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _replace(place: Folder, name: str, data: bytes) -> None:
    """Write a temporary file and rename it to `name`, which is one atomic step.

    If that fails, remove the temporary file.
    """
    temporary, at = place.file(_temporary(name)), place.descriptor
    descriptor = os.open(temporary, CREATE, 0o600, dir_fd=at)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, place.file(name), src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise


def _temporary(name: str) -> str:
    """A name for a temporary file; its 64 random bits keep processes from choosing the same one."""
    return f".{name}.{os.urandom(8).hex()}"
