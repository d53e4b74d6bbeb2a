"""The native function that XLA calls to run an operator; it is the same for all operators and does not need the GIL.

The call's one attribute begins with the digest of what is called (`registry`). With the sizes of all buffers it is the
key of a plan, which is looked up among the keyed plans. Python is asked for one that is new, and for the words
where a plan fails. Nothing is copied: kernels read and write XLA's memory.
"""

from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.structures import Structure, at, behind, structure
from opgrad.cpu.compiler.words import (
    atomic_load,
    call_address,
    copy_bytes,
    load_word,
    named_address,
    stack_words,
    store_u8,
    store_word,
)
from opgrad.cpu.keyed import Keyed, find_keyed
from opgrad.cpu.runtime.plan import NO_MEMORY, REPORT
from opgrad.jax.abi import (
    ARGUMENTS,
    ATTRIBUTES,
    COUNT,
    DATA,
    EXECUTE,
    ITEMS,
    LENGTH,
    NAMED_ITEMS,
    RANK,
    RESULTS,
    SIZES,
    STAGE,
    TEXT,
    describe,
    error,
    is_known,
    item,
    number,
    word,
)

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
    """What the handler knows of a keyed plan."""

    operands: int
    places: int  # the address of the operands' numbers of all buffers
    fill: int  # 0, or the address of the results' bytes, which become NaN, and -1, where the plan fails


@structure
class Failure(Structure):
    """What Python could not do: a code, and the address of a message."""

    code: int
    message: int


DIGEST_BYTES = 32
KEY_HEAD = 1 + DIGEST_BYTES // 8  # the number of words, and the digest
MOST_KEY_WORDS = 2048
MOST_BUFFERS = 256
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number whose bits are evenly spread (2**64 over the golden ratio)


@inline
def append_sizes(buffers: int, key: int) -> None:
    """Add rank and sizes of all buffers to the key, whose first word counts its words."""
    used = load_word(key, 0)
    for index in range(word(buffers, COUNT)):
        buffer = item(buffers, index, ITEMS)
        rank = word(buffer, RANK)
        store_word(key, used, rank)
        for axis in range(rank):
            store_word(key, used + 1 + axis, load_word(word(buffer, SIZES), axis))
        used += 1 + rank
    store_word(key, 0, used)


@inline
def words_of(buffers: int) -> int:
    """How many words the sizes of these buffers take in a key."""
    words = 0
    for index in range(word(buffers, COUNT)):
        words += 1 + word(item(buffers, index, ITEMS), RANK)
    return words


@inline
def read_key(frame: int, key: int) -> bool:
    """Write the key of a call; whether it has one."""
    span = item(frame + ATTRIBUTES, 0, NAMED_ITEMS)
    if word(span, LENGTH) < DIGEST_BYTES:
        return False
    if word(frame + ARGUMENTS, COUNT) + word(frame + RESULTS, COUNT) > MOST_BUFFERS:
        return False
    if KEY_HEAD + words_of(frame + ARGUMENTS) + words_of(frame + RESULTS) > MOST_KEY_WORDS:
        return False
    store_word(key, 0, KEY_HEAD)
    copy_bytes(key + 8, word(span, TEXT), DIGEST_BYTES)
    append_sizes(frame + ARGUMENTS, key)
    append_sizes(frame + RESULTS, key)
    return True


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
def team_for(table: Table, keyed: Keyed) -> int:
    """The threads that help, 0 for a plan that has one part."""
    if keyed.parts < 2:
        return 0
    team = atomic_load(table.team)
    return call_address(table.start_team) if team < 0 else team


@inline
def run_plan(frame: int, table: Table, keyed: Keyed, operands: int) -> int:
    """Run the plan on the operands; 0, or the address of what Python says of its failure."""
    team, report = team_for(table, keyed), stack_words(REPORT)
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
    """What XLA calls with a call frame; 0, or an error."""
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
