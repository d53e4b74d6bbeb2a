"""The operations of opgrad.cpu.compiler.words on checked memory."""

import ctypes
from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler.interpret.regions import REGIONS, Region, bytes_at
from opgrad.cpu.compiler.words import CACHE_LINE

FUNCTIONS: dict[int, Callable[..., int]] = {}  # interpreted kernels by the addresses that plans hold
STACK: list[Any] = []  # the blocks of the kernels that run now


def _loads(kind: Any) -> Callable[[int, int], Any]:
    size = ctypes.sizeof(kind)
    return lambda address, index: kind.from_buffer(bytes_at(int(address) + int(index) * size, size)).value


def _stores(kind: Any) -> Callable[[int, int, Any], None]:
    size = ctypes.sizeof(kind)

    def store(address: int, index: int, value: Any) -> None:
        place = kind.from_buffer(bytes_at(int(address) + int(index) * size, size))
        place.value = float(value) if kind is ctypes.c_double else int(value)

    return store


def _copy_bytes(target: int, source: int, count: int) -> None:
    if count > 0:
        data = bytes(bytes_at(int(source), int(count)))
        ctypes.memmove(bytes_at(int(target), int(count)), data, int(count))


def _stack_words(count: int) -> int:
    block = (ctypes.c_int64 * (count + 8))()
    STACK.append(block)
    address = ctypes.addressof(block)
    address += -address % CACHE_LINE
    REGIONS.add(Region(address, address + 8 * count, "a kernel's stack"))
    return address


def _call_address(address: int, *arguments: int) -> int:
    """A native function of Python is called as it is, so that the caller gets exceptions; others by their address."""
    function = FUNCTIONS.get(int(address))
    if function is not None:
        return function(*map(int, arguments))
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))(address)(*map(int, arguments)))


def _atomic_add(address: int, value: int) -> int:
    before = OPERATIONS["load_word"](address, 0)
    OPERATIONS["store_word"](address, 0, before + value)
    return int(before)


def _atomic_swap_if(address: int, expected: int, value: int) -> bool:
    found = OPERATIONS["load_word"](address, 0) == expected
    if found:
        OPERATIONS["store_word"](address, 0, value)
    return bool(found)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "load_word": _loads(ctypes.c_int64),
    "load_i32": _loads(ctypes.c_int32),
    "load_u8": _loads(ctypes.c_uint8),
    "load_f64": _loads(ctypes.c_double),
    "store_word": _stores(ctypes.c_int64),
    "store_i32": _stores(ctypes.c_int32),
    "store_u8": _stores(ctypes.c_uint8),
    "store_f64": _stores(ctypes.c_double),
    "copy_bytes": _copy_bytes,
    "stack_words": _stack_words,
    "call_address": _call_address,
    "atomic_load": lambda address: OPERATIONS["load_word"](address, 0),
    "atomic_store": lambda address, value: OPERATIONS["store_word"](address, 0, value),
    "atomic_add": _atomic_add,
    "atomic_swap_if": _atomic_swap_if,
    "spin_hint": lambda: None,
    "store_fence": lambda: None,
}
