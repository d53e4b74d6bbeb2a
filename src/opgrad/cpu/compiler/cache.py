"""Keeps object code on disk, so that the next process need not compile it.

The process executes what it reads from there. So it reads a file only if nobody else can write to its folder (`trust`),
if it is a regular file of at most `MOST_BYTES`, and if its checksum over code, name and folder is right: neither half a
file nor a file that was renamed is ever loaded.
"""

import hashlib
import os
import sys
import warnings
from contextlib import AbstractContextManager, suppress

from opgrad.cpu.compiler import claims, trust

VARIABLE = "OPGRAD_CACHE_DIR"
SUFFIX = ".o"
HOST = "host"  # the file with what LLVM says of the CPU
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
            data = trust.contents(self.folder, name + suffix, MOST_BYTES) if self.folder else b""
        except trust.UntrustedError as problem:
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
                with trust.opened(self.folder, make=True) as place:
                    _replace(place, name + suffix, self._checksum(name, code) + code)
        except trust.UntrustedError as problem:
            self._warn(problem)
        except OSError:
            return

    def claim(self, name: str) -> AbstractContextManager[None]:
        """Within this context, another process that wants to compile the object of this name waits; see `claims`."""
        return claims.claimed(self.folder, name)

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
            with trust.opened(self.folder, make=True) as place:
                trial = place.file(_temporary("trial"))  # a name of its own: other processes try at the same time
                os.close(os.open(trial, CREATE, 0o600, dir_fd=place.descriptor))
                os.unlink(trial, dir_fd=place.descriptor)
        except trust.UntrustedError as problem:
            return str(problem)
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        return ""

    def _checksum(self, name: str, code: bytes) -> bytes:
        return hashlib.sha256(f"{self.environment}/{name}\0".encode() + code).digest()

    def _warn(self, problem: trust.UntrustedError) -> None:
        """Warn, once for each cache, that it is not used, and why."""
        if not self._warned:
            self._warned = True
            text = f"opgrad keeps no kernels: {problem}; or name a folder of your own in {VARIABLE}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _replace(place: trust.Folder, name: str, data: bytes) -> None:
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
