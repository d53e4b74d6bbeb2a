"""Which source files a function's machine code is made of, as one digest.

Numba compiles the constants that a kernel reads into its code, wherever they were imported from. So a kernel depends on
its own file, on those of the functions that it was made from, and on every file of opgrad that one of these imports,
directly or not; through `native` the compiler is among them.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # the folder that holds opgrad/
# They begin with fixed text, for which `re` searches a fifth as long as for the beginning of a line.
FROM = re.compile(rb"from (opgrad[\w.]*) import (\([^)]*\)|[^\n]*)")
IMPORT = re.compile(rb"import (opgrad[\w.]*)")


def digest(function: Callable[..., Any]) -> bytes | None:
    """A digest of all sources of a function; None if one of them cannot be read, as that of code typed in."""
    found: set[str] = set()
    waiting = [each.__code__.co_filename for each in made_from(function)]
    whole = hashlib.sha256()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _read(path)[1]
    for path in sorted(found):
        own = _read(path)[0]
        if own is None:
            return None
        whole.update(own)
    return whole.digest()


def made_from(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The function, and those that it was made from, at every depth."""
    yield function
    for cell in function.__closure__ or ():
        if callable(cell.cell_contents):
            yield from made_from(cell.cell_contents)


def of_file(path: str) -> bytes | None:
    """The digest of one file; None if it cannot be read."""
    return _read(path)[0]


@functools.cache
def _read(path: str) -> tuple[bytes | None, list[str]]:
    """The digest of a file, and the files of opgrad that it imports."""
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError:
        return None, []
    return hashlib.sha256(source).digest(), list(imported(source))


def imported(source: bytes) -> Iterator[str]:
    """The files of opgrad that a source imports, at any place; parsing it would take fifty times as long."""
    for module, names in (*FROM.findall(source), *((module, b"") for module in IMPORT.findall(source))):
        name = module.decode()
        files = [_file(f"{name}.{each.decode()}") for each in re.findall(rb"\w+", names)] if _is_package(name) else []
        yield from filter(None, files)
        if not files or None in files:  # a name that is no module stands in the module itself
            own = _file(name)
            if own:
                yield own


@functools.cache
def _is_package(module: str) -> bool:
    return os.path.isdir(os.path.join(ROOT, *module.split(".")))


@functools.cache
def _file(module: str) -> str | None:
    """The file of a module or package; None if there is none of that name."""
    path = os.path.join(ROOT, *module.split("."))
    for candidate in (path + ".py", os.path.join(path, "__init__.py")):
        if os.path.isfile(candidate):
            return candidate
    return None
