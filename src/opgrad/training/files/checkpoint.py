"""Checkpoints: what they hold, reading and writing them; `checkpoint_tables` describes the file.

A checkpoint is one or two files, which are replaced so that no crash and no other process leaves a broken one. Where
the values are in a second file, each checkpoint has its own, which is never changed: the first one has the name that
onnxruntime-training looks for, and one that takes the place of another has a name with the SHA-256 of its content,
which the checkpoint tells. Renaming the checkpoint is the one step that makes the new values the current ones; the old
file goes then, and stays as it is for those that have it mapped.
"""

import hashlib
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from opgrad.base import arguments, files
from opgrad.training.files import checkpoint_tables, mapped_files, weights

BESIDE = r"{}(\.[0-9a-f]{{16}})?\.data"  # names of files with the values of a checkpoint
FILLED = bytes(checkpoint_tables.ALIGNMENT)


def read_files(path: Path) -> tuple[memoryview, checkpoint_tables.Values | None, memoryview]:
    """The content of a checkpoint's file, its root table, and the content of the file with its values.

    All are of one time, whoever replaces them. Weights of a step have no table. Raises FileNotFoundError, `NoFile`,
    `Damaged`.
    """
    path = Path(os.path.realpath(path))
    while True:
        before = _file_state(path)
        content, values, missing = mapped_files.content(path), memoryview(b""), False
        has_tables = checkpoint_tables.is_one(content) or not weights.starts_like_one(content)
        root = checkpoint_tables.decode(content) if has_tables else None
        if root is not None and (data := _data_of(path, root)) is not None:
            try:
                values = mapped_files.content(data, follow=False)
            except FileNotFoundError:
                missing = True
        if before == _file_state(path):
            if missing:
                raise FileNotFoundError(f"{path} keeps its values in {data}, which is missing")
            return content, root, values


def replace_files(path: Path, root: checkpoint_tables.Values, outside: bool) -> None:
    """Write a checkpoint; outside: with the data of its tensors in the file beside it.

    Raises OSError if another one writes it at the same time.
    """
    with files.alone(path):
        old = data_of(path)
        new = _write_values(path, root) if outside else None
        try:
            files.replace_file(path, checkpoint_tables.contents(root))
        except BaseException:
            if new is not None and data_of(path) != new:
                new.unlink(missing_ok=True)
            raise
        # Values of checkpoints that are gone; a file without a digest in its name may be somebody else's.
        left = {path.with_name(name) for name in beside(path.parent, path.name) if name != data_path(path).name}
        for unused in (left if old is None else {*left, old}) - {new}:
            with suppress(OSError):  # the checkpoint stands
                unused.unlink()


def data_of(path: Path) -> Path | None:
    """The file with the values of a checkpoint; None if it has none, or if there is no checkpoint.

    An OSError other than FileNotFoundError is raised, because it does not tell whether there are values.
    """
    try:
        return _data_of(path, checkpoint_tables.decode(mapped_files.content(path)))
    except (FileNotFoundError, files.NoFile, checkpoint_tables.Damaged):
        return None


def beside(folder: Path, name: str) -> list[str]:
    """The files in a folder that are named as those with the values of a checkpoint of this name."""
    return [each for each in os.listdir(folder) if re.fullmatch(BESIDE.format(re.escape(name)), each)]


def data_path(path: Path, digest: str = "") -> Path:
    """The file beside a checkpoint that has its values. digest: that of its content, if it is part of the name."""
    return path.with_name(f"{path.name}{digest and f'.{digest[:16]}'}.data")


def _file_state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _data_of(path: Path, root: checkpoint_tables.Values) -> Path | None:
    digest = root["model"]["digest"] or ""
    if digest and not re.fullmatch("[0-9a-f]{64}", digest):
        raise checkpoint_tables.Damaged("is damaged, the digest of its values is none")
    return data_path(path, digest) if root["model"]["outside"] else None


def _write_values(path: Path, root: checkpoint_tables.Values) -> Path:
    """Write the file with the values of a checkpoint's tensors, and its name and their places into the tables."""
    root["model"]["outside"], offset, digest = True, 0, hashlib.sha256()
    with files.staged(path.parent, name=data_path(path).name) as folder:
        new = folder / data_path(path).name
        with files.naming(data_path(path)), files.created(new) as file:
            for tensor in (each for each in checkpoint_tables.tensors(root) if each["data"].nbytes):
                content = checkpoint_tables.raw(tensor["data"]).data
                for piece in (content, FILLED[: -content.nbytes % checkpoint_tables.ALIGNMENT]):
                    file.write(piece)
                    digest.update(piece)
                tensor["offset"], tensor["data"] = offset, None
                offset += checkpoint_tables.aligned(content.nbytes)
            files.flush(file)
        if os.path.lexists(path) or os.path.lexists(data_path(path)):
            root["model"]["digest"] = digest.hexdigest()
        final = data_path(path, root["model"].get("digest", ""))
        os.replace(new, folder / final.name)
    return final


T = TypeVar("T")


@dataclass(frozen=True)
class OptimizerGroup:
    """The state of an optimizer.

    step: the number of steps done.
    learning_rate: the learning rate that a schedule starts from, float32 in the file.
    moments: by trainable parameter and by name, "momentum0" and "momentum1" for AdamW, "momentum0" for SGD.
    """

    step: int
    learning_rate: float
    moments: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    trainable: the parameters that have gradients, by name.
    frozen: the parameters that have none, by name.
    optimizers: the state of the optimizer, by the name of its group, "group0"; empty if it was not saved.
    properties: numbers and texts that the user put in; floats are float32 in the file.
    nominal: True if the file has the names of the parameters without their values; the arrays are then empty.
    """

    trainable: dict[str, np.ndarray]
    frozen: dict[str, np.ndarray]
    optimizers: dict[str, OptimizerGroup] = field(default_factory=dict)
    properties: dict[str, int | float | str] = field(default_factory=dict)
    nominal: bool = False

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name."""
        return self.trainable | self.frozen


# --- reading ---------------------------------------------------------------------------------------------------------


@arguments.naming("read_checkpoint")
def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Read a checkpoint file of onnxruntime-training 1.19 or of `write_checkpoint`, or weights of an exported step.

    path: the file. If it keeps its values outside, they are in a file beside it, see `write_checkpoint`.
    Returns a `Checkpoint`. Its arrays are read-only views of the files' bytes; those of files above 1 MiB are mapped
    into memory and read when they are used; `write_checkpoint` never changes them. An array that is not aligned for its
    dtype is copied.
    Raises FileNotFoundError if there is no such file, another OSError if it cannot be read, and ValueError if it is no
    checkpoint, has another version, or is truncated or damaged.
    """
    path = Path(path)
    if not path.exists() and not (files.finish_interrupted(path.parent) and path.exists()):
        raise FileNotFoundError(f"there is no file {path}")
    try:
        content, root, outside = read_files(path)
        if root is not None:
            return _checkpoint(root, outside)
        held = weights.decode(content)  # moments of optimizers that only exported steps have are lost
        moments = held.moments if held.optimizer == "adamw" else {}
        if held.optimizer == "sgd":  # onnxruntime-training wants a moment for SGD, too; see `Trainer.checkpoint`
            moments = {name: {"momentum0": np.zeros_like(each)} for name, each in held.trainable.items()}
        groups = {"group0": OptimizerGroup(held.step, held.learning_rate, moments)} if moments else {}
        return Checkpoint(held.trainable, held.statistics, groups)
    except checkpoint_tables.Damaged as damage:
        raise ValueError(f"{path} {damage}") from None


def _checkpoint(root: checkpoint_tables.Values, outside: memoryview) -> Checkpoint:
    model, bag = root["model"], root["properties"] or {}
    nominal = model["nominal"]
    trainable, frozen = (_arrays(model[kind], outside, nominal) for kind in ("trainable", "frozen"))
    if twice := trainable.keys() & frozen.keys():
        raise checkpoint_tables.Damaged(f"is damaged, it names a parameter twice, {min(twice)!r}")
    optimizers = _unique((group["name"], _group(group, outside)) for group in root["optimizers"])
    properties = _unique((each["name"], each["value"]) for kind in bag.values() for each in kind)
    return Checkpoint(trainable, frozen, optimizers, properties, nominal)


def _group(group: checkpoint_tables.Values, outside: memoryview) -> OptimizerGroup:
    moments = _unique((each["parameter"], _arrays(each["tensors"], outside)) for each in group["moments"])
    return OptimizerGroup(group["step"], group["learning_rate"], moments)


def _arrays(
    tensors: Iterable[checkpoint_tables.Values], outside: memoryview, nominal: bool = False
) -> dict[str, np.ndarray]:
    return _unique((each["name"], _array(each, outside, nominal)) for each in tensors)


def _array(tensor: checkpoint_tables.Values, outside: memoryview, nominal: bool) -> np.ndarray:
    name, dims, content = tensor["name"], tuple(tensor["dims"]), tensor["data"]
    dtype = checkpoint_tables.dtype(tensor)
    if nominal:
        return np.frombuffer(b"", dtype)
    if content is None:
        start, count = tensor["offset"], checkpoint_tables.nbytes(tensor)
        if start < 0:
            raise checkpoint_tables.Damaged(f"is damaged, {name!r} has no values")
        if start + count > len(outside):
            last = f"{start} to {start + count}"
            raise checkpoint_tables.Damaged(
                f"has {name!r} at bytes {last} of the file beside it, which has {len(outside)} bytes"
            )
        content = mapped_files.array(outside, np.dtype(np.uint8), count, start)
    if checkpoint_tables.nbytes(tensor) != content.size:
        raise checkpoint_tables.Damaged(f"is damaged, {name!r} has shape {dims} and {content.size} bytes of {dtype}")
    if dtype == np.bool_ and content.max(initial=0) > 1:
        raise checkpoint_tables.Damaged(f"is damaged, {name!r} has bytes that are no bool")
    try:
        array = content.view(dtype).reshape(dims)
        array.flags.writeable = False
    except ValueError:  # the array is empty, and a dimension is too large for NumPy
        raise checkpoint_tables.Damaged(f"is damaged, {name!r} has shape {dims}") from None
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array


def _unique(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in items:
        if name in found:
            raise checkpoint_tables.Damaged(f"is damaged, it names {name!r} twice in the same place")
        found[name] = value
    return found


# --- writing ---------------------------------------------------------------------------------------------------------


@arguments.naming("write_checkpoint")
def write_checkpoint(checkpoint: Checkpoint, path: str | PathLike[str], *, external_data: bool | None = None) -> None:
    """Write a checkpoint file, which onnxruntime-training 1.19 opens too.

    checkpoint: what the file shall hold. Arrays are float32, float64, float16, bfloat16, integers or bool, in any
        layout. Floats, `learning_rate` and properties, are rounded to float32; a bool property becomes 0 or 1.
    path: the file, or a link to it. An older file stays whole until the new one is written and replaces it at once.
    external_data: whether the values go into a second file. Default: only if all of them together do not fit a
        FlatBuffer, 2 GiB. Its name is that of the first with ".data" appended, where onnxruntime-training looks for it;
        where there is a file of this name, or a checkpoint is replaced, sixteen digits of the content's SHA-256 are in
        front of that. A nominal checkpoint has no values to put there.
    Raises FileNotFoundError if the folder is missing, another OSError if writing fails, or if another one writes the
    same checkpoint at the same time, TypeError for a value, dtype or
    name of another type, ValueError for a name in use twice or not in Unicode, for a number that int64 or float32
    cannot hold, and if the values do not fit the one file that was asked for.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    path, root = files.destination(path), _root(checkpoint)
    needed, largest = checkpoint_tables.size(root), checkpoint_tables.LARGEST
    if external_data is False and needed > largest:
        raise ValueError(f"{path} needs {needed} bytes, expected at most {largest}")
    replace_files(path, root, outside=bool(external_data or needed > largest) and not checkpoint.nominal)


def _root(checkpoint: Checkpoint) -> checkpoint_tables.Values:
    if twice := checkpoint.trainable.keys() & checkpoint.frozen.keys():
        raise ValueError(f"{min(twice)!r} is both trainable and frozen")
    empty, groups = checkpoint.nominal, []
    for name, group in checkpoint.optimizers.items():
        moments = [
            {"parameter": _text("name", parameter), "tensors": [_tensor(*each) for each in arrays.items()]}
            for parameter, arrays in group.moments.items()
        ]
        rate = as_float32(f"learning_rate of {name!r}", group.learning_rate)
        step = _integer(f"step of {name!r}", group.step)
        groups.append({"name": _text("name", name), "step": step, "learning_rate": rate, "moments": moments})
    bag: checkpoint_tables.Values = {"integers": [], "floats": [], "texts": []}
    for name, value in checkpoint.properties.items():
        what, key = f"property {name!r}", _text("name", name)
        if isinstance(value, str):
            bag["texts"].append({"name": key, "value": _text(what, value)})
        elif isinstance(value, numbers.Integral | np.bool_):
            bag["integers"].append({"name": key, "value": _integer(what, value)})
        else:
            bag["floats"].append({"name": key, "value": as_float32(f"{what}", value)})
    return {
        "version": checkpoint_tables.VERSION,
        "model": {
            "trainable": [_tensor(name, array, empty) for name, array in checkpoint.trainable.items()],
            "frozen": [_tensor(name, array, empty) for name, array in checkpoint.frozen.items()],
            "nominal": checkpoint.nominal,
        },
        "optimizers": groups,
        "properties": bag if checkpoint.properties else None,
    }


def _tensor(name: str, array: np.ndarray, empty: bool = False) -> checkpoint_tables.Values:
    if not isinstance(array, np.ndarray | np.generic):
        raise TypeError(f"{name!r} is {type(array).__name__}, expected a NumPy array")
    array = np.asarray(array)  # arithmetic on arrays without dimensions gives NumPy scalars, which are no arrays
    element_type = checkpoint_tables.element_type(array.dtype)
    if element_type is None:
        expected = ", ".join(map(str, checkpoint_tables.ELEMENT_TYPES.values()))
        raise TypeError(f"{name!r} has dtype {array.dtype}, expected one of {expected}")
    values = {"name": _text("name", name), "dims": list(array.shape), "element_type": element_type, "data": array}
    return values | {"dims": [], "data": np.empty(0, array.dtype)} if empty else values


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} {value!r} is {type(value).__name__}, expected str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} {value!r} cannot be encoded in UTF-8") from None
    return value


def _integer(what: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral | np.bool_):
        raise TypeError(f"{what} is {type(value).__name__}, expected int")
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{what} is {value}, which int64 cannot hold")
    return int(value)


def as_float32(what: str, value: Any) -> float:
    """A number, rounded to float32. what: its name, for messages. Raises TypeError, or ValueError beyond float32."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is {type(value).__name__}, expected int, float or str")
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(float(value)))
    except OverflowError:  # an int that float64 cannot hold either
        rounded = math.inf
    if math.isinf(rounded) and value not in (math.inf, -math.inf):
        raise ValueError(f"{what} is {value}, which float32 cannot hold")
    return rounded
