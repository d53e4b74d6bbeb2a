"""Raw memory and control for native functions: words, atomics, calls through addresses.

Addresses and counts are int64. Every name here has a meaning only inside a compiled function;
`opgrad.cpu.compiler.lowering` gives it. They are plain functions so that a warm start never imports Numba.
"""

from typing import NoReturn


def _compiled_only(*_: object) -> NoReturn:
    raise TypeError("this function exists only inside compiled kernels")


def load_word(address: int, index: int) -> int:
    """The int64 at `address + 8 * index`."""
    _compiled_only()


def load_i32(address: int, index: int) -> int:
    """The int32 at `address + 4 * index`, as int64."""
    _compiled_only()


def load_u8(address: int, index: int) -> int:
    """The byte at `address + index`, as int64."""
    _compiled_only()


def load_f64(address: int, index: int) -> float:
    """The float64 at `address + 8 * index`."""
    _compiled_only()


def store_word(address: int, index: int, value: int) -> None:
    """Write the int64 at `address + 8 * index`."""
    _compiled_only()


def store_i32(address: int, index: int, value: int) -> None:
    """Write the low 32 bits of `value` at `address + 4 * index`."""
    _compiled_only()


def store_u8(address: int, index: int, value: int) -> None:
    """Write the low 8 bits of `value` at `address + index`."""
    _compiled_only()


def store_f64(address: int, index: int, value: float) -> None:
    """Write the float64 at `address + 8 * index`."""
    _compiled_only()


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy `count` bytes between addresses that do not overlap."""
    _compiled_only()


def stack_words(count: int) -> int:
    """The address of `count` int64 words on the stack, 64-byte aligned; `count` is a constant."""
    _compiled_only()


def call_address(address: int, *arguments: int) -> int:
    """Call the C function at `address` with int64 arguments; its int64 result."""
    _compiled_only()


def atomic_load(address: int) -> int:
    """The int64 at `address`, sequentially consistent."""
    _compiled_only()


def atomic_store(address: int, value: int) -> None:
    """Write the int64 at `address`, sequentially consistent."""
    _compiled_only()


def atomic_add(address: int, value: int) -> int:
    """Add to the int64 at `address`; what stood there before."""
    _compiled_only()


def atomic_swap_if(address: int, expected: int, value: int) -> bool:
    """Write `value` if `expected` stands there, in one step; whether it did."""
    _compiled_only()


def spin_hint() -> None:
    """Tell the core that this is a waiting loop."""
    _compiled_only()


def store_fence() -> None:
    """Make non-temporal stores visible before any later store."""
    _compiled_only()
