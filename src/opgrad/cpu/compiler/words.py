"""Raw memory and control for native functions: words, atomics, calls through addresses.

Addresses and counts are int64. Every name here has a meaning only inside a compiled function, which
`opgrad.cpu.compiler.lowering` gives it. They are plain functions so that a warm start never imports Numba.
"""

from opgrad.cpu.compiler import only_compiled

CACHE_LINE = 64  # bytes


def load_word(address: int, index: int) -> int: ...  # the int64 at `address + 8 * index`
def load_i32(address: int, index: int) -> int: ...  # the int32 at `address + 4 * index`, as int64
def load_u8(address: int, index: int) -> int: ...  # the byte at `address + index`, as int64
def load_f64(address: int, index: int) -> float: ...  # the float64 at `address + 8 * index`
def store_word(address: int, index: int, value: int) -> None: ...
def store_i32(address: int, index: int, value: int) -> None: ...  # the low 32 bits
def store_u8(address: int, index: int, value: int) -> None: ...  # the low 8 bits
def store_f64(address: int, index: int, value: float) -> None: ...
def copy_bytes(target: int, source: int, count: int) -> None: ...  # between addresses that do not overlap
# The address of int64 words on the stack, 64-byte aligned, with whatever was there; a constant count.
def stack_words(count: int) -> int: ...


# The address that this process has given this name (`machine_code.give_name`), before the function is linked: for
# functions which are called from C with nothing that leads to their memory.
def named_address(name: str) -> int: ...


# Call the C function at `address` with int64 arguments; its int64 result.
def call_address(address: int, *arguments: int) -> int: ...


# --- on the int64 at an address, sequentially consistent -----------------------------------------------------------


def atomic_load(address: int) -> int: ...
def atomic_store(address: int, value: int) -> None: ...
def atomic_add(address: int, value: int) -> int: ...  # what stood there before
# Write `value` if `expected` stands there, in one step; whether it did.
def atomic_swap_if(address: int, expected: int, value: int) -> bool: ...


# --- control -------------------------------------------------------------------------------------------------------


def spin_hint() -> None: ...  # tells the core that this is a waiting loop
def store_fence() -> None: ...  # makes non-temporal stores visible before any later store


only_compiled(globals())
