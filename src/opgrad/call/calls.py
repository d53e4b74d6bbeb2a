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
    Functions,
    Numbers,
    Torch,
    Value,
    collect,
    data_of,
    drop,
    fits,
    is_watched,
    new_tensor,
    write_numbers,
)
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.structures import Structure, at, behind, structure
from opgrad.cpu.compiler.words import call_address, load_word, stack_words, store_word
from opgrad.cpu.runtime.abi import COUNT, OWN_WORDS, SIZE, TUPLE_ITEMS, OwnWords
from opgrad.cpu.runtime.plan import FEW, OVERLAP, Plan, may_overlap, run_plan
from opgrad.cpu.runtime.pool import STACK_WORDS, give, take

SLOTS: Final = 16  # most entries of a function
CONTAINERS: Final = 16  # most containers of one call: its arguments, and the sequences and records among them
TABLES: Final = 3  # tables with a word for each operand: the addresses of elements, the objects, the results
MOST_NUMBERS: Final = 2
NONE = -1


@structure
class Table(Structure):
    """What native code knows of a public function: addresses, those of its entries among them."""

    functions: int  # the C functions, `objects.Functions`
    torch: int  # `objects.Torch`
    python: int  # the Python function
    team: int  # the word that holds the team of threads
    entries: int  # SLOTS words: the addresses of the entries, 0 behind the last one


@structure
class Entry(Structure):
    """A signature, and how its calls are answered."""

    positional: int  # how many positional arguments
    named: int
    names: int  # the addresses of the names
    values: int  # how many values there are, and the first `objects.Value`
    first_value: int
    owner: int  # the Python object that owns the entry's memory
    apply: int  # the Python function that answers, or 0 if a plan does
    item: int  # which of that function's results is the answer, or NONE if all of them are
    plan: int
    shared: int  # whether several threads run the plan
    unlocked: int  # whether the interpreter's lock is given up meanwhile
    trusted: int  # whether the results are new arrays, which overlap nothing
    is_torch: int  # whether arrays are tensors
    watchers: int  # how many functions are asked whether PyTorch must see the call, or NONE if it is not asked
    out: int  # the number of the argument that is `out`, or NONE
    lists: int  # in how many lists the results are returned, or 0
    tables_from: int  # the source of memory for the tables of operands, as `scratch.source` gives it
    operands: int
    first_operand: int
    results: int
    first_result: int
    # The operands' numbers, sorted by the addresses of the last call. Native code changes this order; it holds the
    # interpreter's lock while it does, and calls no other code.
    order: int


LEFT_OUT, ARGUMENT, NEW, KEPT, NUMBERS = range(5)


@structure
class Operand(Structure):
    """Where an operand comes from.

    An ARGUMENT stands in a container at an index. A NEW result has a number. An object is KEPT by the entry. NUMBERS
    are those of a record.
    """

    source: int
    container: int
    index: int
    result: int
    object: int
    numbers: int  # the address of `objects.Numbers`


@structure
class Result(Structure):
    """A result that is returned: an operand, or a new array or tensor."""

    operand: int  # the number of the operand, or NONE for a new result
    maker: int  # the Python function that makes it, or 0 for native code
    dtype: int
    device: int
    rank: int
    sizes: int  # a tensor's strides follow


@inline
def _find(table: Table, positional: int, named: int, names: int, items: int) -> int:
    """The address of the entry that the arguments fit; 0 if there is none."""
    for slot in range(SLOTS):
        address = load_word(table.entries, slot)
        if address == 0:
            return 0
        entry = at(Entry, address)
        as_many = entry.positional == positional and entry.named == named
        if as_many and _fits(table, entry, named, names, items):
            return address
    return 0


@inline
def _fits(table: Table, entry: Entry, named: int, names: int, items: int) -> bool:
    """Whether the arguments are those of the entry."""
    for number in range(named):
        if load_word(names + TUPLE_ITEMS, number) != load_word(entry.names, number):
            return False
    for number in range(entry.values):
        value = at(Value, entry.first_value, number)
        found = load_word(load_word(items, value.container), value.index)
        if not fits(at(Functions, table.functions), table.torch, found, value, items):
            return False
    return True


# --- operands and results ------------------------------------------------------------------------------------------


@inline
def _gather(
    functions: Functions, entry: Entry, torch: int, items: int, objects: int, operands: int, numbers: int
) -> bool:
    """Write each operand's object and the address of its elements, 0 if it is left out. False if an address is missing.

    An operand that lies in a sequence gets a reference, since another thread may change a list during the call.
    """
    lies = True
    for number in range(entry.operands):
        operand = at(Operand, entry.first_operand, number)
        found, address = 0, 0
        if operand.source == ARGUMENT:
            found = load_word(load_word(items, operand.container), operand.index)
            if operand.container:
                call_address(functions.take, found)
        elif operand.source == KEPT:
            found = operand.object
        elif operand.source == NUMBERS:
            address, lies = numbers, lies & write_numbers(functions, items, at(Numbers, operand.numbers), numbers)
        if found:
            address = data_of(torch, found)
            lies &= address != 0
        store_word(objects, number, found)
        store_word(operands, number, address)
    return lies


@inline
def _release(functions: Functions, entry: Entry, objects: int) -> None:
    for number in range(entry.operands):
        operand = at(Operand, entry.first_operand, number)
        if operand.source == ARGUMENT and operand.container:
            call_address(functions.drop, load_word(objects, number))


@inline
def _new_results(functions: Functions, entry: Entry, torch: int, objects: int, results: int) -> int:
    """Write the results, new ones or operands. Returns how many were made: too few if one could not be allocated."""
    for number in range(entry.results):
        result = at(Result, entry.first_result, number)
        if result.operand != NONE:
            made = load_word(objects, result.operand)
            call_address(functions.take, made)
        elif result.maker:
            made = call_address(functions.vectorcall, result.maker, 0, 0, 0)
        elif torch:
            made = new_tensor(at(Torch, torch), result.dtype, result.device, result.rank, result.sizes)
        else:
            call_address(functions.take, result.dtype)  # NewFromDescr takes a reference over
            new, kind = functions.new_array, functions.array
            made = call_address(new, kind, result.dtype, result.rank, result.sizes, 0, 0, 0, 0)
        if made == 0:
            return number
        store_word(results, number, made)
    return entry.results


@inline
def _place_results(entry: Entry, torch: int, results: int, operands: int) -> None:
    """Write the addresses of the new results' elements into the table of operands."""
    for number in range(entry.operands):
        operand = at(Operand, entry.first_operand, number)
        if operand.source == NEW:
            store_word(operands, number, data_of(torch, load_word(results, operand.result)))


# --- the call ------------------------------------------------------------------------------------------------------


@inline
def _run(functions: Functions, entry: Entry, operands: int, team: int) -> int:
    """Run the plan; its status."""
    plan, unlocked, thread = at(Plan, entry.plan), entry.unlocked, 0
    if not entry.trusted and may_overlap(plan.couples, plan.spans, behind(plan), operands, entry.order):
        return OVERLAP
    run = functions.run if team else 0
    if unlocked:
        thread = call_address(functions.save_thread)
    status = run_plan(plan, operands, run, team, 0)
    if unlocked:
        call_address(functions.restore_thread, thread)
    return status


@inline
def _answer(functions: Functions, entry: Entry, items: int, results: int) -> int:
    """The function's answer: `out`, one result, a tuple of results, or lists of them; 0 if Python cannot make it."""
    count, lists, new_tuple, set_item = entry.results, entry.lists, functions.new_tuple, functions.set_item
    if entry.out != NONE:
        value = load_word(load_word(items, 0), entry.out)
        call_address(functions.take, value)
        return value
    if lists == 0:
        return load_word(results, 0) if count == 1 else collect(functions, new_tuple, set_item, results, count)
    length = count // lists
    for number in range(lists):
        first = results + 8 * number * length
        made = collect(functions, functions.new_list, functions.set_list_item, first, length)
        if made == 0:
            drop(functions, results, number)
            drop(functions, first + 8 * length, count - (number + 1) * length)
            return 0
        store_word(results, number, made)
    return load_word(results, 0) if lists == 1 else collect(functions, new_tuple, set_item, results, lists)


@inline
def _run_plan(functions: Functions, entry: Entry, torch: int, items: int, team: int) -> int:
    """Run the entry's plan and return its answer.

    0 if the Python function shall answer, or if an exception was raised.
    """
    count, source, tables = entry.operands, entry.tables_from, stack_words(STACK_WORDS)
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
        if made == entry.results:
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
def _apply(functions: Functions, entry: Entry, items: int) -> int:
    """Call the entry's Python function and return its answer; 0 if it has raised."""
    arguments = stack_words(FEW)
    for number in range(entry.operands):
        operand = at(Operand, entry.first_operand, number)
        found = operand.object
        if operand.source == ARGUMENT:
            found = load_word(load_word(items, operand.container), operand.index)
        store_word(arguments, number, found)
    answer = call_address(functions.vectorcall, entry.apply, arguments, entry.operands, 0)
    if answer and entry.item != NONE:
        chosen = load_word(answer + TUPLE_ITEMS, entry.item)
        call_address(functions.take, chosen)
        call_address(functions.drop, answer)
        return chosen
    return answer


@inline
def _run_entry(table: Table, entry: Entry, items: int, team: int) -> int:
    """Answer a call that fits the entry; 0 if the Python function shall answer, or if an exception was raised."""
    functions, torch = at(Functions, table.functions), table.torch if entry.is_torch else 0
    owner, watchers, answer = entry.owner, entry.watchers, 0
    call_address(functions.take, owner)  # another thread may replace the entry; the owner keeps its memory
    if not (torch and watchers != NONE and is_watched(functions, at(Torch, torch), watchers)):
        answer = _apply(functions, entry, items) if entry.apply else _run_plan(functions, entry, torch, items, team)
    call_address(functions.drop, owner)
    return answer


@inline
def _has_raised(functions: Functions) -> bool:
    """Whether an exception is to be passed on.

    MemoryError and ValueError are not: the Python function raises better ones.
    """
    if call_address(functions.occurred) == 0:
        return False
    for error in (functions.memory_error, functions.value_error):
        if call_address(functions.is_error, error) & 0xFFFFFFFF:
            call_address(functions.clear)
            return False
    return True


@native(4)
def call(function: int, arguments: int, count: int, names: int) -> int:
    """The function that CPython calls: function(*arguments[:count], and the arguments behind them by these names)."""
    table = at(Table, at(OwnWords, function + OWN_WORDS).table)
    functions, positional, named = at(Functions, table.functions), count & COUNT, 0
    if names:
        named = load_word(names + SIZE, 0)
    items = stack_words(CONTAINERS)
    store_word(items, 0, arguments)
    address = _find(table, positional, named, names, items)
    if address:
        entry = at(Entry, address)
        team = load_word(table.team, 0) if entry.shared else 0
        answer = _run_entry(table, entry, items, team) if team >= 0 else 0
        if answer:
            return answer
        if _has_raised(functions):
            return 0
    return call_address(functions.vectorcall, table.python, arguments, count, names)
