"""A whole call in native code: its arguments looked at, the plan found, results allocated, the kernels run.

`call` is what CPython runs for a public function, by its vectorcall protocol (PEP 590): a pointer to the arguments,
positional ones first, their number, and a tuple of the others' names. It compares them with entries, each of which says
what the arguments of one signature are, word for word as they stand in the objects: an array's type, dtype, sizes and
strides, a number's value, the identity of everything else. An entry that fits has the plan. Whatever fits none, and
whatever goes wrong, is left to the Python function that stands behind: it answers, or raises, as if it had been called.

The lock of the interpreter is held but while large arrays are worked on, so nobody else writes entries meanwhile.
Objects are only changed by Python's and NumPy's own C functions.
"""

from typing import Final

from opgrad.cpu.compiler.memory import (
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_address,
    load_word,
    stack_words,
    store_word,
)
from opgrad.cpu.compiler.native import inline, native
from opgrad.cpu.runtime.execute import DATA, MAX_OPERANDS, OVERLAP, TYPE, is_as_planned, overlap, run_steps


class Function:
    """What a public function is to Python before its own words in memory: an object with attributes."""


OWN_WORDS: Final = Function.__basicsize__
VECTORCALL, TABLE, OWN = range(3)  # the words: where a call begins, which CPython reads; the table; how many there are
# Words of the table: addresses of the fields below, the Python function, the word with the team of threads; entries.
FUNCTIONS, PYTHON, TEAM, ENTRIES, SLOTS = 0, 1, 2, 3, 16
# Words of the C functions' table.
CALL, INC_REF, DEC_REF, SAVE_THREAD, RESTORE_THREAD, EQUALS, CLEAR = range(7)
NEW_TUPLE, SET_ITEM, NEW_ARRAY, ARRAY, RUN, C_FUNCTIONS = range(7, 13)  # the last: how many there are

# Words of an entry. PLAN: its address. MEMORY: free working memory, 0 while it is used, NO_MEMORY without need of it.
# SHARED: whether several threads help. UNLOCKED: whether the interpreter's lock is given up. OUT: the value that is
# `out`, or NONE. Then the first words of the values', operands' and results' records.
POSITIONAL, NAMED, RUNNER, PLAN, MEMORY, SHARED, UNLOCKED, OUT = range(8)
OPERANDS, RESULTS, OPERANDS_AT, RESULTS_AT, VALUES_AT = range(8, 13)
ENTRY: Final = 13
NONE: Final = -1
NO_MEMORY: Final = -1
# An operand: a value's number; NONE; or a result's number, taken from this.
FIRST_RESULT: Final = -2

# A value's record: words until the next, the address of its name or 0, what it is, then: of an object its address; of
# a number also its type, and a float's bits; of an array what `known` tells.
NEXT, NAME, KIND, WHAT = range(4)
OBJECT, FLOAT, EQUAL, KNOWN_ARRAY = range(4)
# A result's record: words until the next, the Python function that makes it or 0, dtype, rank, sizes.
MAKER, DTYPE, RANK, SIZES = range(1, 5)

# CPython's objects, as its headers lay them out. A tuple's items come last; 3.14 keeps a hash before them.
SIZE: Final = object.__basicsize__
ITEMS: Final = tuple.__basicsize__
VALUE: Final = object.__basicsize__  # of a float
COUNT: Final = (1 << 63) - 1  # the lower bits of vectorcall's number of arguments
EQ: Final = 2  # Py_EQ


@inline
def _is_number(functions: int, value: int, record: int) -> bool:
    """Whether a value has the number's type, which is Python's own, and equals it."""
    known = load_word(record, WHAT)
    if value == known:
        return True
    if load_word(value + TYPE, 0) != load_word(record, WHAT + 1):
        return False
    if load_word(record, KIND) == FLOAT:
        return load_word(value + VALUE, 0) == load_word(record, WHAT + 2)
    return call_address(load_word(functions, EQUALS), value, known, EQ) & 0xFFFFFFFF == 1


@inline
def _fits(functions: int, entry: int, arguments: int, names: int) -> bool:
    """Whether the arguments are those of the entry."""
    record, positional = entry + 8 * load_word(entry, VALUES_AT), load_word(entry, POSITIONAL)
    for number in range(positional + load_word(entry, NAMED)):
        value, kind = load_word(arguments, number), load_word(record, KIND)
        if number >= positional and load_word(names + ITEMS, number - positional) != load_word(record, NAME):
            return False
        if kind == KNOWN_ARRAY:
            if not is_as_planned(value, record + 8 * WHAT):
                return False
        elif kind == OBJECT:
            if value != load_word(record, WHAT):
                return False
        elif not _is_number(functions, value, record):
            return False
        record += 8 * load_word(record, NEXT)
    return True


@inline
def _new_results(functions: int, entry: int, results: int) -> int:
    """Allocate the results; how many there are now, fewer than there shall be where Python has refused one."""
    record = entry + 8 * load_word(entry, RESULTS_AT)
    for number in range(load_word(entry, RESULTS)):
        maker, dtype = load_word(record, MAKER), load_word(record, DTYPE)
        if maker:
            made = call_address(load_word(functions, CALL), maker, 0, 0, 0)
        else:
            call_address(load_word(functions, INC_REF), dtype)  # NewFromDescr takes a reference over
            sizes, rank = record + 8 * SIZES, load_word(record, RANK)
            made = call_address(
                load_word(functions, NEW_ARRAY), load_word(functions, ARRAY), dtype, rank, sizes, 0, 0, 0, 0
            )
        if made == 0:
            call_address(load_word(functions, CLEAR))
            return number
        store_word(results, number, made)
        record += 8 * load_word(record, NEXT)
    return load_word(entry, RESULTS)


@inline
def _operands(entry: int, arguments: int, results: int, operands: int) -> None:
    """Write where the operands lie, 0 for one left out."""
    of_operand = entry + 8 * load_word(entry, OPERANDS_AT)
    for number in range(load_word(entry, OPERANDS)):
        value = load_word(of_operand, number)
        address = 0
        if value >= 0:
            address = load_word(load_word(arguments, value) + DATA, 0)
        elif value != NONE:
            address = load_word(load_word(results, FIRST_RESULT - value) + DATA, 0)
        store_word(operands, number, address)


@inline
def _run(table: int, entry: int, operands: int, scratch: int, team: int) -> int:
    """Run the plan; its status."""
    functions, plan = load_word(table, FUNCTIONS), load_word(entry, PLAN)
    if load_word(entry, OUT) != NONE and overlap(plan, operands):
        return OVERLAP
    run = load_word(functions, RUN) if team else 0
    if load_word(entry, UNLOCKED):
        thread = call_address(load_word(functions, SAVE_THREAD))
        status = run_steps(plan, operands, scratch, run, team)
        call_address(load_word(functions, RESTORE_THREAD), thread)
        return status
    return run_steps(plan, operands, scratch, run, team)


@inline
def _drop(functions: int, results: int, count: int) -> None:
    for number in range(count):
        call_address(load_word(functions, DEC_REF), load_word(results, number))


@inline
def _answer(functions: int, entry: int, arguments: int, results: int) -> int:
    """What the function returns: `out`, the new result, or a tuple of them; 0 where Python has refused the tuple."""
    out, count = load_word(entry, OUT), load_word(entry, RESULTS)
    if out != NONE:
        call_address(load_word(functions, INC_REF), load_word(arguments, out))
        return load_word(arguments, out)
    if count == 1:
        return load_word(results, 0)
    made = call_address(load_word(functions, NEW_TUPLE), count)
    if made == 0:
        call_address(load_word(functions, CLEAR))
        _drop(functions, results, count)
        return 0
    for number in range(count):
        call_address(load_word(functions, SET_ITEM), made, number, load_word(results, number))
    return made


@inline
def _take_memory(entry: int) -> int:
    """Working memory that no other call uses, 0 if there is none at hand; NO_MEMORY if none is needed."""
    memory = atomic_load(entry + 8 * MEMORY)
    if memory == NO_MEMORY or (memory and atomic_swap_if(entry + 8 * MEMORY, memory, 0)):
        return memory
    return 0


@inline
def _run_entry(table: int, entry: int, arguments: int, team: int) -> int:
    """The answer to a call that fits the entry; 0 where it is left to Python."""
    functions = load_word(table, FUNCTIONS)
    memory = _take_memory(entry)
    if memory == 0:
        return 0
    results, operands = stack_words(MAX_OPERANDS), stack_words(MAX_OPERANDS)
    runner = load_word(entry, RUNNER)
    call_address(load_word(functions, INC_REF), runner)  # the entry lives as long as it, whatever other threads do
    answer, made = 0, _new_results(functions, entry, results)
    if made == load_word(entry, RESULTS):
        _operands(entry, arguments, results, operands)
        status = _run(table, entry, operands, 0 if memory == NO_MEMORY else memory, team)
        if status == 0:
            answer = _answer(functions, entry, arguments, results)
        else:
            _drop(functions, results, made)
    else:
        _drop(functions, results, made)
    if memory != NO_MEMORY:
        atomic_store(entry + 8 * MEMORY, memory)
    call_address(load_word(functions, DEC_REF), runner)
    return answer


@inline
def _find(table: int, arguments: int, positional: int, named: int, names: int) -> int:
    """The entry that the arguments fit; 0 if there is none."""
    functions = load_word(table, FUNCTIONS)
    for slot in range(SLOTS):
        entry = load_word(table, ENTRIES + slot)
        if entry == 0:
            return 0
        as_many = load_word(entry, POSITIONAL) == positional and load_word(entry, NAMED) == named
        if as_many and _fits(functions, entry, arguments, names):
            return entry
    return 0


@native(4)
def call(function: int, arguments: int, count: int, names: int) -> int:
    """What CPython calls: function(*arguments[:count], the others by names)."""
    table = load_word(function + OWN_WORDS, TABLE)
    positional, named = count & COUNT, 0
    if names:
        named = load_word(names + SIZE, 0)
    entry = _find(table, arguments, positional, named, names)
    if entry:
        team = load_word(load_word(table, TEAM), 0) if load_word(entry, SHARED) else 0
        answer = _run_entry(table, entry, arguments, team) if team >= 0 else 0
        if answer:
            return answer
    return call_address(load_word(load_word(table, FUNCTIONS), CALL), load_word(table, PYTHON), arguments, count, names)
