"""Weights files of exported steps: parameters and moments in the safetensors format, with a SHA-256 of their bytes.

The format: the length of a header, the header as JSON, the arrays' bytes; nothing in a file is executed. A fault raises
`Damaged`; the file's name followed by its text makes a sentence.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from opgrad.training.files import mapped_files
from opgrad.training.files.checkpoint_tables import Damaged

METADATA = "__metadata__"
LENGTH = 8  # bytes of the number with the header's length, at the beginning of a file
LARGEST_HEADER = 100_000_000  # the most bytes of a header by the format's definition
KINDS = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8")
DTYPES: dict[str, np.dtype[Any]] = {each: np.dtype(f"<{each[0].lower()}{int(each[1:]) // 8}") for each in KINDS}
DTYPES |= {"BOOL": np.dtype(np.bool_), "BF16": np.dtype(ml_dtypes.bfloat16).newbyteorder("<")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Entry = tuple[np.dtype[Any], tuple[int, ...]]


def entries(tensors: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """The entries of a header for tensors that follow each other in this order."""
    found, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        found[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    return found


def encode_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The content of a file with these arrays, behind each other in this order."""
    described = entries({name: (array.dtype, array.shape) for name, array in tensors.items()})
    header = json.dumps({METADATA: dict(metadata), **described}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH)  # so that the arrays are aligned
    return b"".join([len(header).to_bytes(LENGTH, "little"), header, data(tensors)])


def data(tensors: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())


def starts_like_one(content: bytes | memoryview) -> bool:
    """Whether a file may be of this format, by its first bytes."""
    return len(content) > LENGTH and content[LENGTH : LENGTH + 1] == b"{"


def decode_tensors(content: bytes | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str], memoryview]:
    """The arrays of a file by name, its metadata, and the bytes of all arrays.

    The arrays are read-only. Raises `Damaged`.
    """
    length = int.from_bytes(content[:LENGTH], "little")
    if not starts_like_one(content) or length > min(len(content) - LENGTH, LARGEST_HEADER):
        raise Damaged("is no safetensors file, or cut short")
    try:
        header = json.loads(bytes(content[LENGTH : LENGTH + length]))
    except (ValueError, RecursionError):
        raise Damaged("is damaged, its header is no JSON") from None
    if not isinstance(header, dict):
        raise Damaged("is damaged, its header is no JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise Damaged("is damaged, its metadata are no texts")
    values, arrays, end = memoryview(content)[LENGTH + length :], {}, 0
    for name, entry in header.items():
        try:
            dtype, shape, (first, last) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            right = all(type(each) is int and each >= 0 for each in (*shape, first, last)) and len(shape) <= 32
        except (KeyError, TypeError, ValueError):
            right = False
        if not right:
            raise Damaged(f"is damaged, its header says of {name!r} what has no meaning")
        if first != end or last - first != math.prod(shape) * dtype.itemsize or last > len(values):
            raise Damaged(
                f"is damaged or cut short, {name!r} of shape {shape} is said to be at bytes {first} to {last}"
            )
        try:
            arrays[name] = mapped_files.array(values, dtype, math.prod(shape), first).reshape(shape)
        except (OverflowError, ValueError):  # the array is empty, and a dimension is too large for NumPy
            raise Damaged(f"is damaged, {name!r} has shape {shape}") from None
        end = last
    if end != len(values):
        raise Damaged(f"is damaged, {len(values)} bytes of arrays follow, expected {end}")
    return arrays, metadata, values


FORMAT, VERSION = "opgrad.weights", "1"
LEARNING_RATE = 1e-3  # the learning rate of a file that has none
MOMENTS = ("momentum0", "momentum1")
PRESENT = ("float32", "float16")  # the dtypes of parameters in training graphs


@dataclass(frozen=True)
class Weights:
    """The content of a weights file.

    trainable, statistics: parameters and running statistics by name. moments: those of every trainable parameter by its
    name and by their own; empty if there are none in the file. dtype: that of parameters in the training graph.
    optimizer: the name of the rule. step: the steps done. tune: of a fine-tuning what identifies it, as JSON.
    """

    trainable: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    moments: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    dtype: str = "float32"
    optimizer: str = ""
    step: int = 0
    learning_rate: float = LEARNING_RATE
    tune: str = ""


def encode(weights: Weights) -> bytes:
    """The content of a file: trainable parameters, statistics, then the moments, kind by kind."""
    arrays = {**weights.trainable, **weights.statistics}
    names = list(dict.fromkeys(name for each in weights.moments.values() for name in each))
    arrays |= {f"{moment}/{name}": weights.moments[name][moment] for moment in names for name in weights.trainable}
    digest = hashlib.sha256(data(arrays)).hexdigest()
    metadata = fixed_metadata(weights.optimizer, weights.dtype, list(weights.statistics), weights.tune)
    metadata |= {"step": str(weights.step), "learning_rate": repr(weights.learning_rate), "sha256": digest}
    return encode_tensors(arrays, metadata)


def fixed_metadata(optimizer: str, dtype: str, statistics: Sequence[str], tune: str) -> dict[str, str]:
    """The metadata that all weights files of a step share; they differ in step, learning_rate and sha256."""
    named = {"optimizer": optimizer, "dtype": dtype, "statistics": json.dumps(statistics)}
    named |= {"tune": tune} if tune else {}
    return {"format": FORMAT, "version": VERSION, **named}


def decode(content: bytes | memoryview) -> Weights:
    """The content of a file; parameters get the dtype of the training graph. Raises `Damaged`."""
    arrays, metadata, data = decode_tensors(content)
    if metadata.get("format") != FORMAT:
        raise Damaged("is a safetensors file, but no weights file of an exported step")
    if metadata.get("version") != VERSION:
        raise Damaged(f"has version {metadata.get('version')}, expected {VERSION}")
    if metadata.get("sha256") != hashlib.sha256(data).hexdigest():
        raise Damaged("is damaged, its SHA-256 is another")
    optimizer, dtype = metadata.get("optimizer", ""), metadata.get("dtype")
    if dtype not in PRESENT:
        raise Damaged(f"is damaged, its dtype is {dtype!r}")
    try:
        names = json.loads(metadata.get("statistics", "[]"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(each, str) and each in arrays for each in names):
        raise Damaged("is damaged, its running statistics are none of its tensors")
    parted = {name: name.partition("/") for name in arrays}
    of_parameters = {name for name, (kind, _, owner) in parted.items() if kind in MOMENTS and owner in arrays}
    held = {name: each.astype(dtype, copy=False) for name, each in arrays.items() if name not in of_parameters}
    trainable = {name: each for name, each in held.items() if name not in names}
    moments: dict[str, dict[str, np.ndarray]] = {}
    for key in sorted(of_parameters):
        moment, _, parameter = parted[key]
        if parameter not in trainable or arrays[key].shape != trainable[parameter].shape:
            raise Damaged(f"is damaged, {key!r} is no moment of a parameter")
        moments.setdefault(parameter, {})[moment] = arrays[key]
    return Weights(
        trainable=trainable,
        statistics={name: held[name] for name in names},
        moments=moments,
        dtype=dtype,
        optimizer=optimizer,
        step=_number(metadata, "step", int),
        learning_rate=_number(metadata, "learning_rate", float),
        tune=metadata.get("tune", ""),
    )


def _number(metadata: Mapping[str, str], name: str, kind: Any) -> Any:
    default = {"step": "0", "learning_rate": str(LEARNING_RATE)}[name]
    try:
        value = kind(metadata.get(name, default))
    except ValueError:
        value = -1
    if not 0 <= value < math.inf or (kind is int and value >= 2**63):
        raise Damaged(f"is damaged, its {name} is {metadata.get(name)!r}")
    return value
