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

from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    Structure,
    at,
    behind,
    call_address,
    load_i32,
    load_word,
    stack_words,
    store_word,
    structure,
)
from opgrad.cpu.runtime import abi
from opgrad.cpu.runtime.plan import FEW, OVERLAP, Plan, may_overlap, run_plan
from opgrad.cpu.runtime.pool import STACK_WORDS, give, take

EQ: Final = 2  # Py_EQ
ANY_CPU: Final = -1  # the index of a device


@structure
class Functions(Structure):
    """The addresses of C functions: Python's by their names, NumPy's, the one that shares parts; and of types."""

    PyObject_Vectorcall: int
    Py_IncRef: int
    Py_DecRef: int
    PyEval_SaveThread: int
    PyEval_RestoreThread: int
    PyObject_RichCompareBool: int
    PyErr_Clear: int
    PyErr_ExceptionMatches: int
    PyErr_Occurred: int
    PyTuple_New: int
    PyTuple_SetItem: int
    PyList_New: int
    PyList_SetItem: int
    PyObject_GetAttr: int
    PyDict_GetItem: int
    new_array: int
    array: int
    run: int
    value_error: int
    memory_error: int


@structure
class Torch(Structure):
    """What is known of PyTorch: offsets in its objects, C functions, names and objects."""

    handle: int
    keys: int
    get_dim: int
    get_sizes: int
    get_strides: int
    get_dtype: int
    get_data: int
    records_grad: int
    empty: int
    wrap: int
    delete: int
    requires_grad: int
    true: int
    levels: int
    level: int
    no_level: int
    watchers: int  # the address of the first `Watcher`


@structure
class Watcher(Structure):
    """A function of PyTorch, and the object that it returns if nothing in PyTorch needs to see calls."""

    function: int
    unwatched: int


@structure
class Layout(Structure):
    """The dtype of an array or a tensor, its rank, and the address of its sizes, behind which its strides lie."""

    dtype: int
    rank: int
    sizes: int


OBJECT, FLOAT, EQUAL, TUPLE, LIST, SAME, ARRAY, TENSOR, RECORD = range(9)


@structure
class Value(Structure):
    """What one value of a call must be. Which fields count depends on its kind.

    An OBJECT is one itself, and EQUAL to one is a value of its type. A FLOAT has its bits. A TUPLE and a LIST have a
    length. A value that is the SAME as one before is where that is. A RECORD is an object with slots. An ARRAY
    and a TENSOR have a layout.
    """

    container: int  # where it lies in the call: the number of a container, and the index in it
    index: int
    kind: int
    object: int
    type: int
    bits: int
    length: int
    inside: int  # the number that its items or fields get as a container
    other_container: int
    other_index: int
    layout: int
    flags: int
    keys: int
    records_grad: int


@inline
def _is_array(array: int, value: Value) -> bool:
    """Whether an array has the type, dtype, flags, rank, sizes and strides of the value."""
    layout, flags = at(Layout, value.layout), value.flags
    rank, sizes = layout.rank, layout.sizes
    as_planned = load_word(array + abi.TYPE, 0) == value.type
    if as_planned:
        as_planned = load_word(array + abi.DTYPE, 0) == layout.dtype and load_i32(array + abi.RANK, 0) == rank
        as_planned &= load_i32(array + abi.FLAGS, 0) & flags == flags
    if as_planned:
        shape, strides = load_word(array + abi.SHAPE, 0), load_word(array + abi.STRIDES, 0)
        for axis in range(rank):
            as_planned &= load_word(shape, axis) == load_word(sizes, axis)
            as_planned &= load_word(strides, axis) == load_word(sizes, rank + axis)
    return as_planned


@inline
def _is_number(functions: Functions, found: int, value: Value) -> bool:
    """Whether an object has exactly the number's type, one of Python's own, and equals the number."""
    if found == value.object:
        return True
    if load_word(found + abi.TYPE, 0) != value.type:
        return False
    if value.kind == FLOAT:
        return load_word(found + abi.VALUE, 0) == value.bits
    return call_address(functions.PyObject_RichCompareBool, found, value.object, EQ) & 0xFFFFFFFF == 1


@inline
def _is_sequence(found: int, value: Value, items: int) -> bool:
    """Whether an object has this type and length; if so, write the address of its items to the table of containers."""
    if load_word(found + abi.TYPE, 0) != value.type or load_word(found + abi.SIZE, 0) != value.length:
        return False
    store_word(
        items, value.inside, found + abi.TUPLE_ITEMS if value.kind == TUPLE else load_word(found + abi.LIST_ITEMS, 0)
    )
    return True


@inline
def fits(functions: Functions, torch: int, found: int, value: Value, items: int) -> bool:
    """Whether an object is as the value says; 0, a field that holds no object, never is."""
    kind = value.kind
    if found == 0:
        return False
    if kind == ARRAY:
        return _is_array(found, value)
    if kind == OBJECT:
        return found == value.object
    if kind == TENSOR:
        return _is_tensor(functions, at(Torch, torch), found, value)
    if kind in (TUPLE, LIST):
        return _is_sequence(found, value, items)
    if kind == SAME:
        return found == load_word(load_word(items, value.other_container), value.other_index)
    if kind == RECORD:
        store_word(items, value.inside, found + abi.FIELDS)
        return load_word(found + abi.TYPE, 0) == value.type
    return _is_number(functions, found, value)


# --- several objects ----------------------------------------------------------------------------------------------


@inline
def drop(functions: Functions, results: int, count: int) -> None:
    """Give back references to objects."""
    for number in range(count):
        call_address(functions.Py_DecRef, load_word(results, number))


@inline
def collect(functions: Functions, new: int, set_item: int, results: int, count: int) -> int:
    """A tuple or a list that takes over references to objects; if Python cannot make it, they are given back: 0.

    new, set_item: the C functions that make it and that put an object in it.
    """
    made = call_address(new, count)
    if made == 0:
        drop(functions, results, count)
        return 0
    for number in range(count):
        call_address(set_item, made, number, load_word(results, number))
    return made


# --- tensors -------------------------------------------------------------------------------------------------------


@inline
def _is_tensor(functions: Functions, torch: Torch, found: int, value: Value) -> bool:
    if load_word(found + abi.TYPE, 0) != value.type:
        return False
    handle = found + torch.handle
    if load_word(load_word(handle, 0) + torch.keys, 0) != value.keys:
        return False
    return (
        _has_layout(torch, handle, at(Layout, value.layout))
        and _records_grad(functions, torch, found) == value.records_grad
    )


@inline
def _has_layout(torch: Torch, handle: int, layout: Layout) -> bool:
    """Whether a tensor has this layout."""
    found, rank, expected = stack_words(4), layout.rank, layout.sizes
    failed = call_address(torch.get_dim, handle, found)
    failed |= call_address(torch.get_dtype, handle, found + 8)
    failed |= call_address(torch.get_sizes, handle, found + 16)
    failed |= call_address(torch.get_strides, handle, found + 24)
    if failed & 0xFFFFFFFF or load_word(found, 0) != rank or load_i32(found + 8, 0) != layout.dtype:
        return False
    same, sizes, strides = True, load_word(found, 2), load_word(found, 3)
    for axis in range(rank):
        same &= load_word(sizes, axis) == load_word(expected, axis)
        same &= load_word(strides, axis) == load_word(expected, rank + axis)
    return same


@inline
def _records_grad(functions: Functions, torch: Torch, tensor: int) -> int:
    """1 if autograd records operations on a tensor, else 0."""
    if not call_address(torch.records_grad) & 0xFF:
        return 0
    found = call_address(functions.PyObject_GetAttr, tensor, torch.requires_grad)
    if found == 0:
        call_address(functions.PyErr_Clear)
        return 1
    call_address(functions.Py_DecRef, found)
    return 1 if found == torch.true else 0


@inline
def is_watched(functions: Functions, torch: Torch, watchers: int) -> bool:
    """Whether PyTorch must see every call now, for a dispatch mode, a trace or a functorch transformation."""
    level = call_address(functions.PyDict_GetItem, torch.levels, torch.level)
    watched = level != torch.no_level
    for number in range(watchers):
        watcher = at(Watcher, torch.watchers, number)
        found = call_address(functions.PyObject_Vectorcall, watcher.function, 0, 0, 0)
        if found == 0:
            call_address(functions.PyErr_Clear)
            return True
        call_address(functions.Py_DecRef, found)
        watched |= found != watcher.unwatched
    return watched


@inline
def data_of(torch: int, array: int) -> int:
    """The address of the elements of an array or, if `torch` is not 0, of a tensor; 0 for one without memory."""
    if torch == 0:
        return load_word(array + abi.DATA, 0)
    known, found = at(Torch, torch), stack_words(1)
    if call_address(known.get_data, array + known.handle, found) & 0xFFFFFFFF:
        return 0
    return load_word(found, 0)


@inline
def new_tensor(torch: Torch, layout: Layout) -> int:
    """A new tensor on the CPU; 0 if PyTorch cannot make it."""
    made, rank, sizes = stack_words(1), layout.rank, layout.sizes
    if call_address(torch.empty, rank, sizes, sizes + 8 * rank, layout.dtype, 0, ANY_CPU, made) & 0xFFFFFFFF:
        return 0
    tensor = call_address(torch.wrap, load_word(made, 0))
    call_address(torch.delete, load_word(made, 0))
    return tensor


SLOTS: Final = 16  # most entries of a function
CONTAINERS: Final = 16  # most containers of one call: its arguments, and the sequences and records among them
TABLES: Final = 3  # tables with a word for each operand: the addresses of elements, the objects, the results
NONE = -1


@structure
class Table(Structure):
    """What native code knows of a public function: addresses, those of its entries among them."""

    functions: int  # the C functions, `Functions`
    torch: int  # `Torch`
    python: int  # the Python function
    team: int  # the word that holds the team of threads
    entries: int  # SLOTS words: the addresses of the entries, 0 behind the last one


@structure
class Entry(Structure):
    """A signature, and how its calls are answered."""

    positional: int  # how many positional arguments
    named: int
    names: int  # the addresses of the names
    values: int  # how many values there are, and the first `Value`
    first_value: int
    owner: int  # the list that owns the entry's memory
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
    tables_from: int  # the source of memory for the tables of operands, as `pool.source` gives it
    operands: int
    first_operand: int
    results: int  # how many of the operands, the last ones, are returned; 0 if `out` is
    # The operands' numbers, sorted by the addresses of the last call. Native code changes this order; it holds the
    # interpreter's lock while it does, and calls no other code.
    order: int


LEFT_OUT, ARGUMENT, NEW, KEPT = range(4)


@structure
class Operand(Structure):
    """Where an operand comes from.

    An ARGUMENT stands in a container at an index. A NEW result has a layout. An object is KEPT by the entry.
    """

    source: int
    container: int
    index: int
    object: int  # the one that is kept; of a new result the Python function that makes it, or 0 for native code
    layout: int


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
        if load_word(names + abi.TUPLE_ITEMS, number) != load_word(entry.names, number):
            return False
    for number in range(entry.values):
        value = at(Value, entry.first_value, number)
        found = load_word(load_word(items, value.container), value.index)
        if not fits(at(Functions, table.functions), table.torch, found, value, items):
            return False
    return True


# --- operands and results ------------------------------------------------------------------------------------------


@inline
def _gather(functions: Functions, entry: Entry, torch: int, items: int, objects: int, operands: int) -> bool:
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
                call_address(functions.Py_IncRef, found)
        elif operand.source == KEPT:
            found = operand.object
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
            call_address(functions.Py_DecRef, load_word(objects, number))


@inline
def _write_results(functions: Functions, entry: Entry, torch: int, objects: int, operands: int, results: int) -> int:
    """Write the results, new ones or operands, and the addresses of new ones' elements into the table of operands.

    Returns how many results there are: too few if one could not be allocated.
    """
    first = entry.operands - entry.results
    for number in range(entry.results):
        operand = at(Operand, entry.first_operand, first + number)
        if operand.source != NEW:
            made = load_word(objects, first + number)
            call_address(functions.Py_IncRef, made)
        elif operand.object:
            made = call_address(functions.PyObject_Vectorcall, operand.object, 0, 0, 0)
        elif torch:
            made = new_tensor(at(Torch, torch), at(Layout, operand.layout))
        else:
            layout, kind = at(Layout, operand.layout), functions.array
            call_address(functions.Py_IncRef, layout.dtype)  # NewFromDescr takes a reference over
            made = call_address(functions.new_array, kind, layout.dtype, layout.rank, layout.sizes, 0, 0, 0, 0)
        if made == 0:
            return number
        store_word(results, number, made)
        if operand.source == NEW:
            store_word(operands, first + number, data_of(torch, made))
    return entry.results


# --- the call ------------------------------------------------------------------------------------------------------


@inline
def _run(functions: Functions, entry: Entry, operands: int, team: int) -> int:
    """Run the plan; its status."""
    plan, unlocked, thread = at(Plan, entry.plan), entry.unlocked, 0
    if not entry.trusted and may_overlap(plan.couples, plan.spans, behind(plan), operands, entry.order):
        return OVERLAP
    run = functions.run if team else 0
    if unlocked:
        thread = call_address(functions.PyEval_SaveThread)
    status = run_plan(plan, operands, run, team, 0)
    if unlocked:
        call_address(functions.PyEval_RestoreThread, thread)
    return status


@inline
def _answer(functions: Functions, entry: Entry, items: int, results: int) -> int:
    """The function's answer: `out`, one result, a tuple of results, or lists of them; 0 if Python cannot make it."""
    count, lists, new_tuple, set_item = entry.results, entry.lists, functions.PyTuple_New, functions.PyTuple_SetItem
    if entry.out != NONE:
        value = load_word(load_word(items, 0), entry.out)
        call_address(functions.Py_IncRef, value)
        return value
    if lists == 0:
        return load_word(results, 0) if count == 1 else collect(functions, new_tuple, set_item, results, count)
    length = count // lists
    for number in range(lists):
        first = results + 8 * number * length
        made = collect(functions, functions.PyList_New, functions.PyList_SetItem, first, length)
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
    answer, made = 0, 0
    if _gather(functions, entry, torch, items, objects, operands):
        made = _write_results(functions, entry, torch, objects, operands, results)
        status = OVERLAP
        if made == entry.results:
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
    answer = call_address(functions.PyObject_Vectorcall, entry.apply, arguments, entry.operands, 0)
    if answer and entry.item != NONE:
        chosen = load_word(answer + abi.TUPLE_ITEMS, entry.item)
        call_address(functions.Py_IncRef, chosen)
        call_address(functions.Py_DecRef, answer)
        return chosen
    return answer


@inline
def _run_entry(table: Table, entry: Entry, items: int, team: int) -> int:
    """Answer a call that fits the entry; 0 if the Python function shall answer, or if an exception was raised."""
    functions, torch = at(Functions, table.functions), table.torch if entry.is_torch else 0
    owner, watchers, answer = entry.owner, entry.watchers, 0
    call_address(functions.Py_IncRef, owner)  # another thread may replace the entry; the owner keeps its memory
    if not (torch and watchers != NONE and is_watched(functions, at(Torch, torch), watchers)):
        answer = _apply(functions, entry, items) if entry.apply else _run_plan(functions, entry, torch, items, team)
    call_address(functions.Py_DecRef, owner)
    return answer


@inline
def _has_raised(functions: Functions) -> bool:
    """Whether an exception is to be passed on.

    MemoryError and ValueError are not: the Python function raises better ones.
    """
    if call_address(functions.PyErr_Occurred) == 0:
        return False
    for error in (functions.memory_error, functions.value_error):
        if call_address(functions.PyErr_ExceptionMatches, error) & 0xFFFFFFFF:
            call_address(functions.PyErr_Clear)
            return False
    return True


@native(4)
def call(function: int, arguments: int, count: int, names: int) -> int:
    """The function that CPython calls: function(*arguments[:count], and the arguments behind them by these names)."""
    table = at(Table, at(abi.OwnWords, function + abi.OWN_WORDS).table)
    functions, positional, named = at(Functions, table.functions), count & abi.COUNT, 0
    if names:
        named = load_word(names + abi.SIZE, 0)
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
    return call_address(functions.PyObject_Vectorcall, table.python, arguments, count, names)
