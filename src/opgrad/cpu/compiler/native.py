"""Compile Python functions to native code, and keep the code on disk.

Numba turns a function into LLVM IR; llvmlite turns that into an object file, which is cached and linked
straight into the process next time, so a warm start never imports Numba. A cache folder belongs to one
version of this folder's source, of Numba, and of the CPU, and a file in it to one version of the function's own
module: Numba's own cache notices neither an edit in another file nor a changed compile flag (numba issues 8359
and 6845).
"""

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from opgrad.cpu.compiler.parameters import Part, Private, Units, annotations, leaves

F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.RLock()
INLINE: list[Callable[..., Any]] = []
CHOOSE: list[Callable[..., Any]] = []


def inline(function: F) -> F:
    """Mark a helper that kernels may call; it becomes part of each of them."""
    INLINE.append(function)
    return function


def by_precision(function: F) -> F:
    """Mark a helper that names, for 32 or 64 bits, the implementation that kernels call in its place."""
    CHOOSE.append(function)
    return function


class Native:
    """A function of int64 parameters and an int64 result, callable from C at `address`."""

    def __init__(self, function: Callable[..., int], count: int):
        self.function = function
        self.count = count
        functools.update_wrapper(self, function)

    @functools.cached_property
    def address(self) -> int:
        return _link(self.function, f"native({self.count})")

    @functools.cached_property
    def call(self) -> Callable[..., int]:
        """The function for Python callers; it releases the interpreter lock."""
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * self.count)(self.address)


def native(count: int) -> Callable[[Callable[..., int]], Native]:
    """Decorate a function of `count` int64 parameters: it is compiled when its address is first needed."""
    return lambda function: Native(function, count)


class Kernel:
    """A function that does some units of the work; `task` makes it callable as `task(arguments, part)`.

    Its parameters are those of opgrad.cpu.compiler.parameters; each fills one or more 8-byte words of the arguments.
    """

    def __init__(self, function: Callable[..., None]):
        self.function = function
        kinds = annotations(function)
        self.takes_units = Units in kinds.values()
        self.takes_part = Part in kinds.values() or "part" in kinds
        given = (Units, Part)
        self.parameters = {name: kind for name, kind in kinds.items() if kind not in given and name != "part"}
        self.takes_private = any(leaf is Private for kind in self.parameters.values() for leaf in leaves(kind))
        self._tasks: dict[tuple[str, ...], int] = {}
        functools.update_wrapper(self, function)

    def task(self, dtypes: Iterable[str], form: str = "task") -> int:
        """The address of the kernel compiled for pointers of these dtypes, in the order of its parameters.

        form: "task", or "stage" for a kernel that a task calls: only a task waits for what it wrote past the cache.
        """
        key = (form, *dtypes)
        found = self._tasks.get(key)
        if found is None:
            found = self._tasks[key] = _link(self.function, f"{form}({','.join(key[1:])})")
        return found


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel; see `Kernel`."""
    return Kernel(function)


def host() -> tuple[str, str]:
    """The CPU's name and features as LLVM spells them; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override."""
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name == "generic" else llvm.get_host_cpu_features().flatten()
    return name, features


@functools.cache
def vector_bytes() -> int:
    """The size of the host's vector registers."""
    features = host()[1].split(",")
    return 64 if "+avx512f" in features else 32 if "+avx2" in features else 16


def vector_lanes(dtype: str) -> int:
    """Elements in a kernel's vectors when it computes in float32 or float64: two registers full."""
    return 2 * vector_bytes() // (8 if dtype == "float64" else 4)


@functools.cache
def cache_folder() -> Path | None:
    """Where this version's object files are; None where no folder can be written (nothing is cached then).

    `OPGRAD_CACHE_DIR` names the parent folder; otherwise it is the user's cache folder.
    """
    parent = os.environ.get("OPGRAD_CACHE_DIR") or _user_cache()
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    digest.update(repr((version("numba"), version("llvmlite"), host(), sys.platform)).encode())
    folder = Path(parent) / digest.hexdigest()[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "opgrad"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "opgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgrad"


def _link(function: Callable[..., Any], form: str) -> int:
    """The address of `function`, from the cache or newly compiled."""
    symbol = f"{function.__module__}.{_name(function)}.{form}"
    with _lock:
        path = _file(symbol, function.__code__.co_filename)
        code = _read(path)
        if code is None:
            code = _compile(function, form, symbol)
            _write(path, code)
        return _load(code)


def _name(function: Callable[..., Any]) -> str:
    """The function's name with those that it was made from, at every depth."""
    inside = [_name(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__qualname__ + (f"({', '.join(inside)})" if inside else "")


@functools.cache
def _source_digest(path: str) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return b""


def _file(symbol: str, source: str) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(symbol.encode() + _source_digest(source)).hexdigest()[:32]
    return folder and folder / f"{name}.o"


def _read(path: Path | None) -> bytes | None:
    """The cached object code; None if there is none or the file is damaged."""
    try:
        data = path.read_bytes() if path else b""
    except OSError:
        return None
    checksum, code = data[:32], data[32:]
    return code if code and hashlib.sha256(code).digest() == checksum else None


def _write(path: Path | None, code: bytes) -> None:
    """Store object code so that no reader ever sees half a file; a full or read-only disk is no error."""
    if path is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError:
        return


ENTRY = "opgrad_entry"  # the one exported symbol of an object file


def assembly(function: Callable[..., Any], dtypes: Iterable[str]) -> str:
    """The assembly text of a kernel's function for pointers of these dtypes."""
    from opgrad.cpu.compiler import lowering

    machine = _machine()
    module = lowering.build(function, "task(" + ",".join(dtypes) + ")", ENTRY)
    return str(machine.emit_assembly(module))


def _compile(function: Callable[..., Any], form: str, symbol: str) -> bytes:
    from opgrad.cpu.compiler import lowering

    machine = _machine()
    module = lowering.build(function, form, ENTRY)
    module.name = symbol
    return bytes(machine.emit_object(module))


@functools.cache
def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    name, features = host()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=name, features=features, opt=3, jit=True)


def _load(code: bytes) -> int:
    import llvmlite.binding as llvm

    _machine()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(ENTRY))
    engine.detach()  # threads may still run the code when the interpreter ends: it is never freed
    return address
