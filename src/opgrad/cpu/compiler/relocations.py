"""How object files of two architectures are linked: what each kind of relocation writes into the code.

A relocation names a place in the code and a symbol. Its kind says what is written to the place: the symbol's address,
a distance to the symbol, or a distance to a place that holds the symbol's address. Kinds have the numbers that the
architecture's supplement of the ELF standard gives them.
"""

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple


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
