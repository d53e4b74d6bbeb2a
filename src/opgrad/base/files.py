"""Open files that nobody vouches for, and write files so that no error and no crash leaves broken ones.

All files of opgrad are opened for writing here, under new names in a hidden folder, and then take the places of old
ones: no file that another process may have mapped is changed, and no error of the system is without the file's name.
One alone takes its place in a single step. Several take their places together: the old ones are moved aside first, the
one that refers to the others before these, and come back if anything fails. What a crash interrupts, the next one to
read or write in that folder finishes (`finish_interrupted`).

Where a user names a file, a link is followed to it (`destination`); names that opgrad chooses follow none. Only regular
files are read and replaced: a pipe or a device may have no end, may wait for a writer that never comes, and may do
something when it is opened. A new file has the permissions of the old one.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


if sys.platform != "win32":
    import fcntl

LOCKS = sys.platform != "win32"  # whether the system tells who writes in a folder, and whether he still does
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")  # hidden folders in which files are written
# In them: the folder to which files are moved that others replace, and the names of those that only go.
OLD, JOURNAL = ".old", ".journal"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the system: those of a full disk have no name, others that of a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def destination(path: Path) -> Path:
    """The file that is written where a user names this one: of a link that to which it leads.

    To be called before anything is computed. Raises IsADirectoryError for a folder, `NoFile` for another thing that is
    no regular file, such as a device or a pipe, FileNotFoundError where its folder is missing.
    """
    with suppress(FileNotFoundError, NotADirectoryError):  # also of a link to a file that is not there yet
        _check_replaceable(path, os.stat(path))
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent if path.is_symlink() else path.parent}")
    return target


def check_destinations(folder: Path, names: Iterable[str]) -> None:
    """Raise what `destination` raises, and `NoFile` for links, where files of these names cannot be written."""
    for name in names:
        _old(folder / name)


def _check_replaceable(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise NoFile(f"{path} is {kind}, expected a regular file to replace, or none")


def _old(path: Path) -> os.stat_result | None:
    """The state of the file that another will replace; None if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    _check_replaceable(path, found)
    return found


@contextmanager
def staged(
    folder: Path, gone: Callable[[Collection[str]], Iterable[str]] = lambda names: (), name: str = ""
) -> Iterator[Path]:
    """A new folder inside another, whose files take their places there together at the end of the block.

    An exception, in the block or behind it, leaves `folder` as it was.

    gone: given the names of the new files, the names of others in `folder` that belong to the old ones and go with
        them.
    name: of one of the files; two writers with the same name in a folder exclude each other. Default: a whole set.
    Raises OSError if another one is writing.
    """
    finish_interrupted(folder)
    with _held(folder, name) as temporary:
        try:
            try:
                yield temporary
                _replace_all(folder, temporary, gone)
            finally:
                aside = temporary / OLD  # a file that was moved aside and could not be put back stays where it is
                if not (aside.is_dir() and any(not os.path.lexists(folder / each.name) for each in aside.iterdir())):
                    shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            if error.errno is None:
                raise
            named = error.filename  # the file that it is about becomes that which the temporary one would have become
            path = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else folder
            final = folder / path.relative_to(temporary) if path.is_relative_to(temporary) else path
            raise OSError(error.errno, error.strerror, str(final)) from None
    flush_folder(folder)


@contextmanager
def alone(path: Path) -> Iterator[Path]:
    """Within the block no other one writes this file and those beside it. Raises OSError if one does.

    Gives a hidden folder beside the file, which is gone at the end.
    """
    with _held(path.parent, f"{path.name}/") as temporary:
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


# --- who writes ------------------------------------------------------------------------------------------------------


@contextmanager
def _held(folder: Path, name: str) -> Iterator[Path]:
    """A hidden folder for files of this name, empty, which this process alone has."""
    own = hashlib.sha256(os.fsencode(name)).hexdigest()[:16] if LOCKS else secrets.token_hex(8)
    temporary = folder / f".{own}.tmp"
    try:
        descriptor = _taken(temporary, make=True)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(folder / name)) from None
    if descriptor is None:
        raise OSError(f"{folder / name}: another one is writing there, expected one at a time")
    try:
        _finish(folder, temporary)
        yield temporary
    finally:
        os.close(descriptor)


def _taken(temporary: Path, make: bool) -> int | None:
    """Lock a hidden folder; returns its descriptor, None if another has the lock or, unless `make`, if it is gone."""
    made = make and _made(temporary)
    if not LOCKS:
        return os.open(os.devnull, os.O_RDONLY)
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # another one has just removed it
        return _taken(temporary, make) if make else None
    except OSError:
        if make:
            raise
        return None  # it is a link, or somebody else's
    locked = _lock(descriptor, made)
    with suppress(FileNotFoundError):
        if locked and os.path.samestat(os.fstat(descriptor), os.lstat(temporary)):  # it still has its name
            return descriptor
    os.close(descriptor)
    return _taken(temporary, make) if locked and make else None


def _made(folder: Path) -> bool:
    """Make a hidden folder; returns whether there was none."""
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no folder {folder.parent}") from None
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise
    return True


def _lock(descriptor: int, made: bool) -> bool:
    """Lock a folder of this user. made: whether it is new, and so nobody else's on file systems without locks."""
    if os.fstat(descriptor).st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return made and not isinstance(error, BlockingIOError)
    return True


# --- several files ---------------------------------------------------------------------------------------------------


def finish_interrupted(folder: Path) -> bool:
    """Put files in their places whose writer was ended meanwhile, and remove what ended writers left in a folder.

    Returns whether there were such files, of which a warning tells.
    """
    if not LOCKS:
        return False
    names, found = list[str](), False
    with suppress(OSError):  # a folder may be one into which this user may only write
        names = sorted(filter(TEMPORARY.fullmatch, os.listdir(folder)))
    for temporary in map(folder.joinpath, names):
        if (descriptor := _taken(temporary, make=False)) is None:
            continue
        try:
            found |= _finish(folder, temporary)
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(descriptor)
    return found


def _finish(folder: Path, temporary: Path) -> bool:
    """Finish what an ended writer has begun with a hidden folder, which is empty then; returns whether it had."""
    names, journal = _names(temporary), _journal(folder, temporary)
    others = [name for name in journal or () if os.path.lexists(folder / name)]
    unfinished = journal is not None and bool(names or others)
    if unfinished:
        _move(folder, temporary, names, others)
        flush_folder(folder)
        text = f"{folder}: a writer was ended while it replaced files; it is finished: {', '.join([*names, *others])}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    for each in temporary.iterdir():
        shutil.rmtree(each, ignore_errors=True) if each.is_dir() and not each.is_symlink() else each.unlink()
    return unfinished


def _names(temporary: Path) -> list[str]:
    """The files of a hidden folder that have not taken their places."""
    return sorted(each.name for each in temporary.iterdir() if each.name not in (OLD, JOURNAL))


def _journal(folder: Path, temporary: Path) -> list[str] | None:
    """The names of the files that only go; None where no file has been moved yet.

    Raises ValueError, as anybody may have written it, if it is about anything but files of this folder.
    """
    try:
        found = json.loads((temporary / JOURNAL).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    for name in [*found, *_names(temporary)] if isinstance(found, list) else [found]:
        # Only a name without a path is one; that of ".." is itself.
        is_name = isinstance(name, str) and name not in ("", "..") and Path(name).name == name
        paths = (folder / name, temporary / name) if is_name else ()
        if not is_name or any(path.is_dir() and not path.is_symlink() for path in paths):
            raise ValueError(f"{temporary / JOURNAL} is about {name!r}, expected names of files in {folder}")
    return found


def _replace_all(folder: Path, temporary: Path, gone: Callable[[Collection[str]], Iterable[str]]) -> None:
    """Put the files of one folder in their places in another."""
    names = _names(temporary)
    for name in names:
        if (before := _old(folder / name)) is not None:  # the new file gets its permissions, and its owner if it may
            path = temporary / name
            if hasattr(os, "chown") and os.stat(path)[4:6] != before[4:6]:
                with suppress(OSError):
                    os.chown(path, before.st_uid, before.st_gid)
            path.chmod(stat.S_IMODE(before.st_mode) & 0o777)
    others = [name for name in gone(names) if name not in names and (folder / name).is_file()]
    if len(names) == 1 and not others:
        os.replace(temporary / names[0], folder / names[0])
        return
    new_file(temporary / JOURNAL, json.dumps(others).encode())
    flush_folder(temporary)
    try:
        _move(folder, temporary, names, others)
    except BaseException:  # put everything back; where the files are tells how far it came
        for name in names:
            if not os.path.lexists(temporary / name):
                os.replace(folder / name, temporary / name)
        for each in (temporary / OLD).iterdir() if (temporary / OLD).is_dir() else ():
            os.replace(each, folder / each.name)
        raise
    shutil.rmtree(temporary / OLD, ignore_errors=True)


def _move(folder: Path, temporary: Path, names: Sequence[str], others: Iterable[str]) -> None:
    """Move old files aside and new ones to their places; a second call finishes the first."""
    aside = temporary / OLD
    aside.mkdir(exist_ok=True)
    for name in (*names, *others):
        if os.path.lexists(folder / name):
            os.replace(folder / name, aside / name)
    for name in reversed(names):
        os.replace(temporary / name, folder / name)


# --- one file --------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file, which takes the place of `path` at the end of the block.

    Whenever this is interrupted, `path` has its old content or the new one; an exception removes the temporary file.
    Raises what `destination` raises.
    """
    target = destination(path)
    with naming(path), staged(target.parent, name=target.name) as folder:
        yield folder / target.name


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
