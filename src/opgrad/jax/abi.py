"""The part of XLA's FFI that is used here: where the fields of its structures lie, and whether they lie there.

XLA calls a handler with the address of a call frame, a C structure (`xla/ffi/api/c_api.h`, which jaxlib ships). Every
structure begins with its size, so a handler can tell one that has changed from the one that is described here: numbers
are bytes from its beginning. Fields are only ever added at an end.
"""

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import call_address, load_i32, load_word, stack_words, store_i32, store_word

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
