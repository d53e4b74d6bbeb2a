"""Write files so that no crash leaves a broken one, and no error of the system is without the file's name."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, which takes its place at the end of the block.

    Whenever this is interrupted, `path` has its old content or the new one; an exception removes the temporary file.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    with naming(path):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    flush_folder(path.parent)


def replace_file(path: Path, content: memoryview | bytes) -> None:
    """Write a file; whenever this is interrupted, `path` has its old content or the new one."""
    with replaced(path) as temporary, open(temporary, "xb") as file:
        file.write(content)
        flush(file)


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


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A new folder inside another, whose files take their places there together at the end of the block.

    An exception removes them all: `folder` is as it was.
    """
    with naming(folder):
        temporary = folder / f".{secrets.token_hex(8)}.tmp"
        temporary.mkdir()
        try:
            yield temporary
            for file in sorted(temporary.iterdir()):
                os.replace(file, folder / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    flush_folder(folder)
