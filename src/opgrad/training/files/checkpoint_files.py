"""Read and replace the one or two files of a checkpoint so that no crash and no other process leaves a broken one.

Where the values are in a second file, each checkpoint has its own, which is never changed: the first one has the name
that onnxruntime-training looks for, and one that takes the place of another has a name with the SHA-256 of its content,
which the checkpoint tells. Renaming the checkpoint is the one step that makes the new values the current ones; the old
file goes then, and stays as it is for those that have it mapped.
"""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from opgrad.base.reading import NoFile
from opgrad.base.writing import alone, created, flush, naming, replace_file, staged
from opgrad.training.files import checkpoint_tables, mapped_files, safetensors

BESIDE = r"{}(\.[0-9a-f]{{16}})?\.data"  # names of files with the values of a checkpoint
FILLED = bytes(checkpoint_tables.ALIGNMENT)


def read_files(path: Path) -> tuple[memoryview, checkpoint_tables.Values | None, memoryview]:
    """The content of a checkpoint's file, its root table, and the content of the file with its values.

    Another process may replace them meanwhile: all are of one time. Weights of an exported step have no table. Raises
    FileNotFoundError, `NoFile`, `Damaged`.
    """
    path = Path(os.path.realpath(path))
    while True:
        before = _state(path)
        content, values, missing = mapped_files.content(path), memoryview(b""), False
        has_tables = checkpoint_tables.is_one(content) or not safetensors.starts_like_one(content)
        root = checkpoint_tables.decode(content) if has_tables else None
        if root is not None and (data := _data_of(path, root)) is not None:
            try:
                values = mapped_files.content(data, follow=False)
            except FileNotFoundError:
                missing = True
        if before == _state(path):
            if missing:
                raise FileNotFoundError(f"{path} keeps its values in {data}, which is missing")
            return content, root, values


def replace_files(path: Path, root: checkpoint_tables.Values, outside: bool) -> None:
    """Write a checkpoint; outside: with the data of its tensors in the file beside it.

    Raises OSError if another one writes it at the same time.
    """
    with alone(path):
        old = data_of(path)
        new = _write_values(path, root) if outside else None
        try:
            replace_file(path, checkpoint_tables.contents(root))
        except BaseException:
            if new is not None and data_of(path) != new:
                new.unlink(missing_ok=True)
            raise
        for unused in {*_left(path), *([] if old is None else [old])} - {new}:
            with suppress(OSError):  # the checkpoint stands
                unused.unlink()


def data_of(path: Path) -> Path | None:
    """The file with the values of a checkpoint; None if it has none, or if there is no checkpoint.

    An OSError other than FileNotFoundError is raised, because it does not tell whether there are values.
    """
    try:
        return _data_of(path, checkpoint_tables.decode(mapped_files.content(path)))
    except (FileNotFoundError, NoFile, checkpoint_tables.Damaged):
        return None


def beside(folder: Path, name: str) -> list[str]:
    """The files in a folder that are named as those with the values of a checkpoint of this name."""
    return [each for each in os.listdir(folder) if re.fullmatch(BESIDE.format(re.escape(name)), each)]


def data_path(path: Path, digest: str = "") -> Path:
    """The file beside a checkpoint that has its values. digest: that of its content, if it is part of the name."""
    return path.with_name(f"{path.name}{digest and f'.{digest[:16]}'}.data")


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _data_of(path: Path, root: checkpoint_tables.Values) -> Path | None:
    digest = root["model"]["digest"] or ""
    if digest and not re.fullmatch("[0-9a-f]{64}", digest):
        raise checkpoint_tables.Damaged("is damaged, the digest of its values is none")
    return data_path(path, digest) if root["model"]["outside"] else None


def _left(path: Path) -> list[Path]:
    """Files with values of checkpoints that are gone; one without a digest in its name may be somebody else's."""
    return [path.with_name(name) for name in beside(path.parent, path.name) if name != data_path(path).name]


def _write_values(path: Path, root: checkpoint_tables.Values) -> Path:
    """Write the file with the values of a checkpoint's tensors, and its name and their places into the tables."""
    root["model"]["outside"], offset, digest = True, 0, hashlib.sha256()
    with staged(path.parent, name=data_path(path).name) as folder:
        new = folder / data_path(path).name
        with naming(data_path(path)), created(new) as file:
            for tensor in (each for each in checkpoint_tables.tensors(root) if each["data"].nbytes):
                content = checkpoint_tables.raw(tensor["data"]).data
                for piece in (content, FILLED[: -content.nbytes % checkpoint_tables.ALIGNMENT]):
                    file.write(piece)
                    digest.update(piece)
                tensor["offset"], tensor["data"] = offset, None
                offset += checkpoint_tables.aligned(content.nbytes)
            flush(file)
        if os.path.lexists(path) or os.path.lexists(data_path(path)):
            root["model"]["digest"] = digest.hexdigest()
        final = data_path(path, root["model"].get("digest", ""))
        os.replace(new, folder / final.name)
    return final
