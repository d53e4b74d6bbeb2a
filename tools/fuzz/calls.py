"""Fuzzes native calls: arguments of any kind, dtype, stride and overlap, views of one buffer.

The bytes choose an operator, its arrays, and whether a result is given. A call either raises what the contract names
and has written nothing, or writes its result alone, with the values that the same call gives for copies.
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import opgrad

REFUSED = (ValueError, TypeError, NotImplementedError)
DTYPES = [np.dtype(each) for each in ("f4", "f8", "f2", ml_dtypes.bfloat16, "i4", "?", ">f4", "O")]
BYTES = 4096
OPERATORS = (
    opgrad.relu, opgrad.relu_grad, opgrad.tanh_grad, opgrad.softmax, opgrad.softmax_grad, opgrad.log_softmax_grad,
    opgrad.gelu_grad, opgrad.quick_gelu_grad,
)  # fmt: skip
ARRAYS = {opgrad.relu: 1, opgrad.softmax: 1}  # two for the others
ALONE = "a text", 1.5, None, [1.0, 2.0], np.float32(1), object()


class Choices:
    """Small numbers that the bytes choose; 0 once they are used up."""

    def __init__(self, data: bytes):
        self._data = iter(data)

    def below(self, count: int) -> int:
        return next(self._data, 0) % count


def view(choices: Choices, buffer: np.ndarray) -> Any:
    """An array in the buffer, or something that is none."""
    kind = choices.below(16)
    if kind == 15:
        return ALONE[choices.below(len(ALONE))]
    dtype, rank = DTYPES[choices.below(len(DTYPES))] if kind > 11 else DTYPES[choices.below(4)], choices.below(4)
    if dtype.hasobject:
        return np.empty((2, 3), object)
    shape = [choices.below(6) for _ in range(rank)]
    strides = [(choices.below(13) - 4) * dtype.itemsize + (choices.below(40) == 39) for _ in range(rank)]
    offset = choices.below(64) * 8 + (choices.below(20) == 19)
    low = offset + sum(min(0, (size - 1) * stride) for size, stride in zip(shape, strides, strict=True) if size)
    high = offset + sum(max(0, (size - 1) * stride) for size, stride in zip(shape, strides, strict=True) if size)
    if low < 0 or high + dtype.itemsize > BYTES:
        offset, strides = 1024, [dtype.itemsize] * rank
    made = np.ndarray(shape, dtype, buffer.data, offset, strides)
    made.flags.writeable = choices.below(8) != 7
    return made


def call(data: bytes) -> None:
    """One call, then the same again, which native code answers if it can."""
    choices = Choices(data)
    buffer = np.frombuffer(bytearray(np.random.default_rng(choices.below(8)).bytes(BYTES)), np.uint8)
    operator = OPERATORS[choices.below(len(OPERATORS))]
    arguments = [view(choices, buffer) for _ in range(ARRAYS.get(operator, 2))]
    options: dict[str, Any] = {}
    if choices.below(2):
        options["out"] = arguments[0] if choices.below(3) == 2 else view(choices, buffer)
    if choices.below(4) == 3 and "softmax" in operator.__name__:
        options["axis"] = (choices.below(7) - 3, (0, 1), "0", 1.0, None)[choices.below(5)]
    for _ in range(2):
        before, copies = buffer.copy(), [np.array(each) if isinstance(each, np.ndarray) else each for each in arguments]
        with np.errstate(all="ignore"):
            try:
                found = operator(*arguments, **options)
            except REFUSED:
                assert (buffer == before).all(), "a refused call has written"
                continue
            _check(operator, copies, options, found, before, buffer)


def _check(operator: Any, copies: list[Any], options: dict[str, Any], found: Any, before: Any, buffer: Any) -> None:
    """Whether only the result was written, and with the bits that the same call gives on copies."""
    out = options.get("out")
    fresh = {} if out is None else {"out": np.empty(out.shape, out.dtype)}  # softmax writes any dtype
    expected = operator(*copies, **options | fresh)
    assert out is None or found is out, "another array than out is returned"
    assert found.dtype == expected.dtype, "the copies give another dtype"
    assert found.shape == expected.shape, "the copies give another shape"
    if out is not None:
        restored = np.ndarray(BYTES, np.uint8, bytearray(before.tobytes()))
        place = out.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
        np.ndarray(out.shape, out.dtype, restored.data, place, out.strides)[...] = found
        assert (restored == buffer).all(), "cells beside out were written"
    else:
        assert (buffer == before).all(), "an argument was written"
    assert np.array(found).tobytes() == expected.tobytes() or _are_close(found, expected), (
        "the copies give other values"
    )


def _are_close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Strides choose loops, which add up in other orders: a few of the last digits may differ."""
    epsilon = float(ml_dtypes.finfo(found.dtype).eps)
    wide, other = found.astype(np.float64), expected.astype(np.float64)
    largest = np.nanmax(np.abs(other), initial=0, where=np.isfinite(other))
    return bool(np.allclose(wide, other, rtol=16 * epsilon, atol=16 * epsilon * largest, equal_nan=True))


def seeds() -> Iterator[bytes]:
    """Calls that are answered: of each operator, contiguous and not, with and without out."""
    for number in range(len(OPERATORS)):
        for strides in ((4, 24), (10, 4), (5, 29)):
            one = bytes([0, 0, 2, 3, 4, strides[0], 0, strides[1] % 13, 0, 8, 0, 0])
            yield bytes([1, number]) + one + one + bytes([0, 0])
            yield bytes([2, number]) + one + one + bytes([1, 2, 0])
