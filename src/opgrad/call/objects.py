"""Compares the objects that a call is given, numbers, arrays, sequences and tensors, with the values of an entry.

`abi` has the layouts of these objects in memory.
"""

from typing import Final

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.structures import Structure, at, structure
from opgrad.cpu.compiler.words import call_address, load_i32, load_word, stack_words, store_word
from opgrad.cpu.runtime.abi import (
    DATA,
    DTYPE,
    FIELDS,
    FLAGS,
    LIST_ITEMS,
    RANK,
    SHAPE,
    SIZE,
    STRIDES,
    TUPLE_ITEMS,
    TYPE,
    VALUE,
)  # fmt: skip

EQ: Final = 2  # Py_EQ


@structure
class Functions(Structure):
    """The addresses of C functions of Python and NumPy, of the function that shares parts, and of types."""

    vectorcall: int
    take: int  # a reference
    drop: int
    save_thread: int
    restore_thread: int
    equals: int
    clear: int
    is_error: int
    occurred: int
    new_tuple: int
    set_item: int
    new_list: int
    set_list_item: int
    get_attribute: int
    get_item: int
    as_int64: int
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


OBJECT, FLOAT, EQUAL, TUPLE, LIST, SAME, ARRAY, TENSOR, RECORD, INTEGER = range(10)


@structure
class Value(Structure):
    """What one value of a call must be. Which fields count depends on its kind.

    An OBJECT is one itself, and EQUAL to one is a value of its type. A FLOAT has its bits. A TUPLE and a LIST have a
    length. A value that is the SAME as one before is where that is. A RECORD is an object with slots. An INTEGER may be
    any. The strides of an ARRAY or a TENSOR follow its sizes.
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
    dtype: int
    flags: int
    keys: int
    records_grad: int
    rank: int
    sizes: int


@structure
class Numbers(Structure):
    """Where the integers of a record stand: the container of its fields, their number, and the index of each."""

    container: int
    count: int
    places: int


@inline
def _is_array(array: int, value: Value) -> bool:
    """Whether an array has the type, dtype, flags, rank, sizes and strides of the value."""
    rank, flags, sizes = value.rank, value.flags, value.sizes
    as_planned = load_word(array + TYPE, 0) == value.type
    if as_planned:
        as_planned = load_word(array + DTYPE, 0) == value.dtype and load_i32(array + RANK, 0) == rank
        as_planned &= load_i32(array + FLAGS, 0) & flags == flags
    if as_planned:
        shape, strides = load_word(array + SHAPE, 0), load_word(array + STRIDES, 0)
        for axis in range(rank):
            as_planned &= load_word(shape, axis) == load_word(sizes, axis)
            as_planned &= load_word(strides, axis) == load_word(sizes, rank + axis)
    return as_planned


@inline
def _is_number(functions: Functions, found: int, value: Value) -> bool:
    """Whether an object has exactly the number's type, one of Python's own, and equals the number."""
    if found == value.object:
        return True
    if load_word(found + TYPE, 0) != value.type:
        return False
    if value.kind == FLOAT:
        return load_word(found + VALUE, 0) == value.bits
    return call_address(functions.equals, found, value.object, EQ) & 0xFFFFFFFF == 1


@inline
def _is_sequence(found: int, value: Value, items: int) -> bool:
    """Whether an object has this type and length; if so, write the address of its items to the table of containers."""
    if load_word(found + TYPE, 0) != value.type or load_word(found + SIZE, 0) != value.length:
        return False
    store_word(items, value.inside, found + TUPLE_ITEMS if value.kind == TUPLE else load_word(found + LIST_ITEMS, 0))
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
    if kind in (RECORD, INTEGER):
        if kind == RECORD:
            store_word(items, value.inside, found + FIELDS)
        return load_word(found + TYPE, 0) == value.type
    return _is_number(functions, found, value)


@inline
def write_numbers(functions: Functions, items: int, wanted: Numbers, numbers: int) -> bool:
    """Write the integers that stand in fields of a record; False if one of them does not fit int64."""
    fields, fit = load_word(items, wanted.container), True
    for number in range(wanted.count):
        found = call_address(functions.as_int64, load_word(fields, load_word(wanted.places, number)))
        if found == -1 and call_address(functions.occurred):
            call_address(functions.clear)
            fit = False
        store_word(numbers, number, found)
    return fit


# --- several objects ----------------------------------------------------------------------------------------------


@inline
def drop(functions: Functions, results: int, count: int) -> None:
    """Give back references to objects."""
    for number in range(count):
        call_address(functions.drop, load_word(results, number))


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
    if load_word(found + TYPE, 0) != value.type:
        return False
    handle = found + torch.handle
    if load_word(load_word(handle, 0) + torch.keys, 0) != value.keys:
        return False
    return _has_layout(torch, handle, value) and _records_grad(functions, torch, found) == value.records_grad


@inline
def _has_layout(torch: Torch, handle: int, value: Value) -> bool:
    """Whether a tensor has the dtype, sizes and strides of the value."""
    found, rank, expected = stack_words(4), value.rank, value.sizes
    failed = call_address(torch.get_dim, handle, found)
    failed |= call_address(torch.get_dtype, handle, found + 8)
    failed |= call_address(torch.get_sizes, handle, found + 16)
    failed |= call_address(torch.get_strides, handle, found + 24)
    if failed & 0xFFFFFFFF or load_word(found, 0) != rank or load_i32(found + 8, 0) != value.dtype:
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
    found = call_address(functions.get_attribute, tensor, torch.requires_grad)
    if found == 0:
        call_address(functions.clear)
        return 1
    call_address(functions.drop, found)
    return 1 if found == torch.true else 0


@inline
def is_watched(functions: Functions, torch: Torch, watchers: int) -> bool:
    """Whether PyTorch must see every call now, for a dispatch mode, a trace or a functorch transformation."""
    level = call_address(functions.get_item, torch.levels, torch.level)
    watched = level != torch.no_level
    for number in range(watchers):
        watcher = at(Watcher, torch.watchers, number)
        found = call_address(functions.vectorcall, watcher.function, 0, 0, 0)
        if found == 0:
            call_address(functions.clear)
            return True
        call_address(functions.drop, found)
        watched |= found != watcher.unwatched
    return watched


@inline
def data_of(torch: int, array: int) -> int:
    """The address of the elements of an array or, if `torch` is not 0, of a tensor; 0 for one without memory."""
    if torch == 0:
        return load_word(array + DATA, 0)
    known, found = at(Torch, torch), stack_words(1)
    if call_address(known.get_data, array + known.handle, found) & 0xFFFFFFFF:
        return 0
    return load_word(found, 0)


@inline
def new_tensor(torch: Torch, dtype: int, device: int, rank: int, sizes: int) -> int:
    """A new tensor; 0 if PyTorch cannot make it. sizes: the address of sizes and strides."""
    made = stack_words(1)
    if call_address(torch.empty, rank, sizes, sizes + 8 * rank, dtype, 0, device, made) & 0xFFFFFFFF:
        return 0
    tensor = call_address(torch.wrap, load_word(made, 0))
    call_address(torch.delete, load_word(made, 0))
    return tensor
