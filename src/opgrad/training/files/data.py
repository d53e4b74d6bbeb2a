"""Reads arrays of numbers from untrusted .npz, .npy and .csv files.

Nothing in a file is executed, and memory is allocated only after the file was found to be as long as its header claims.
Every fault raises an exception of one sentence with the file's name: TypeError for dtypes, otherwise ValueError.
"""

import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from opgrad.base.reading import open_regular

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
MOST_EXPANDED = 1100  # the most bytes from one compressed byte; deflate makes at most 1,032
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
DELIMITERS = ";\t,"  # tried in this order, because a comma may be part of a name or a decimal comma


def array_names(path: Path) -> list[str]:
    """The names of the arrays in an .npz file."""
    with _archive(path) as archive:
        return list(_members(archive, path))


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Some of the arrays in an .npz file."""
    with _archive(path) as archive:
        members = _members(archive, path)
        return {name: _read_member(archive, members[name], f"{path}: {name}") for name in names}


def read_npy(path: Path) -> np.ndarray:
    """The array in an .npy file."""
    with open_regular(path) as file:
        return _read_array(file, os.fstat(file.fileno()).st_size, str(path))


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except Exception as error:  # zipfile raises many kinds of exceptions for a damaged directory
            raise ValueError(f"{path}: no .npz file, or damaged: {_reason(error)}") from None
        with archive:
            yield archive


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    found = dict[str, zipfile.ZipInfo]()
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in found:
            raise ValueError(f"{path} has two arrays with the name {name!r}")
        if not info.filename.endswith("/"):
            found[name] = info
    return found


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> np.ndarray:
    if info.file_size > MOST_EXPANDED * max(info.compress_size, 1):
        raise ValueError(f"{what} claims {info.file_size} bytes in {info.compress_size}, more than can be packed there")
    try:
        file = archive.open(info)
    except Exception as error:  # encrypted, packed in an unknown way, or damaged
        raise ValueError(f"{what} cannot be unpacked: {_reason(error)}") from None
    with file:
        return _read_array(file, info.file_size, what)


def _read_array(file: IO[bytes], size: int, what: str) -> np.ndarray:
    """The array in an open file of so many bytes."""
    try:
        shape, _, dtype = HEADERS[npy.read_magic(file)](file)
    except Exception:  # NumPy parses the header as a Python literal, which fails in many ways if it is damaged
        raise ValueError(f"{what} is no array in NumPy's format, or damaged") from None
    if dtype.kind not in "fiub":
        raise TypeError(f"{what} has dtype {dtype}, expected numbers")
    claimed, left = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or claimed > left:
        raise ValueError(f"{what} is damaged, it claims shape {shape} of {dtype}, and {left} bytes follow")
    file.seek(0)
    try:
        array: np.ndarray = npy.read_array(file, allow_pickle=False)
    except Exception as error:
        raise ValueError(f"{what} is damaged: {_reason(error)}") from None
    return array


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- tables as text --------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> np.ndarray:
    """The numbers in a .csv file, in rows.

    It is in UTF-8, or in UTF-16 with a byte-order mark; values are separated by commas, semicolons or tabs. The first
    line may hold names. Empty lines and those that begin with # are skipped.
    """
    encoding = _encoding(path)
    try:
        skipped, delimiter = _start(path, encoding)
        return np.loadtxt(
            path, delimiter=delimiter, ndmin=2, skiprows=skipped, encoding=encoding, comments="#", quotechar='"'
        )
    except UnicodeError:
        raise ValueError(f"{path}: it is no text in UTF-8, nor in UTF-16 with a byte-order mark") from None
    except ValueError as error:
        raise ValueError(f"{path}: no table of numbers: {_reason(error)}") from None


def line_of(path: Path, row: int) -> int:
    """The number of the line, from 1, that holds a row of the result of `read_csv`."""
    encoding = _encoding(path)
    skipped, _ = _start(path, encoding)
    with path.open(encoding=encoding) as file:
        lines = (number for number, line in enumerate(file, 1) if number > skipped and line.partition("#")[0].strip())
        return next(islice(lines, row, None))


def _encoding(path: Path) -> str:
    with open_regular(path) as file:
        return "utf-16" if file.read(2) in UTF_16 else "utf-8-sig"


def _start(path: Path, encoding: str) -> tuple[int, str]:
    """The number of lines before the numbers, and the delimiter of the numbers."""
    with path.open(encoding=encoding) as file:
        lines = ((number, line) for number, line in enumerate(file) if line.strip() and line.lstrip()[0] != "#")
        for place, (number, line) in enumerate(lines):
            if "\0" in line:
                raise UnicodeError
            cells = [cell.strip().strip('"') for cell in line.split(_delimiter(line))]
            names = [cell for cell in cells if not _is_number(cell)]
            if not names:
                return number, _delimiter(line)
            if place or len(names) < len(cells):
                raise ValueError(f"line {number + 1} has {names[0]!r}, expected numbers, or names alone in the first")
    raise ValueError("it has no rows")


def _delimiter(line: str) -> str:
    return next((mark for mark in DELIMITERS if mark in line), ",")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
