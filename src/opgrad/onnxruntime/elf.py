"""A shared object for Linux, written byte by byte: `RegisterCustomOps` jumps to the address in `opgrad_slot`.

`SessionOptions.register_custom_ops_library` takes only a file that exports that symbol. This file is the
whole of what a C compiler would be needed for.
"""

import struct

ENTRY, SLOT = "RegisterCustomOps", "opgrad_slot"
SLOT_BYTES = 8
PAGE = 0x10000  # the largest page size of any Linux on these processors

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
SYMBOL = struct.Struct("<IBBHQQ")
DYNAMIC = struct.Struct("<QQ")

SHARED_OBJECT = 3
SEGMENTS = 4
LOAD, DYNAMIC_SEGMENT, GNU_STACK = 1, 2, 0x6474E551
EXECUTE, WRITE, READ = 1, 2, 4
NULL, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 0, 4, 5, 6, 10, 11, 14
GLOBAL_FUNCTION, GLOBAL_OBJECT = 0x12, 0x11
DEFINED = 1  # any section index but 0 and the absolute one: the loader then adds the load address


def jump_x86_64(source: int, slot: int) -> bytes:
    """`endbr64; jmp *slot(%rip)` for code that stands at `source`."""
    code = bytes.fromhex("f30f1efa ff25")
    return code + struct.pack("<i", slot - (source + len(code) + 4))


def jump_aarch64(source: int, slot: int) -> bytes:
    """`bti c; adrp x16, slot; ldr x16, [x16, slot's offset in its page]; br x16`."""
    pages = (slot >> 12) - (source + 4 >> 12)
    address_page = 0x90000000 | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5 | 16
    load = 0xF9400000 | (slot & 0xFFF) // 8 << 10 | 16 << 5 | 16
    return struct.pack("<4I", 0xD503245F, address_page, load, 0xD61F0200)


# machine as the system names it -> (ELF's number for it, its jump through the slot)
MACHINES = {"x86_64": (62, jump_x86_64), "aarch64": (183, jump_aarch64)}


def _strings(*names: str) -> tuple[bytes, list[int]]:
    """A string table and the offset of each name in it."""
    table, offsets = b"\0", []
    for name in names:
        offsets.append(len(table))
        table += name.encode() + b"\0"
    return table, offsets


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16


def _segment(kind: int, flags: int, offset: int, address: int, size: int, alignment: int) -> bytes:
    return SEGMENT.pack(kind, flags, offset, address, address, size, size, alignment)


def shared_object(machine: str, name: str) -> bytes:
    """The bytes of the shared object `name` for a machine of `MACHINES`."""
    number, jump = MACHINES[machine]
    strings, (entry_name, slot_name, soname) = _strings(ENTRY, SLOT, name)
    symbols_at = _aligned(HEADER.size + SEGMENTS * SEGMENT.size)
    hash_at = symbols_at + 3 * SYMBOL.size
    one_bucket = struct.pack("<6I", 1, 3, 1, 0, 2, 0)  # buckets, symbols, first symbol; then each one's next
    strings_at = hash_at + len(one_bucket)
    code_at = _aligned(strings_at + len(strings))
    code_end = code_at + len(jump(0, 0))
    # The data follow in the file, but stand on a page of their own in memory.
    data_at = _aligned(code_end)
    data_address = data_at + PAGE
    table = {HASH: hash_at, STRTAB: strings_at, SYMTAB: symbols_at, STRSZ: len(strings), SYMENT: SYMBOL.size}
    dynamic = b"".join(DYNAMIC.pack(*pair) for pair in [*table.items(), (SONAME, soname), (NULL, 0)])
    slot_address = data_address + len(dynamic)
    data = dynamic + bytes(SLOT_BYTES)
    parts = {
        0: _headers(number, code_end, data_at, len(dynamic), len(data)),
        symbols_at: SYMBOL.pack(0, 0, 0, 0, 0, 0)
        + SYMBOL.pack(entry_name, GLOBAL_FUNCTION, 0, DEFINED, code_at, code_end - code_at)
        + SYMBOL.pack(slot_name, GLOBAL_OBJECT, 0, DEFINED, slot_address, SLOT_BYTES),
        hash_at: one_bucket,
        strings_at: strings,
        code_at: jump(code_at, slot_address),
        data_at: data,
    }
    image = bytearray(data_at + len(data))
    for offset, part in parts.items():
        image[offset : offset + len(part)] = part
    return bytes(image)


def _headers(number: int, code_end: int, data_at: int, dynamic_bytes: int, data_bytes: int) -> bytes:
    """The header of the file and those of its segments."""
    identity = b"\x7fELF\x02\x01\x01"
    sizes = (HEADER.size, SEGMENT.size, SEGMENTS, 0, 0, 0)
    data_address = data_at + PAGE
    return (
        HEADER.pack(identity, SHARED_OBJECT, number, 1, 0, HEADER.size, 0, 0, *sizes)
        + _segment(LOAD, READ | EXECUTE, 0, 0, code_end, PAGE)
        + _segment(LOAD, READ | WRITE, data_at, data_address, data_bytes, PAGE)
        + _segment(DYNAMIC_SEGMENT, READ | WRITE, data_at, data_address, dynamic_bytes, 8)
        + _segment(GNU_STACK, READ | WRITE, 0, 0, 0, 16)
    )
