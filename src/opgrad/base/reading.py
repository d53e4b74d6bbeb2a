"""Open files that nobody vouches for: regular ones alone.

A pipe or a device may have no end, may wait for a writer that never comes, and may do something when it is opened.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


BLOCK = 1 << 20  # bytes that are read at once


class NoFile(ValueError):
    """What has the name of a file is no regular one."""


def open_regular(path: Path, what: str = "", follow: bool = True) -> BinaryIO:
    """A regular file, open to be read in bytes.

    what: what messages call it; default: its path. follow: whether it may be a link: not if a file of others names it.
    Raises OSError if it cannot be opened, FileNotFoundError if there is none, `NoFile` if it is no regular file.
    """
    _check(what or path, os.stat(path, follow_symlinks=follow))
    descriptor = os.open(path, FLAGS if follow else FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        _check(what or path, os.fstat(descriptor))  # another may have taken its place
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path, what: str = "") -> None:
    """Raise what `open_regular` raises for a file that another library will open."""
    open_regular(path, what).close()


def read_regular(path: Path, what: str = "") -> bytes:
    """What a regular file holds. Raises what `open_regular` raises."""
    with open_regular(path, what) as file:
        return file.read()


def sha256_of(paths: Iterable[Path]) -> str:
    """The SHA-256 of what regular files hold, one behind the other, in hexadecimal digits.

    Raises what `open_regular` raises.
    """
    total = hashlib.sha256()
    for path in paths:
        with open_regular(path) as file:
            while block := file.read(BLOCK):
                total.update(block)
    return total.hexdigest()


def _check(what: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NoFile(f"{what}: it is no regular file")


def json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """The object that a JSON text of others holds. what: where the text stands, for the message of ValueError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # the latter for lists in lists in lists
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is damaged, expected a JSON object")
    return found
