"""The native function that XLA calls to run an operator; it is the same for all operators and does not need the GIL.

The call's one attribute begins with the digest of what is called (`registry`). With the sizes of all buffers it is the
key of a plan, which is looked up among the keyed plans. Python is asked for one that is new, and for the words
where a plan fails. Nothing is copied: kernels read and write XLA's memory.

XLA calls a handler with the address of a call frame, a C structure (`xla/ffi/api/c_api.h`, which jaxlib ships). Every
structure begins with its size, so a handler can tell one that has changed from the one that is described here: numbers
are bytes from its beginning. Fields are only ever added at an end.
"""

from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    Structure,
    at,
    atomic_load,
    behind,
    call_address,
    copy_bytes,
    load_i32,
    load_word,
    named_address,
    stack_words,
    store_i32,
    store_u8,
    store_word,
    structure,
)
from opgrad.cpu.plans import Keyed, find_keyed
from opgrad.cpu.runtime.plan import NO_MEMORY, REPORT

MAJOR = 0  # the version of the interface; another one may have moved anything
HEADER = "xla/ffi/api/c_api.h"  # in jaxlib's folder for those, where the minor version stands
MINOR_DEFINED = "#define XLA_FFI_API_MINOR "

# XLA_FFI_CallFrame, with the lists of arguments, results and attributes inside of it.
EXTENSION, API, STAGE = 8, 16, 32
ARGUMENTS, RESULTS, ATTRIBUTES = 40, 80, 120
FRAME_BYTES = 168  # up to the attributes; what follows is not read
# XLA_FFI_Args and XLA_FFI_Rets: their number, their kinds and their addresses. XLA_FFI_Attrs has names, too.
COUNT, KINDS, ITEMS, LIST_BYTES = 16, 24, 32, 40
NAMED_ITEMS, NAMED_BYTES = 40, 48
BUFFER_KIND, STRING_KIND = 1, 4
EXECUTE = 3  # the stage in which a handler computes
# XLA_FFI_Buffer, and XLA_FFI_ByteSpan: a text's address and length.
DATA, RANK, SIZES, BUFFER_BYTES = 24, 32, 40, 48
TEXT, LENGTH = 0, 8
# XLA_FFI_Api: its version, itself a structure, and the function that makes an error.
API_VERSION, ERROR_CREATE, API_BYTES = 16, 48, 56
VERSION_MAJOR, VERSION_MINOR, VERSION_BYTES = 16, 20, 24
# XLA_FFI_Error_Create_Args.
ERROR_MESSAGE, ERROR_CODE, ERROR_BYTES = 16, 24, 28
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 3, 8, 12, 13
# XLA_FFI_Extension_Base, and what XLA asks of a handler by one: XLA_FFI_Metadata, of which it reads the version.
EXTENSION_TYPE, NEXT_EXTENSION, METADATA, METADATA_ASKED = 8, 16, 24, 1
METADATA_VERSION = 8


@inline
def word(structure: int, field: int) -> int:
    return load_word(structure + field, 0)


@inline
def number(structure: int, field: int) -> int:
    """A field of 32 bits."""
    return load_i32(structure + field, 0)


@inline
def item(items: int, index: int, field: int) -> int:
    """The address of an item of a list, whose addresses are in this field of it."""
    return load_word(word(items, field), index)


@inline
def describe(frame: int, minor: int) -> bool:
    """Whether XLA only asks which version of the interface the handler was made for; it is told MAJOR and `minor`.

    Whether structures are as they are known here, their sizes tell in every call.
    """
    extension = word(frame, EXTENSION)
    while extension:
        if number(extension, EXTENSION_TYPE) == METADATA_ASKED:
            version = word(extension, METADATA) + METADATA_VERSION
            store_i32(version + VERSION_MAJOR, 0, MAJOR)
            store_i32(version + VERSION_MINOR, 0, minor)
            return True
        extension = word(extension, NEXT_EXTENSION)
    return False


@inline
def is_known(frame: int) -> bool:
    """Whether the call frame, XLA's functions and all buffers are laid out as they are described here."""
    if load_word(frame, 0) < FRAME_BYTES or load_word(frame + ARGUMENTS, 0) != LIST_BYTES:
        return False
    if load_word(frame + RESULTS, 0) != LIST_BYTES or load_word(frame + ATTRIBUTES, 0) != NAMED_BYTES:
        return False
    api = word(frame, API)
    if load_word(api, 0) < API_BYTES or load_word(api + API_VERSION, 0) != VERSION_BYTES:
        return False
    if number(api + API_VERSION, VERSION_MAJOR) != MAJOR:
        return False
    attributes = frame + ATTRIBUTES
    if word(attributes, COUNT) != 1 or load_i32(word(attributes, KINDS), 0) != STRING_KIND:
        return False
    return are_buffers(frame + ARGUMENTS) and are_buffers(frame + RESULTS)


@inline
def are_buffers(items: int) -> bool:
    for index in range(word(items, COUNT)):
        if load_i32(word(items, KINDS), index) != BUFFER_KIND:
            return False
        if load_word(item(items, index, ITEMS), 0) < BUFFER_BYTES:
            return False
    return True


@inline
def error(frame: int, code: int, message: int) -> int:
    """A new error, which the handler returns; XLA copies the message, a C string."""
    arguments = stack_words(4)
    store_word(arguments, 0, ERROR_BYTES)
    store_word(arguments, 1, 0)
    store_word(arguments + ERROR_MESSAGE, 0, message)
    store_word(arguments + ERROR_CODE, 0, code)
    return call_address(word(word(frame, API), ERROR_CREATE), arguments)


TABLE = "opgrad_jax_table"  # the process's name for the table
BUCKETS = 1024


@structure
class Table(Structure):
    """The first words of the table. BUCKETS words follow: the address of each bucket's first keyed plan."""

    prepare: int  # functions of Python
    refuse: int
    start_team: int
    execute_plan: int  # functions of the runtime
    run: int
    team: int  # the address of the word that has the team of threads
    minor: int  # the minor version of XLA's FFI


@structure
class Buffers(Structure):
    """A keyed plan's part for the handler."""

    operands: int
    places: int  # the address of the operands' numbers of all buffers
    fill: int  # 0, or the address of the results' bytes, which become NaN, and -1, where the plan fails


@structure
class Failure(Structure):
    """A failure in Python: a code, and the address of a message."""

    code: int
    message: int


DIGEST_BYTES = 32
KEY_HEAD = 1 + DIGEST_BYTES // 8  # the number of words, and the digest
MOST_KEY_WORDS = 2048
MOST_BUFFERS = 256
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number whose bits are evenly spread (2**64 over the golden ratio)


@inline
def append_sizes(buffers: int, key: int) -> bool:
    """Add rank and sizes of all buffers to the key, whose first word counts its words: none if they are too many."""
    used = load_word(key, 0)
    for index in range(word(buffers, COUNT)):
        buffer = item(buffers, index, ITEMS)
        rank = word(buffer, RANK)
        if used + 1 + rank > MOST_KEY_WORDS:
            store_word(key, 0, 0)
            return False
        store_word(key, used, rank)
        for axis in range(rank):
            store_word(key, used + 1 + axis, load_word(word(buffer, SIZES), axis))
        used += 1 + rank
    store_word(key, 0, used)
    return True


@inline
def read_key(frame: int, key: int) -> bool:
    """Write the key of a call; whether it has one."""
    span = item(frame + ATTRIBUTES, 0, NAMED_ITEMS)
    if word(span, LENGTH) < DIGEST_BYTES:
        return False
    if word(frame + ARGUMENTS, COUNT) + word(frame + RESULTS, COUNT) > MOST_BUFFERS:
        return False
    store_word(key, 0, KEY_HEAD)
    copy_bytes(key + 8, word(span, TEXT), DIGEST_BYTES)
    return append_sizes(frame + ARGUMENTS, key) and append_sizes(frame + RESULTS, key)


@inline
def bucket_of(table: Table, key: int) -> int:
    """The address of the word that has the first of the keyed plans among which the key's is."""
    mixed = 0
    for index in range(load_word(key, 0)):
        mixed = (mixed ^ load_word(key, index)) * MIX
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    return behind(table) + 8 * (mixed & (BUCKETS - 1))


@inline
def take_operands(frame: int, buffers: Buffers, operands: int) -> None:
    """Write where the operands lie, 0 for those that are left out."""
    for index in range(buffers.operands):
        store_word(operands, index, 0)
    places, given = buffers.places, word(frame + ARGUMENTS, COUNT)
    for index in range(given):
        store_word(operands, load_word(places, index), word(item(frame + ARGUMENTS, index, ITEMS), DATA))
    for index in range(word(frame + RESULTS, COUNT)):
        store_word(operands, load_word(places, given + index), word(item(frame + RESULTS, index, ITEMS), DATA))


@inline
def fill(frame: int, sizes: int) -> None:
    """Set all bits of the results."""
    for index in range(word(frame + RESULTS, COUNT)):
        data = word(item(frame + RESULTS, index, ITEMS), DATA)
        for byte in range(load_word(sizes, index)):
            store_u8(data, byte, 0xFF)


@inline
def run_plan(frame: int, table: Table, keyed: Keyed, operands: int) -> int:
    """Run the plan on the operands; 0, or the address of what Python says of its failure."""
    team, report = 0, stack_words(REPORT)  # a plan of one part has no threads that help
    if keyed.parts >= 2:
        team = atomic_load(table.team)
        if team < 0:
            team = call_address(table.start_team)
    run, sizes = table.run if team else 0, at(Buffers, keyed.own).fill
    status = call_address(table.execute_plan, keyed.plan, operands, 0, 0, 1, run, team, report)
    if status == 0:
        return 0
    if status != NO_MEMORY and sizes != 0:
        fill(frame, sizes)
        return 0
    return call_address(table.refuse, keyed.address, 0 if status == NO_MEMORY else report)


@inline
def failed(frame: int, address: int) -> int:
    """The error for what Python could not do."""
    failure = at(Failure, address)
    return error(frame, failure.code, failure.message)


@native(1)
def handle(frame: int) -> int:
    """XLA's call, with a call frame; returns 0, or an error."""
    table, slot = at(Table, named_address(TABLE)), stack_words(1)
    if describe(frame, table.minor):
        return 0
    if number(frame, STAGE) != EXECUTE or not is_known(frame):
        return 0  # another stage, or unknown structures, which the test at first use detects
    key, operands = stack_words(MOST_KEY_WORDS), stack_words(MOST_BUFFERS)
    store_word(key, 0, 0)
    store_word(slot, 0, 0)
    is_short = read_key(frame, key)
    bucket = bucket_of(table, key)
    found = find_keyed(bucket, key) if is_short else 0
    if found == 0:
        failure = call_address(table.prepare, key, bucket, slot)
        found = load_word(slot, 0)
        if found == 0:
            return failed(frame, failure)
    keyed = at(Keyed, found)
    take_operands(frame, at(Buffers, keyed.own), operands)
    failure = run_plan(frame, table, keyed, operands)
    return failed(frame, failure) if failure != 0 else 0
