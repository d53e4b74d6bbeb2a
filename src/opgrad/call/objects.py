"""Compares the objects that a call is given, numbers, arrays, sequences and tensors, with the words of an entry.

`abi` has the layouts of these objects in memory.
"""

from typing import Any, Final

from opgrad.cpu.compiler.decorators import inline
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
    WRITEABLE,
)  # fmt: skip

# Words of the table of C functions and types.
CALL, INC_REF, DEC_REF, SAVE_THREAD, RESTORE_THREAD, EQUALS, CLEAR, IS_ERROR, OCCURRED = range(9)
NEW_TUPLE, SET_ITEM, NEW_LIST, SET_LIST_ITEM, GET_ATTRIBUTE, GET_ITEM, AS_INT64, NEW_ARRAY, ARRAY, RUN = range(9, 19)
VALUE_ERROR, MEMORY_ERROR = range(19, 21)
# Words of the table about PyTorch: offsets in its objects, C functions, names and objects. Then come the watchers, two
# words each: a function, and the object that it returns if nothing in PyTorch needs to see calls.
IMPL, KEYS, GET_DIM, GET_SIZES, GET_STRIDES, GET_DTYPE, GET_DATA, RECORDS_GRAD, EMPTY, WRAP, DELETE = range(11)
REQUIRES_GRAD, TRUE, LEVELS, LEVEL, NO_LEVEL, WATCHERS = range(11, 17)

EQ: Final = 2  # Py_EQ

# The kinds of values, and the words that follow the kind. OBJECT: its address. FLOAT: address, type, the float's bits.
# EQUAL, compared by ==: address, type. TUPLE and LIST: type, length, the number that its items get as a container.
# SAME, an object that occurred before in this call: the container and index of the first. AN_ARRAY: `array_words`.
# TENSOR: type, keys, whether autograd records it, dtype, rank, sizes, strides. RECORD, an object with slots: type, the
# number that its fields get as a container. INTEGER, of any value: type.
OBJECT, FLOAT, EQUAL, TUPLE, LIST, SAME, AN_ARRAY, TENSOR, RECORD, INTEGER = range(10)
OF_TYPE, OF_KEYS, OF_GRAD, OF_DTYPE, OF_RANK, OF_SIZES = range(6)


# The words of an array: its type, its dtype's address, the flags that it must have, its rank; then sizes and strides.
ARRAY_SIZES: Final = 4


@inline
def is_as_planned(array: int, expected: int) -> bool:
    """Whether an array has the type, dtype, flags, rank, sizes and strides that these words describe."""
    flags, rank = load_word(expected, 2), load_word(expected, 3)
    as_planned = load_word(array + TYPE, 0) == load_word(expected, 0)
    if as_planned:
        as_planned = load_word(array + DTYPE, 0) == load_word(expected, 1) and load_i32(array + RANK, 0) == rank
        as_planned &= load_i32(array + FLAGS, 0) & flags == flags
    if as_planned:
        shape, strides = load_word(array + SHAPE, 0), load_word(array + STRIDES, 0)
        for axis in range(rank):
            as_planned &= load_word(shape, axis) == load_word(expected, ARRAY_SIZES + axis)
            as_planned &= load_word(strides, axis) == load_word(expected, ARRAY_SIZES + rank + axis)
    return as_planned


def array_words(array: Any, writeable: bool) -> list[int]:
    """The words of an array, with which `is_as_planned` compares another."""
    flags = WRITEABLE if writeable else 0
    return [id(type(array)), id(array.dtype), flags, array.ndim, *array.shape, *array.strides]


@inline
def is_number(functions: int, value: int, kind: int, expected: int) -> bool:
    """Whether a value has exactly the number's type, one of Python's own, and equals the number."""
    if value == load_word(expected, 0):
        return True
    if load_word(value + TYPE, 0) != load_word(expected, 1):
        return False
    if kind == FLOAT:
        return load_word(value + VALUE, 0) == load_word(expected, 2)
    return call_address(load_word(functions, EQUALS), value, load_word(expected, 0), EQ) & 0xFFFFFFFF == 1


@inline
def is_sequence(value: int, kind: int, expected: int, items: int) -> bool:
    """Whether a value has this type and length; if so, write the address of its items to the table of containers."""
    if load_word(value + TYPE, 0) != load_word(expected, 0) or load_word(value + SIZE, 0) != load_word(expected, 1):
        return False
    store_word(
        items, load_word(expected, 2), value + TUPLE_ITEMS if kind == TUPLE else load_word(value + LIST_ITEMS, 0)
    )
    return True


@inline
def fits(functions: int, torch: int, value: int, kind: int, expected: int, items: int) -> bool:
    """Whether a value fits its record; 0, a field that holds no object, never does."""
    if value == 0:
        return False
    if kind == AN_ARRAY:
        return is_as_planned(value, expected)
    if kind == OBJECT:
        return value == load_word(expected, 0)
    if kind == TENSOR:
        return _is_tensor(functions, torch, value, expected)
    if kind in (TUPLE, LIST):
        return is_sequence(value, kind, expected, items)
    if kind == SAME:
        return value == load_word(load_word(items, load_word(expected, 0)), load_word(expected, 1))
    if kind in (RECORD, INTEGER):
        if kind == RECORD:
            store_word(items, load_word(expected, 1), value + FIELDS)
        return load_word(value + TYPE, 0) == load_word(expected, 0)
    return is_number(functions, value, kind, expected)


@inline
def write_numbers(functions: int, items: int, expected: int, numbers: int) -> bool:
    """Write the integers that stand in fields of a record; False if one of them does not fit int64.

    expected: the number of the container that holds the fields, the number of integers, and the index of each field.
    """
    found, fit = load_word(items, load_word(expected, 0)), True
    for number in range(load_word(expected, 1)):
        value = call_address(load_word(functions, AS_INT64), load_word(found, load_word(expected, 2 + number)))
        if value == -1 and call_address(load_word(functions, OCCURRED)):
            call_address(load_word(functions, CLEAR))
            fit = False
        store_word(numbers, number, value)
    return fit


# --- several objects ----------------------------------------------------------------------------------------------


@inline
def drop(functions: int, results: int, count: int) -> None:
    """Give back references to objects."""
    for number in range(count):
        call_address(load_word(functions, DEC_REF), load_word(results, number))


@inline
def collect(functions: int, new: int, set_item: int, results: int, count: int) -> int:
    """A tuple or a list that takes over references to objects; if Python cannot make it, they are given back: 0."""
    made = call_address(load_word(functions, new), count)
    if made == 0:
        drop(functions, results, count)
        return 0
    for number in range(count):
        call_address(load_word(functions, set_item), made, number, load_word(results, number))
    return made


# --- tensors -------------------------------------------------------------------------------------------------------


@inline
def _is_tensor(functions: int, torch: int, value: int, expected: int) -> bool:
    if load_word(value + TYPE, 0) != load_word(expected, OF_TYPE):
        return False
    handle = value + load_word(torch, IMPL)
    if load_word(load_word(handle, 0) + load_word(torch, KEYS), 0) != load_word(expected, OF_KEYS):
        return False
    return _has_layout(torch, handle, expected) and _records(functions, torch, value) == load_word(expected, OF_GRAD)


@inline
def _has_layout(torch: int, handle: int, expected: int) -> bool:
    """Whether a tensor has the dtype, sizes and strides of its record."""
    found, rank = stack_words(4), load_word(expected, OF_RANK)
    failed = call_address(load_word(torch, GET_DIM), handle, found)
    failed |= call_address(load_word(torch, GET_DTYPE), handle, found + 8)
    failed |= call_address(load_word(torch, GET_SIZES), handle, found + 16)
    failed |= call_address(load_word(torch, GET_STRIDES), handle, found + 24)
    if failed & 0xFFFFFFFF or load_word(found, 0) != rank or load_i32(found + 8, 0) != load_word(expected, OF_DTYPE):
        return False
    same, sizes, strides = True, load_word(found, 2), load_word(found, 3)
    for axis in range(rank):
        same &= load_word(sizes, axis) == load_word(expected, OF_SIZES + axis)
        same &= load_word(strides, axis) == load_word(expected, OF_SIZES + rank + axis)
    return same


@inline
def _records(functions: int, torch: int, tensor: int) -> int:
    """1 if autograd records operations on a tensor, else 0."""
    if not call_address(load_word(torch, RECORDS_GRAD)) & 0xFF:
        return 0
    found = call_address(load_word(functions, GET_ATTRIBUTE), tensor, load_word(torch, REQUIRES_GRAD))
    if found == 0:
        call_address(load_word(functions, CLEAR))
        return 1
    call_address(load_word(functions, DEC_REF), found)
    return 1 if found == load_word(torch, TRUE) else 0


@inline
def is_watched(functions: int, torch: int, watchers: int) -> bool:
    """Whether PyTorch must see every call now, for a dispatch mode, a trace or a functorch transformation."""
    level = call_address(load_word(functions, GET_ITEM), load_word(torch, LEVELS), load_word(torch, LEVEL))
    watched = level != load_word(torch, NO_LEVEL)
    for number in range(watchers):
        watcher = torch + 8 * (WATCHERS + 2 * number)
        found = call_address(load_word(functions, CALL), load_word(watcher, 0), 0, 0, 0)
        if found == 0:
            call_address(load_word(functions, CLEAR))
            return True
        call_address(load_word(functions, DEC_REF), found)
        watched |= found != load_word(watcher, 1)
    return watched


@inline
def data_of(torch: int, array: int) -> int:
    """The address of the elements of an array or a tensor; 0 for a tensor without memory."""
    if torch == 0:
        return load_word(array + DATA, 0)
    found = stack_words(1)
    if call_address(load_word(torch, GET_DATA), array + load_word(torch, IMPL), found) & 0xFFFFFFFF:
        return 0
    return load_word(found, 0)


@inline
def new_tensor(torch: int, record: int) -> int:
    """A new tensor. record: dtype, device's number, rank, sizes, strides. 0 if PyTorch cannot make it."""
    made, rank, sizes = stack_words(1), load_word(record, 2), record + 24
    strides, dtype, device = sizes + 8 * rank, load_word(record, 0), load_word(record, 1)
    if call_address(load_word(torch, EMPTY), rank, sizes, strides, dtype, 0, device, made) & 0xFFFFFFFF:
        return 0
    tensor = call_address(load_word(torch, WRAP), load_word(made, 0))
    call_address(load_word(torch, DELETE), load_word(made, 0))
    return tensor
