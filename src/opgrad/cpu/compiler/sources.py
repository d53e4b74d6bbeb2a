"""Computes one digest of all that determines a function's machine code: the imported code, and the compiler.

Numba compiles a function from its bytecode, together with the functions that it calls, and turns the global numbers
that it reads into constants. So the digest is computed from these objects as they are in this process, not from source
files. A file may have changed since it was imported, by an edit or an upgrade. With a digest of files, this process
would then store old machine code under the new source's name, where the next process would find it.

Of the compiler, the digest covers the source files, read when this module is imported. Most of the compiler's modules
are never imported by a process that compiles nothing, so there are no objects to compute a digest from.
"""

import dis
import functools
import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from opgrad.cpu.compiler.parameters import annotations, fields

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # the folder that holds opgrad/
# The files of this folder that decide what a function is compiled to. The others store, find and link the result.
HERE = "decorators", "parameters", "simd", "target", "words"
DECIDING = (*HERE, os.path.join("lowering", "*"))
PLAIN = (int, float, complex, str, bytes, type(None), type(Ellipsis))


class _UnknownError(Exception):
    """A function uses an object of a type that has no digest, so its machine code cannot be kept on disk."""


def of_file(path: str) -> bytes | None:
    """The digest of one file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()
    except OSError:
        return None


def compiler() -> bytes | None:
    """The digest of the compiler's files as they are now; None if they cannot be read, as inside a zip archive."""
    here = os.path.dirname(__file__)
    paths = sorted(path for name in DECIDING for path in glob.glob(os.path.join(here, name + ".py")))
    found = [of_file(path) for path in paths]
    known = [each for each in found if each is not None]
    return hashlib.sha256(b"".join(known)).digest() if known and len(known) == len(found) else None


COMPILER = compiler()


@functools.cache
def compiler_is_imported() -> bool:
    """Whether the compiler's files are still those that `COMPILER` is the digest of.

    The modules of `lowering` are imported when the first function is compiled. If their files have changed by then,
    the digests of this process do not describe the compiler that it uses, and its code must not be kept.
    """
    return compiler() == COMPILER


@functools.cache
def digest(function: Callable[..., Any]) -> bytes | None:
    """The digest of all that determines the function's machine code; None if it uses an object that has no digest."""
    parameters = (f"{name}:{_annotation(kind)}" for name, kind in annotations(function).items())
    try:
        made_of = "\0".join((*parameters, *_whole(function)))
    except _UnknownError:
        return None
    return COMPILER and hashlib.sha256(COMPILER + made_of.encode()).digest()


def object_name(function: Callable[..., Any], interface: str) -> str | None:
    """The name of a function's object code in the cache; None if it has no digest, so that the code cannot be kept."""
    made_of = digest(function)
    return made_of and hashlib.sha256(interface.encode() + b"\0" + made_of).hexdigest()[:32]


def reached(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The function and all functions that it calls, directly or through others, each once, in a fixed order."""
    found, waiting = set(), [function]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            yield one
            waiting += reversed(_own(one)[1])


def _whole(function: Callable[..., Any]) -> Iterator[str]:
    """A text for each function that `reached` gives, with the numbers of the functions that it uses."""
    found = {each: number for number, each in enumerate(reached(function))}
    for each in found:
        text, inside = _own(each)
        yield f"{text} {[found[one] for one in inside]}"


@functools.cache
def _own(function: Callable[..., Any]) -> tuple[str, list[Callable[..., Any]]]:
    """A text of a function's own code and of the constants that it reads, and the functions that it uses."""
    functions: list[Callable[..., Any]] = []
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [_code(function.__code__, function.__doc__)]
    parts += [f"{name}={_value(value, functions)}" for name, value in _used(function)]
    parts += [_value(value, functions) for value in (*cells, function.__defaults__, function.__kwdefaults__)]
    return " ".join(parts), functions


def _used(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The names and values of the globals that a function reads, and of the attributes that it reads from modules.

    `co_names` lists globals and attributes together, and an attribute may belong to a module or to any other value. If
    a name is both a global and an attribute of a module in use, the instructions tell which one is meant. They are
    decoded only in that case, since decoding takes as long as all the rest.
    """
    space = function.__globals__
    names = attributes = dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names)
    if any(name in space for module in _modules(space, names) for name in names if name in vars(module)):
        loads = [each for code in _codes(function.__code__) for each in dis.get_instructions(code)]
        names = dict.fromkeys(each.argval for each in loads if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        attributes = dict.fromkeys(each.argval for each in loads if each.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for name in names:
        if name in space and not isinstance(space[name], ModuleType):
            yield name, space[name]
    waiting = list(_modules(space, names))
    while waiting:
        module = vars(waiting.pop())
        yield from ((name, module[name]) for name in attributes if not isinstance(module.get(name, dis), ModuleType))
        waiting += _modules(module, attributes)


def _modules(space: dict[str, Any], names: dict[str, None]) -> Iterator[ModuleType]:
    return (space[name] for name in names if isinstance(space.get(name), ModuleType))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions that are defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code(code: CodeType, documentation: str | None = None) -> str:
    """A text of a function's instructions, constants and names, without its comments, docstring and line numbers."""
    constants = [_constant(each) for each in code.co_consts if each is None or each != documentation]
    names = code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return f"{code.co_code.hex()} {constants} {names} {counts} {code.co_exceptiontable.hex()}"


def _constant(value: Any) -> str:
    """A text of a constant in code. The items of a set are sorted, since their order differs between processes."""
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    return f"{{{','.join(sorted(map(repr, value)))}}}" if isinstance(value, frozenset) else repr(value)


def _value(value: Any, functions: list[Callable[..., Any]]) -> str:
    """A text of a value that a function uses.

    If the value is a function itself, it is appended to `functions`, and `_whole` refers to it by its number.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return f"{_named(type(value))}({','.join(_value(each, functions) for each in value)})"
    if getattr(value, "is_operation", False):  # its meaning stands in the compiler's files, which `COMPILER` covers
        return _named(value)
    if isinstance(value, FunctionType):
        functions.append(value)
        return "function"
    if isinstance(value, type):
        return _annotation(value)
    if isinstance(value, BuiltinFunctionType):
        return _named(value)
    raise _UnknownError(type(value).__name__)


def _annotation(kind: Any) -> str:
    """A text of a class or an annotation. A tuple of annotations, named or not, includes the text of each item."""
    own = "" if isinstance(kind, tuple) else repr(kind)
    return f"{own}{getattr(kind, '_fields', '')}({','.join(map(_annotation, fields(kind)))})"


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
