"""Replace the one or two files of a checkpoint so that no crash leaves a broken one.

The checkpoint itself is written under another name, flushed to the disk and renamed. Where the values are in a second
file, its name is fixed, so two renames would be needed, and a crash between them would leave files that do not belong
together. Instead the new values are written into the present second file, to bytes that the present checkpoint does
not refer to: before its values if there is room, behind them otherwise. Renaming the first file is then the one step
that makes the new values the current ones. The second file takes up to about twice the values' size.
"""

import os
from contextlib import suppress
from pathlib import Path

from opgrad.reading import NoFile
from opgrad.training.formats import checkpoint_tables, mapped_files
from opgrad.writing import flush, flush_folder, naming, opened_in_place, replace_file


def replace_pair(path: Path, root: checkpoint_tables.Values) -> None:
    """Write a checkpoint and, into the file beside it, the data of its tensors."""
    tensors = [tensor for tensor in checkpoint_tables.tensors(root) if tensor["data"].nbytes]
    length = sum(checkpoint_tables.aligned(tensor["data"].nbytes) for tensor in tensors)
    start, end = bytes_in_use(path) or (0, 0)
    offset = 0 if length <= start else checkpoint_tables.aligned(end)
    root["model"]["outside"] = True
    segments = []
    for tensor in tensors:
        segments.append((offset, tensor["data"]))
        tensor["offset"], tensor["data"] = offset, None
        offset += checkpoint_tables.aligned(segments[-1][1].nbytes)
    content = checkpoint_tables.contents(root)
    mapped_files.keep_values(data_path(path))
    data = opened_in_place(data_path(path))
    try:
        with naming(data_path(path)), data:
            for start, array in segments:
                data.seek(start)
                data.write(checkpoint_tables.raw(array).data)
            flush(data)
        flush_folder(path.parent)
        replace_file(path, content)
    finally:
        with suppress(OSError):
            cut_data(path)


def data_path(path: Path) -> Path:
    """The file beside a checkpoint that has its values, under the name that onnxruntime-training looks for."""
    return path.with_name(path.name + ".data")


def bytes_in_use(path: Path) -> tuple[int, int] | None:
    """From where to where a checkpoint's values reach in the file beside it; None if it has none there.

    An OSError other than FileNotFoundError is raised, because it does not tell whether there are values.
    """
    try:
        available = data_path(path).stat().st_size
        root = checkpoint_tables.decode(mapped_files.content(path))
        places = [
            (each["offset"], checkpoint_tables.nbytes(each))
            for each in checkpoint_tables.tensors(root)
            if each["data"] is None
        ]
    except (FileNotFoundError, NoFile, checkpoint_tables.Damaged):
        return None
    start = min((offset for offset, _ in places), default=0)
    end = max((offset + length for offset, length in places), default=0)
    return (start, end) if root["model"]["outside"] and start >= 0 and end <= available else None


def cut_data(path: Path) -> None:
    """Shorten the file beside a checkpoint to what the checkpoint refers to; remove it if that is nothing."""
    used = bytes_in_use(path)
    if used is None:
        data_path(path).unlink(missing_ok=True)
    else:
        os.truncate(data_path(path), used[1])
