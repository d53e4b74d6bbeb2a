"""Links object files without LLVM, on Linux with x86-64 or arm64.

A process that finds all its kernels in the cache or in a pack needs llvmlite for nothing else, and llvmlite takes 55 MB
of memory. An object file or a system that this code does not support is left to LLVM.

A relocation names a place in the code and a symbol. Its kind says what is written to the place: the symbol's address,
a distance to the symbol, or a distance to a place that holds the symbol's address. Kinds have the numbers that the
architecture's supplement of the ELF standard gives them.
"""

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class UnforeseenError(Exception):
    """Something in an object file that has to be linked by LLVM."""


class Linkage(NamedTuple):
    """How object files of an architecture are linked.

    number: ELF's number of the architecture. jump: the code of a jump to the address that follows the jump; calls of
    functions that are too far away go there, and the address is the place that holds it. jumping: the kinds for which a
    symbol needs such a jump. write: write(image, base, relocation, address, jump) carries a relocation out in an image
    that will lie at `base`; `address` is that of the symbol, `jump` where in the image the jump to the symbol lies.
    """

    number: int
    jump: bytes
    jumping: frozenset[int]
    write: Callable[[bytearray, int, "Relocation", int, int], None]


class Relocation(NamedTuple):
    """Something to write into the code at a place, where the symbol with this number is needed."""

    place: int
    kind: int
    symbol: int
    addend: int


FAR = (1 << 31) - (1 << 16)  # bytes that a distance in 32 bits reaches, less what is added to it

# --- x86-64 ----------------------------------------------------------------------------------------------------------

# The address of a symbol in 64 bits, and distances in 32 bits: to a symbol, to a function, which may be too far away,
# and to a place that holds the address of a symbol.
ADDRESS, DISTANCE, CALL, PLACES_OF_ADDRESSES = 1, 2, 4, (9, 41, 42)
JUMP = bytes.fromhex("6690 ff2500000000")  # nop; jmp *0(%rip)


def _write_x86_64(image: bytearray, base: int, relocation: Relocation, address: int, jump: int) -> None:
    place, kind, _, addend = relocation
    if kind == ADDRESS:
        struct.pack_into("<Q", image, place, address + addend)
    else:
        struct.pack_into("<i", image, place, distance(kind, address - base - place, jump - place) + addend)


def distance(kind: int, to_symbol: int, to_jump: int) -> int:
    """What a relocation of a distance is about: the symbol itself, the jump to it, or the address behind the jump."""
    is_near = -FAR <= to_symbol < FAR
    if kind in PLACES_OF_ADDRESSES:
        return to_jump + len(JUMP)
    if kind == CALL or (kind == DISTANCE and is_near):
        return to_symbol if is_near else to_jump
    raise UnforeseenError


# --- arm64 -----------------------------------------------------------------------------------------------------------

ARM_JUMP = struct.pack("<2I", 0x58000050, 0xD61F0200)  # ldr x16, the next 8 bytes; br x16
ARM_ADDRESS, ARM_DISTANCES = 257, {260: "<q", 261: "<i"}  # a symbol's address, and distances to it, as data
ARM_CALLS = (282, 283)  # b and bl, which reach 128 MiB
ARM_NEAR = 1 << 27
# adrp, which adds a number of pages of 4 KiB; then an instruction that adds the lowest 12 bits of an address, which a
# load or store counts in its own size: kind -> the logarithm of that size.
ARM_PAGES, ARM_LOW_BITS = (275, 276), {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
ARM_PLACE_PAGES, ARM_PLACE_LOW_BITS = 311, {312: 3}  # the same two for the place that holds a symbol's address


def _write_aarch64(image: bytearray, base: int, relocation: Relocation, address: int, jump: int) -> None:
    place, kind, _, addend = relocation
    here, target = base + place, address + addend
    if kind == ARM_ADDRESS:
        struct.pack_into("<Q", image, place, target)
    elif kind in ARM_DISTANCES:
        struct.pack_into(ARM_DISTANCES[kind], image, place, target - here)
    elif kind in ARM_CALLS:
        away = target - here
        words = (away if -ARM_NEAR <= away < ARM_NEAR else base + jump - here) >> 2
        _set_bits(image, place, words & 0x3FFFFFF)
    elif kind in (*ARM_PAGES, *ARM_LOW_BITS):
        _write_address(image, here, place, target, ARM_LOW_BITS.get(kind))
    elif kind == ARM_PLACE_PAGES or kind in ARM_PLACE_LOW_BITS:
        _write_address(image, here, place, base + jump + len(ARM_JUMP), ARM_PLACE_LOW_BITS.get(kind))
    else:
        raise UnforeseenError


def _write_address(image: bytearray, here: int, place: int, target: int, size: int | None) -> None:
    """Write the pages between an instruction and an address into an adrp; or the lowest bits, in units of 1 << size."""
    if size is None:
        pages = (target >> 12) - (here >> 12)
        if not -(1 << 20) <= pages < 1 << 20:
            raise UnforeseenError
        _set_bits(image, place, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)
    else:
        _set_bits(image, place, (target & 0xFFF) >> size << 10)


def _set_bits(image: bytearray, place: int, bits: int) -> None:
    """Set bits of an instruction that the assembler has left 0."""
    (word,) = struct.unpack_from("<I", image, place)
    struct.pack_into("<I", image, place, word | bits)


# --- by the name that the system gives an architecture ---------------------------------------------------------------

LINKAGES: Mapping[str, Linkage] = {
    "x86_64": Linkage(62, JUMP, frozenset((CALL, *PLACES_OF_ADDRESSES)), _write_x86_64),
    "aarch64": Linkage(183, ARM_JUMP, frozenset((*ARM_CALLS, ARM_PLACE_PAGES, *ARM_PLACE_LOW_BITS)), _write_aarch64),
}


HERE = sys.platform == "linux" and platform.machine() in LINKAGES and sys.maxsize > 1 << 32

# --- object files ----------------------------------------------------------------------------------------------------

OBJECT_FILE = b"\x7fELF\x02\x01"  # 64 bits, the least significant byte first
RELOCATABLE = 1
SECTIONS_AT, SECTIONS = 40, 60  # in the file's header: where the table of sections is, and how many there are
SECTION, SYMBOL, RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
CONTENTS, SYMBOLS, RELOCATIONS, SHORT_RELOCATIONS = 1, 2, 4, 9  # kinds of sections
UNWINDING = b".eh_frame\0"  # the name of the section with tables for unwinding
WRITE, IN_MEMORY = 1, 2  # flags of sections
UNDEFINED = 0  # the section of a symbol that is elsewhere
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


def give_name(name: str, address: int) -> None:
    """Give an address a name, by which functions that are linked later find it. It must stay valid."""
    named[name] = address


def link(code: bytes, exported: str) -> int | None:
    """Load an object file of LLVM into executable memory, for good; returns the address of its function `exported`.

    None if it cannot be linked here: on another system, or if it holds more than code and constants which addresses
    and distances connect. Tables for unwinding are left out, since kernels raise nothing.
    """
    if not HERE or not code.startswith(OBJECT_FILE):
        return None
    if struct.unpack_from("<HH", code, 16) != (RELOCATABLE, LINKAGES[platform.machine()].number):
        return None
    try:
        return _ObjectFile(code).load(exported)
    except UnforeseenError:
        return None


class _ObjectFile:
    def __init__(self, code: bytes):
        self._code, self._linkage = code, LINKAGES[platform.machine()]
        (table,), (count,) = struct.unpack_from("<Q", code, SECTIONS_AT), struct.unpack_from("<H", code, SECTIONS)
        self._sections = [_Section(*SECTION.unpack_from(code, table + SECTION.size * i)) for i in range(count)]
        self._names = self._content(self._sections[struct.unpack_from("<H", code, SECTIONS + 2)[0]])
        self._places: dict[int, int] = {}  # where sections begin in memory
        self._size = 0
        for i, section in enumerate(self._sections):
            if section.flags & IN_MEMORY and not self._names.startswith(UNWINDING, section.name):
                self._place(i, section)

    def _place(self, number: int, section: _Section) -> None:
        if section.kind != CONTENTS or section.flags & WRITE:
            raise UnforeseenError
        alignment = max(section.alignment, 1)
        start = -(-self._size // alignment) * alignment
        self._places[number], self._size = start, start + section.size

    def load(self, exported: str) -> int:
        """Write the code to new pages; returns the address of a function. Raises UnforeseenError."""
        linkage, relocations = self._linkage, list(self._relocations())
        called = dict.fromkeys(each.symbol for each in relocations if each.kind in linkage.jumping)
        size = len(linkage.jump) + 8  # a jump and the address to which it leads
        start = -(-self._size // size) * size
        jumps = {symbol: start + size * i for i, symbol in enumerate(called)}
        image = bytearray(start + size * len(jumps))
        base = new_memory(len(image))
        try:
            for number, place in self._places.items():
                section = self._sections[number]
                image[place : place + section.size] = self._content(section)
            symbols = list(self._symbols(base))
            for symbol, place in jumps.items():
                image[place : place + size] = linkage.jump + _known(symbols[symbol][1]).to_bytes(8, "little")
            for each in relocations:
                linkage.write(image, base, each, _known(symbols[each.symbol][1]), jumps.get(each.symbol, 0))
            entry = _known(dict(symbols)[exported])
            make_executable(base, image)
        except BaseException:  # no code of these pages has run
            free_memory(base, len(image))
            raise
        return entry

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

    def _relocations(self) -> Iterator[Relocation]:
        for table in self._sections:
            if table.kind == RELOCATIONS and table.info in self._places:
                for at, what, addend in RELOCATION.iter_unpack(self._content(table)):
                    yield Relocation(self._places[table.info] + at, what & 0xFFFFFFFF, what >> 32, addend)
            elif table.kind == SHORT_RELOCATIONS:
                raise UnforeseenError


def _known(address: int | None) -> int:
    if address is None:
        raise UnforeseenError
    return address


# --- memory ----------------------------------------------------------------------------------------------------------


@functools.cache
def _system() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    system.mmap.restype, system.mmap.argtypes = word, (word, word, number, number, number, ctypes.c_long)
    system.mprotect.argtypes, system.munmap.argtypes = (word, word, number), (word, word)
    return system


@functools.cache
def _called() -> dict[str, int]:
    system = _system()
    there = (name for name in CALLED if hasattr(system, name))
    return {name: ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in there}


def new_memory(size: int) -> int:
    """The address of new pages. Those with code are never freed: threads may run it while the interpreter ends."""
    protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = int(_system().mmap(0, size, protection, kind, -1, 0))
    if address == FAILED:
        raise MemoryError(f"opgrad: no memory for {size} bytes of machine code: {os.strerror(ctypes.get_errno())}")
    return address


def free_memory(address: int, size: int) -> None:
    """Give back pages whose code nothing has been told of."""
    _system().munmap(address, size)


def make_executable(address: int, image: bytes | bytearray) -> None:
    """Fill pages with code, and make them executable and read-only.

    On arm64 a core's cache of instructions does not see what is written. Linux brings it up to date for pages that
    become executable.
    """
    ctypes.memmove(address, bytes(image), len(image))
    if _system().mprotect(address, len(image), mmap.PROT_READ | mmap.PROT_EXEC):
        error = ctypes.get_errno()
        raise OSError(error, f"opgrad: machine code cannot be made executable: {os.strerror(error)}")
