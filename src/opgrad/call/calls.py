"""Answers a whole Python call in native code: it checks the arguments, finds the plan, allocates results, runs kernels.

CPython runs `call` when a public function is called, by its vectorcall protocol (PEP 590). `call` gets a pointer to the
arguments, positional ones first, their number, and a tuple of the names of the keyword arguments. It compares the
arguments with entries. An entry describes the arguments of one signature by the words that stand in the objects: an
array's type, dtype, sizes and strides, a number's value, and the address of any other object. The entry that fits
holds the plan, or a Python function that answers such calls. If no entry fits, or if anything goes wrong, `call` calls
the public function's Python version, which answers or raises as if it had been called directly.

The interpreter's lock is held while entries are read, so no other thread changes them. It is given up only while
kernels work on large arrays. Objects are changed by C functions of Python, NumPy and PyTorch alone.
"""

from typing import Final

from opgrad.call.objects import (
    ARRAY,
    CALL,
    CLEAR,
    DEC_REF,
    INC_REF,
    IS_ERROR,
    MEMORY_ERROR,
    NEW_ARRAY,
    NEW_LIST,
    NEW_TUPLE,
    OCCURRED,
    RESTORE_THREAD,
    RUN,
    SAVE_THREAD,
    SET_ITEM,
    SET_LIST_ITEM,
    VALUE_ERROR,
    collect,
    data_of,
    drop,
    fits,
    is_watched,
    new_tensor,
    write_numbers,
)
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    call_address,
    load_word,
    stack_words,
    store_word,
)
from opgrad.cpu.runtime.abi import COUNT, OWN_WORDS, SIZE, TABLE, TUPLE_ITEMS
from opgrad.cpu.runtime.overlap import FEW, may_overlap
from opgrad.cpu.runtime.plan import APART, OVERLAP, run_plan
from opgrad.cpu.runtime.scratch import STACK_WORDS, give, take

# Words of a public function's table: the addresses of the table of C functions (`objects`), of the table about PyTorch,
# of the Python function, and of the word that holds the team of threads; then the addresses of the entries.
FUNCTIONS, TORCH, PYTHON, TEAM, ENTRIES, SLOTS = 0, 1, 2, 3, 4, 16

# Words of an entry: the number of positional arguments; the number of names and the word at which they begin; the
# number of records of values and the word at which they begin; the Python object that owns the entry's memory.
POSITIONAL, NAMED, NAMES_AT, RECORDS, RECORDS_AT, OWNER = range(6)
# APPLY: the Python function that answers, or 0 if a plan does. ITEM: which of the function's results is the answer, or
# NONE if all of them are. PLAN: the plan's address. SHARED: whether several threads run it. UNLOCKED: whether the
# interpreter's lock is given up meanwhile. TRUSTED: whether the results are new arrays, which overlap nothing.
APPLY, ITEM, PLAN, SHARED, UNLOCKED, TRUSTED = range(6, 12)
# IS_TORCH: whether arrays are tensors. WATCHING: how many functions are asked whether PyTorch must see the call
# (`objects.is_watched`), or NONE if it is not asked. OUT: the number of the argument that is `out`, or NONE. LISTS: the
# number of lists in which the results are returned, or 0. TABLES_FROM: the source of memory for the tables of operands,
# as `scratch.source` gives it. OPERANDS, RESULTS: how many there are, and the words at which their records begin.
# ORDER_AT: the word at which the operands' numbers begin, sorted by the addresses of the last call. Native code changes
# this order; it holds the interpreter's lock while it does, and calls no other code.
IS_TORCH, WATCHING, OUT, LISTS, TABLES_FROM, OPERANDS, OPERANDS_AT, RESULTS, RESULTS_AT = range(12, 21)
ORDER_AT, ENTRY = range(21, 23)
TABLES: Final = 3  # tables with a word for each operand: the addresses of elements, the objects, the results
NONE = -1
CONTAINERS: Final = 16  # most containers of one call: its arguments, and the sequences and records among them

# Words of a record of a value: the number of words to the next record; the number of its container in the table of
# containers, and its index there; its kind, and the words that `objects` compares it with.
NEXT, CONTAINER, INDEX, KIND, EXPECTED = range(5)
# Words of a record of an operand. WHERE is the number of its container and WHICH its index there. Otherwise WHERE is
# one of these: NOTHING, the operand is left out; NEW, WHICH is the number of a new result; KEPT, WHICH is the address
# of an object that the entry keeps alive; NUMBERS, WHICH is the address of the words that `objects.write_numbers`
# reads.
WHERE, WHICH, OPERAND = range(3)
NOTHING, NEW, KEPT, NUMBERS = -1, -2, -3, -4
MOST_NUMBERS: Final = 2
# Words of a record of a result: the number of words to the next record; MAKER, the Python function that makes it, 0 for
# native code, or GIVEN for an operand that is returned; from MADE on an array's dtype, rank and sizes, or the words
# that `objects.new_tensor` reads, or the operand's number.
MAKER, MADE, GIVEN = 1, 2, -1


@inline
def _find(table: int, arguments: int, positional: int, named: int, names: int, items: int) -> int:
    """The entry that the arguments fit; 0 if there is none."""
    for slot in range(SLOTS):
        entry = load_word(table, ENTRIES + slot)
        if entry == 0:
            return 0
        as_many = load_word(entry, POSITIONAL) == positional and load_word(entry, NAMED) == named
        if as_many and _fits(table, entry, named, names, items):
            return entry
    return 0


@inline
def _fits(table: int, entry: int, named: int, names: int, items: int) -> bool:
    """Whether the arguments are those of the entry."""
    expected_names = entry + 8 * load_word(entry, NAMES_AT)
    for number in range(named):
        if load_word(names + TUPLE_ITEMS, number) != load_word(expected_names, number):
            return False
    functions, torch, record = load_word(table, FUNCTIONS), load_word(table, TORCH), _at(entry, RECORDS_AT)
    for _ in range(load_word(entry, RECORDS)):
        value = load_word(load_word(items, load_word(record, CONTAINER)), load_word(record, INDEX))
        if not fits(functions, torch, value, load_word(record, KIND), record + 8 * EXPECTED, items):
            return False
        record += 8 * load_word(record, NEXT)
    return True


@inline
def _at(entry: int, word: int) -> int:
    """The address at which records begin; a word of the entry holds the number of their first word."""
    return entry + 8 * load_word(entry, word)


# --- operands and results ------------------------------------------------------------------------------------------


@inline
def _gather(functions: int, entry: int, torch: int, items: int, objects: int, operands: int, numbers: int) -> bool:
    """Write each operand's object and the address of its elements, 0 if it is left out. False if an address is missing.

    An operand that lies in a sequence gets a reference, since another thread may change a list during the call.
    """
    record, lies = _at(entry, OPERANDS_AT), True
    for number in range(load_word(entry, OPERANDS)):
        where, which = load_word(record, WHERE), load_word(record, WHICH)
        value, address = 0, 0
        if where >= 0:
            value = load_word(load_word(items, where), which)
        elif where == KEPT:
            value = which
        elif where == NUMBERS:
            address, lies = numbers, lies & write_numbers(functions, items, which, numbers)
        if where > 0:
            call_address(load_word(functions, INC_REF), value)
        if value:
            address = data_of(torch, value)
            lies &= address != 0
        store_word(objects, number, value)
        store_word(operands, number, address)
        record += 8 * OPERAND
    return lies


@inline
def _release(functions: int, entry: int, objects: int) -> None:
    record = _at(entry, OPERANDS_AT)
    for number in range(load_word(entry, OPERANDS)):
        if load_word(record, WHERE) > 0:
            call_address(load_word(functions, DEC_REF), load_word(objects, number))
        record += 8 * OPERAND


@inline
def _new_results(functions: int, entry: int, torch: int, objects: int, results: int) -> int:
    """Write the results, new ones or operands. Returns how many were made: too few if one could not be allocated."""
    record = _at(entry, RESULTS_AT)
    for number in range(load_word(entry, RESULTS)):
        if load_word(record, MAKER) == GIVEN:
            made = load_word(objects, load_word(record, MADE))
            call_address(load_word(functions, INC_REF), made)
        elif load_word(record, MAKER):
            made = call_address(load_word(functions, CALL), load_word(record, MAKER), 0, 0, 0)
        elif torch:
            made = new_tensor(torch, record + 8 * MADE)
        else:
            dtype, rank = load_word(record, MADE), load_word(record, MADE + 1)
            call_address(load_word(functions, INC_REF), dtype)  # NewFromDescr takes a reference over
            sizes, kind = record + 8 * (MADE + 2), load_word(functions, ARRAY)
            made = call_address(load_word(functions, NEW_ARRAY), kind, dtype, rank, sizes, 0, 0, 0, 0)
        if made == 0:
            return number
        store_word(results, number, made)
        record += 8 * load_word(record, NEXT)
    return load_word(entry, RESULTS)


@inline
def _place_results(entry: int, torch: int, results: int, operands: int) -> None:
    """Write the addresses of the new results' elements into the table of operands."""
    record = _at(entry, OPERANDS_AT)
    for number in range(load_word(entry, OPERANDS)):
        if load_word(record, WHERE) == NEW:
            store_word(operands, number, data_of(torch, load_word(results, load_word(record, WHICH))))
        record += 8 * OPERAND


# --- the call ------------------------------------------------------------------------------------------------------


@inline
def _run(functions: int, entry: int, operands: int, team: int) -> int:
    """Run the plan; its status."""
    plan = load_word(entry, PLAN)
    if not load_word(entry, TRUSTED) and may_overlap(plan + 8 * APART, operands, _at(entry, ORDER_AT)):
        return OVERLAP
    run, unlocked, thread = load_word(functions, RUN) if team else 0, load_word(entry, UNLOCKED), 0
    if unlocked:
        thread = call_address(load_word(functions, SAVE_THREAD))
    status = run_plan(plan, operands, run, team, 0)
    if unlocked:
        call_address(load_word(functions, RESTORE_THREAD), thread)
    return status


@inline
def _answer(functions: int, entry: int, items: int, results: int) -> int:
    """The function's answer: `out`, one result, a tuple of results, or lists of them; 0 if Python cannot make it."""
    out, count, lists = load_word(entry, OUT), load_word(entry, RESULTS), load_word(entry, LISTS)
    if out != NONE:
        value = load_word(load_word(items, 0), out)
        call_address(load_word(functions, INC_REF), value)
        return value
    if lists == 0:
        return load_word(results, 0) if count == 1 else collect(functions, NEW_TUPLE, SET_ITEM, results, count)
    length = count // lists
    for number in range(lists):
        made = collect(functions, NEW_LIST, SET_LIST_ITEM, results + 8 * number * length, length)
        if made == 0:
            drop(functions, results, number)
            drop(functions, results + 8 * (number + 1) * length, count - (number + 1) * length)
            return 0
        store_word(results, number, made)
    return load_word(results, 0) if lists == 1 else collect(functions, NEW_TUPLE, SET_ITEM, results, lists)


@inline
def _run_plan(functions: int, entry: int, torch: int, items: int, team: int) -> int:
    """Run the entry's plan and return its answer.

    0 if the Python function shall answer, or if an exception was raised.
    """
    count, source, tables = load_word(entry, OPERANDS), load_word(entry, TABLES_FROM), stack_words(STACK_WORDS)
    if source:
        tables = take(source, 8 * TABLES * count)
        if tables == 0:
            return 0
    operands, objects, results = tables, tables + 8 * count, tables + 16 * count
    numbers = stack_words(MOST_NUMBERS)
    answer, made = 0, 0
    if _gather(functions, entry, torch, items, objects, operands, numbers):
        made = _new_results(functions, entry, torch, objects, results)
        status = OVERLAP
        if made == load_word(entry, RESULTS):
            _place_results(entry, torch, results, operands)
            status = _run(functions, entry, operands, team)
        if status == 0:
            answer = _answer(functions, entry, items, results)
        else:
            drop(functions, results, made)
    _release(functions, entry, objects)
    if source:
        give(source, tables, 8 * TABLES * count)
    return answer


@inline
def _apply(functions: int, entry: int, items: int) -> int:
    """Call the entry's Python function and return its answer; 0 if it has raised."""
    arguments, record = stack_words(FEW), _at(entry, OPERANDS_AT)
    for number in range(load_word(entry, OPERANDS)):
        where, which = load_word(record, WHERE), load_word(record, WHICH)
        store_word(arguments, number, which if where == KEPT else load_word(load_word(items, where), which))
        record += 8 * OPERAND
    answer = call_address(load_word(functions, CALL), load_word(entry, APPLY), arguments, load_word(entry, OPERANDS), 0)
    item = load_word(entry, ITEM)
    if answer and item != NONE:
        chosen = load_word(answer + TUPLE_ITEMS, item)
        call_address(load_word(functions, INC_REF), chosen)
        call_address(load_word(functions, DEC_REF), answer)
        return chosen
    return answer


@inline
def _run_entry(table: int, entry: int, items: int, team: int) -> int:
    """Answer a call that fits the entry; 0 if the Python function shall answer, or if an exception was raised."""
    functions, torch = load_word(table, FUNCTIONS), load_word(table, TORCH) if load_word(entry, IS_TORCH) else 0
    owner, watchers, answer = load_word(entry, OWNER), load_word(entry, WATCHING), 0
    # another thread may replace the entry; the owner keeps its memory
    call_address(load_word(functions, INC_REF), owner)
    if not (torch and watchers != NONE and is_watched(functions, torch, watchers)):
        if load_word(entry, APPLY):
            answer = _apply(functions, entry, items)
        else:
            answer = _run_plan(functions, entry, torch, items, team)
    call_address(load_word(functions, DEC_REF), owner)
    return answer


@inline
def _has_raised(functions: int) -> bool:
    """Whether an exception is to be passed on.

    MemoryError and ValueError are not: the Python function raises better ones.
    """
    if call_address(load_word(functions, OCCURRED)) == 0:
        return False
    for error in (MEMORY_ERROR, VALUE_ERROR):
        if call_address(load_word(functions, IS_ERROR), load_word(functions, error)) & 0xFFFFFFFF:
            call_address(load_word(functions, CLEAR))
            return False
    return True


@native(4)
def call(function: int, arguments: int, count: int, names: int) -> int:
    """The function that CPython calls: function(*arguments[:count], and the arguments behind them by these names)."""
    table = load_word(function + OWN_WORDS, TABLE)
    functions, positional, named = load_word(table, FUNCTIONS), count & COUNT, 0
    if names:
        named = load_word(names + SIZE, 0)
    items = stack_words(CONTAINERS)
    store_word(items, 0, arguments)
    entry = _find(table, arguments, positional, named, names, items)
    if entry:
        team = load_word(load_word(table, TEAM), 0) if load_word(entry, SHARED) else 0
        answer = _run_entry(table, entry, items, team) if team >= 0 else 0
        if answer:
            return answer
        if _has_raised(functions):
            return 0
    return call_address(load_word(functions, CALL), load_word(table, PYTHON), arguments, count, names)
