"""Write files so that no error and no crash leaves broken ones, and no error of the system is without the file's name.

All files of opgrad are opened for writing here. One alone takes the place of the old one in a single step. Several take
their places together: the old ones are moved aside first, the one that refers to the others before these, and come back
if anything fails. What only a crash can leave is a folder without the files that were being replaced, old and new ones
being whole in a hidden folder beside; no file is ever left that refers to values of another time.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

OLD = ".old"  # the folder, inside of the hidden one, to which files are moved that others replace


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the system: those of a full disk have no name, others that of a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def staged(folder: Path, gone: Callable[[Collection[str]], Iterable[str]] = lambda names: ()) -> Iterator[Path]:
    """A new folder inside another, whose files take their places there together at the end of the block.

    An exception, in the block or behind it, leaves `folder` as it was.

    gone: given the names of the new files, the names of others in `folder` that belong to the old ones and go with
        them.
    """
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        try:
            temporary.mkdir()
            yield temporary
            _replace_all(folder, temporary, gone)
        finally:
            if not _is_lost(temporary / OLD, folder):
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(_final(error.filename, temporary, folder))) from None
    flush_folder(folder)


def _final(name: object, temporary: Path, folder: Path) -> Path:
    """The file that an error is about: that which a temporary file would have become, or the folder."""
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else folder
    return folder / path.relative_to(temporary) if path.is_relative_to(temporary) else path


def _replace_all(folder: Path, temporary: Path, gone: Callable[[Collection[str]], Iterable[str]]) -> None:
    """Put the files of one folder in their places in another."""
    names = sorted(each.name for each in temporary.iterdir())
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
    others = [name for name in gone(names) if name not in names and (folder / name).is_file()]
    if len(names) == 1 and not others:
        os.replace(temporary / names[0], folder / names[0])
        return
    old = [name for name in (*names, *others) if os.path.lexists(folder / name)]
    aside = temporary / OLD
    aside.mkdir()
    try:
        for name in old:
            os.replace(folder / name, aside / name)
        for name in reversed(names):
            os.replace(temporary / name, folder / name)
    except BaseException:
        _undo(folder, temporary, names, old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _undo(folder: Path, temporary: Path, names: Iterable[str], old: Iterable[str]) -> None:
    """Take new files out of their places, and put the old ones back; where the files are tells how far it came."""
    for name in names:
        if not os.path.lexists(temporary / name):
            os.replace(folder / name, temporary / name)
    for name in old:
        if os.path.lexists(temporary / OLD / name):
            os.replace(temporary / OLD / name, folder / name)


def _is_lost(aside: Path, folder: Path) -> bool:
    """Whether a file was moved aside that could not be put back: it stays where it is."""
    return aside.is_dir() and any(not os.path.lexists(folder / each.name) for each in aside.iterdir())


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file, which takes the place of `path` at the end of the block.

    Whenever this is interrupted, `path` has its old content or the new one; an exception removes the temporary file.
    """
    with naming(path), staged(path.parent) as folder:
        yield folder / path.name


def replace_file(path: Path, content: memoryview | bytes | Iterable[memoryview | bytes]) -> None:
    """Write a file; whenever this is interrupted, `path` has its old content or the new one.

    content: all of it, or the pieces of it in order.
    """
    with replaced(path) as temporary:
        new_file(temporary, content)


def created(path: Path) -> BinaryIO:
    """A file that is not there yet, in a folder of `staged`; the caller writes, flushes and closes it."""
    with naming(path):
        return open(path, "xb")


def opened_in_place(path: Path) -> BinaryIO:
    """A file, made unless it is there, that is changed where nothing refers to what it holds."""
    with naming(path):
        return open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))


def new_file(path: Path, content: memoryview | bytes | Iterable[memoryview | bytes]) -> None:
    """Write a file that is not there yet, in a folder of `staged`. content: all of it, or the pieces of it in order."""
    with naming(path), created(path) as file:
        for piece in (content,) if isinstance(content, bytes | memoryview) else content:
            file.write(piece)
        flush(file)


def copied_file(path: Path, source: Path) -> None:
    """Write a copy of a file, in a folder of `staged`.

    A second name for the same file would take no space, but onnx loads no data from a file that has two.
    """
    with open(source, "rb") as file:
        new_file(path, iter(lambda: file.read(1 << 24), b""))


def flush(file: BinaryIO) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make new names last; where folders cannot be flushed, as on Windows, the system does so itself."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
