"""Links object files and identifies the CPU without LLVM, on Linux with x86-64.

A process that finds all its kernels in the cache needs llvmlite for nothing else, and llvmlite takes 55 MB of memory.
An object file or a system that this code does not support is left to LLVM.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

HERE = sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32

# --- object files ----------------------------------------------------------------------------------------------------

OBJECT_FILE = b"\x7fELF\x02\x01"  # 64 bits, the least significant byte first
RELOCATABLE, X86_64 = 1, 62
SECTIONS_AT, SECTIONS = 40, 60  # in the file's header: where the table of sections is, and how many there are
SECTION, SYMBOL, RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
CONTENTS, SYMBOLS, RELOCATIONS, SHORT_RELOCATIONS, UNWINDING = 1, 2, 4, 9, 0x70000001  # kinds of sections
WRITE, IN_MEMORY = 1, 2  # flags of sections
UNDEFINED = 0  # the section of a symbol that is elsewhere
# Kinds of relocations: the address of a symbol in 64 bits, and distances in 32 bits: to a symbol, to a function, which
# may be too far away, and to a place that holds the address of a symbol.
ADDRESS, DISTANCE, CALL, PLACES_OF_ADDRESSES = 1, 2, 4, (9, 41, 42)
# A jump (nop; jmp *0(%rip)) to the address that follows it: calls of functions that are too far away go there, and the
# address is the place that holds it.
JUMP = bytes.fromhex("6690 ff2500000000")
JUMP_BYTES = len(JUMP) + 8
FAR = (1 << 31) - (1 << 16)  # bytes that a distance in 32 bits reaches, less what is added to it
# The functions of the C library that LLVM's code calls; the mathematical ones on CPUs without FMA or SSE 4.1.
CALLED = ("memcpy", "memmove", "memset", "fma", "fmaf", "rint", "rintf")
named: dict[str, int] = {}  # addresses that kernels find by name (`memory.named_address`)
FAILED = ctypes.c_size_t(-1).value  # the result of mmap if it fails


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Relocation(NamedTuple):
    """Something to write into the code at a place, where the symbol with this number is needed."""

    place: int
    kind: int
    symbol: int
    addend: int


class _Unforeseen(Exception):
    """An object file that has to be linked by LLVM."""


def give_name(name: str, address: int) -> None:
    """Give an address a name, by which functions that are linked later find it. It must stay valid."""
    named[name] = address


def link(code: bytes, exported: str) -> int | None:
    """Load an object file of LLVM into executable memory, for good; returns the address of its function `exported`.

    None if it cannot be linked here: on another system, or if it holds more than code and constants which addresses
    and distances connect. Tables for unwinding are left out, since kernels raise nothing.
    """
    if not HERE or not code.startswith(OBJECT_FILE) or struct.unpack_from("<HH", code, 16) != (RELOCATABLE, X86_64):
        return None
    try:
        return _ObjectFile(code).load(exported)
    except _Unforeseen:
        return None


class _ObjectFile:
    def __init__(self, code: bytes):
        self._code = code
        (table,), (count,) = struct.unpack_from("<Q", code, SECTIONS_AT), struct.unpack_from("<H", code, SECTIONS)
        self._sections = [_Section(*SECTION.unpack_from(code, table + SECTION.size * i)) for i in range(count)]
        self._places: dict[int, int] = {}  # where sections begin in memory
        self._size = 0
        for i, section in enumerate(self._sections):
            if section.flags & IN_MEMORY and section.kind != UNWINDING:
                self._place(i, section)

    def _place(self, number: int, section: _Section) -> None:
        if section.kind != CONTENTS or section.flags & WRITE:
            raise _Unforeseen
        alignment = max(section.alignment, 1)
        start = -(-self._size // alignment) * alignment
        self._places[number], self._size = start, start + section.size

    def load(self, exported: str) -> int:
        relocations = list(self._relocations())
        called = dict.fromkeys(each.symbol for each in relocations if each.kind in (CALL, *PLACES_OF_ADDRESSES))
        start = -(-self._size // JUMP_BYTES) * JUMP_BYTES
        jumps = {symbol: start + JUMP_BYTES * i for i, symbol in enumerate(called)}
        image = bytearray(start + JUMP_BYTES * len(jumps))
        base = new_memory(len(image))
        for number, place in self._places.items():
            section = self._sections[number]
            image[place : place + section.size] = self._content(section)
        symbols = list(self._symbols(base))
        for symbol, place in jumps.items():
            image[place : place + JUMP_BYTES] = JUMP + _known(symbols[symbol][1]).to_bytes(8, "little")
        for place, kind, symbol, addend in relocations:
            address = _known(symbols[symbol][1])
            if kind == ADDRESS:
                struct.pack_into("<Q", image, place, address + addend)
            else:
                distances = address - base - place, jumps.get(symbol, 0) - place
                struct.pack_into("<i", image, place, _distance(kind, *distances) + addend)
        make_executable(base, image)
        return _known(dict(symbols)[exported])

    def _content(self, section: _Section) -> bytes:
        return self._code[section.offset : section.offset + section.size]

    def _symbols(self, base: int) -> Iterator[tuple[str, int | None]]:
        """Names and addresses of all symbols; None for what is not in memory, and nowhere else."""
        for table in (each for each in self._sections if each.kind == SYMBOLS):
            names = self._content(self._sections[table.link])
            for at, _, _, number, value, _ in SYMBOL.iter_unpack(self._content(table)):
                name = names[at : names.index(b"\0", at)].decode()
                if number in self._places:
                    yield name, base + self._places[number] + value
                else:
                    yield name, (named.get(name) or _called().get(name)) if number == UNDEFINED else None

    def _relocations(self) -> Iterator[_Relocation]:
        for table in self._sections:
            if table.kind == RELOCATIONS and table.info in self._places:
                for at, what, addend in RELOCATION.iter_unpack(self._content(table)):
                    yield _Relocation(self._places[table.info] + at, what & 0xFFFFFFFF, what >> 32, addend)
            elif table.kind == SHORT_RELOCATIONS:
                raise _Unforeseen


def _distance(kind: int, to_symbol: int, to_jump: int) -> int:
    """What a relocation of a distance is about: the symbol itself, the jump to it, or the address behind the jump."""
    is_near = -FAR <= to_symbol < FAR
    if kind in PLACES_OF_ADDRESSES:
        return to_jump + len(JUMP)
    if kind == CALL or (kind == DISTANCE and is_near):
        return to_symbol if is_near else to_jump
    raise _Unforeseen


def _known(address: int | None) -> int:
    if address is None:
        raise _Unforeseen
    return address


# --- memory ----------------------------------------------------------------------------------------------------------


@functools.cache
def _system() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    system.mmap.restype, system.mmap.argtypes = word, (word, word, number, number, number, ctypes.c_long)
    system.mprotect.argtypes = (word, word, number)
    return system


@functools.cache
def _called() -> dict[str, int]:
    system = _system()
    there = (name for name in CALLED if hasattr(system, name))
    return {name: ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in there}


def new_memory(size: int) -> int:
    """The address of new pages. They are never freed, since threads may run code while the interpreter ends."""
    protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = int(_system().mmap(0, size, protection, kind, -1, 0))
    if address == FAILED:
        raise MemoryError(f"opgrad: no memory for {size} bytes of machine code: {os.strerror(ctypes.get_errno())}")
    return address


def make_executable(address: int, image: bytes | bytearray) -> None:
    """Fill pages with code, and make them executable and read-only."""
    ctypes.memmove(address, bytes(image), len(image))
    if _system().mprotect(address, len(image), mmap.PROT_READ | mmap.PROT_EXEC):
        error = ctypes.get_errno()
        raise OSError(error, f"opgrad: machine code cannot be made executable: {os.strerror(error)}")


# --- the CPU ---------------------------------------------------------------------------------------------------------

# void ask(uint32_t leaf, uint32_t subleaf, uint32_t answer[4]): eax, ebx, ecx and edx of CPUID. Then a function that
# returns XCR0, the registers that the system saves: push rbx; mov r8, rdx; mov eax, edi; mov ecx, esi; cpuid;
# mov [r8], eax; …; pop rbx; ret; and xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret.
ASK = bytes.fromhex("53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")
SAVED = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")
# Leaf, subleaf and registers that tell one kind of CPU from another, as LLVM reads them; the others name the core.
LEAVES = (
    *((0, 0, "abcd"), (1, 0, "acd"), (7, 0, "abcd"), (7, 1, "abcd"), (7, 2, "abcd"), (0xD, 1, "a"), (0x14, 0, "abcd")),
    *((0x19, 0, "b"), (0x1E, 1, "a"), (0x24, 0, "abcd"), (0x80000001, 0, "acd"), (0x80000008, 0, "b")),
)
EXTENDED = 0x80000000
SYSTEM_SAVES = 1 << 27  # in ecx of leaf 1: there is an XCR0


@functools.cache
def cpu() -> str:
    """A digest of what the CPU says it can do: where it is the same, LLVM makes the same code."""
    code = new_memory(len(ASK + SAVED))
    make_executable(code, ASK + SAVED)
    number, answer = ctypes.c_uint32, (ctypes.c_uint32 * 4)()
    ask = ctypes.CFUNCTYPE(None, number, number, ctypes.c_void_p)(code)

    def of(leaf: int, subleaf: int) -> dict[str, int]:
        ask(leaf, subleaf, ctypes.addressof(answer))
        return dict(zip("abcd", answer, strict=True))

    last = {first: of(first, 0)["a"] for first in (0, EXTENDED)}
    found = [
        [of(leaf, subleaf)[register] for register in registers] if leaf <= last[leaf & EXTENDED] else None
        for leaf, subleaf, registers in LEAVES
    ]
    saved = ctypes.CFUNCTYPE(ctypes.c_uint64)(code + len(ASK))() if of(1, 0)["c"] & SYSTEM_SAVES else 0
    return hashlib.sha256(repr((found, saved)).encode()).hexdigest()
