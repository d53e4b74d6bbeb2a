"""Folders that only the caller and root can change: what lies in them may be executed.

A path is walked from the root of the file system, one open descriptor after the other, and each is checked once it is
open. Files are then opened relative to the last one, so what was checked is what is used, even if somebody renames or
links folders meanwhile. Folders on the way may be writable by others if their sticky bit keeps others from renaming
what is not theirs, as in /tmp. On Windows, where the caches of users lie in folders of their own, nothing is checked.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

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
