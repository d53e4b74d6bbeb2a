"""Files of named arrays in the safetensors format: the length of a header, the header as JSON, the arrays' bytes.

Nothing in a file is executed. A fault raises `Damaged`; the file's name followed by its text makes a sentence.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from opgrad.training.files import mapped_files
from opgrad.training.files.checkpoint_tables import Damaged

METADATA = "__metadata__"
LENGTH = 8  # bytes of the number with the header's length, at the beginning of a file
LARGEST_HEADER = 100_000_000  # the most bytes of a header by the format's definition
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind).newbyteorder("<")
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Entry = tuple[np.dtype[Any], tuple[int, ...]]


def entries(tensors: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """The entries of a header for tensors that follow each other in this order."""
    found, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        found[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    return found


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The content of a file with these arrays, behind each other in this order."""
    described = entries({name: (array.dtype, array.shape) for name, array in tensors.items()})
    header = json.dumps({METADATA: dict(metadata), **described}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH)  # so that the arrays are aligned
    return b"".join([len(header).to_bytes(LENGTH, "little"), header, data(tensors)])


def data(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of arrays behind each other."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())


def starts_like_one(content: bytes | memoryview) -> bool:
    """Whether a file may be of this format, by its first bytes."""
    return len(content) > LENGTH and content[LENGTH : LENGTH + 1] == b"{"


def decode(content: bytes | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str], memoryview]:
    """The arrays of a file by name, its metadata, and the bytes of all arrays.

    The arrays are read-only. Raises `Damaged`.
    """
    header, start = _header(content)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise Damaged("is damaged, its metadata are no texts")
    values, arrays, end = memoryview(content)[start:], {}, 0
    for name, entry in header.items():
        dtype, shape, first, last = _entry(name, entry)
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


def _header(content: bytes | memoryview) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(content[:LENGTH], "little")
    if not starts_like_one(content) or length > min(len(content) - LENGTH, LARGEST_HEADER):
        raise Damaged("is no safetensors file, or cut short")
    try:
        header = json.loads(bytes(content[LENGTH : LENGTH + length]))
    except (ValueError, RecursionError):
        raise Damaged("is damaged, its header is no JSON") from None
    if not isinstance(header, dict):
        raise Damaged("is damaged, its header is no JSON object")
    return header, LENGTH + length


def _entry(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Dtype, shape, first byte and end of a tensor."""
    try:
        dtype, shape, (first, last) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        right = all(type(each) is int and each >= 0 for each in (*shape, first, last)) and len(shape) <= 32
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise Damaged(f"is damaged, its header says of {name!r} what has no meaning")
    return dtype, shape, first, last
